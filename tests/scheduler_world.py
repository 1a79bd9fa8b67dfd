"""A scheduler with simulated workers, and every check that can be made from outside.

The simulated K and V of a position are a checksum of the tenant and of all tokens up to it, as a real model's depend on all
of them. Blocks, of the device and of the host, are poisoned when they are freed and when they are given out, so that a read of
anything but what this request (or an equal prefix) wrote is seen at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

from octavo.engine.request import Request, Status
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import kv_use
from octavo.engine.step import Step, StepOutput

VOCAB = 6  # few tokens: random prompts share prefixes, and ends come early
POISON = -1


def sample(tokens: Sequence[int], sequence_index: int = 0) -> int:
    """The simulated model's next token."""
    return crc32(repr((tokens, sequence_index)).encode()) % VOCAB


def solo(prompt: Sequence[int], max_tokens: int, sequence_index: int = 0) -> list[int]:
    """The output of a prompt that has the machine to itself and no end tokens."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sample(tokens, sequence_index))
    return tokens[len(prompt) :]


def expected(request: Request) -> tuple[list[int], str, int | None]:
    """What a sequence becomes when nothing interferes: its tokens, finish reason and stop reason."""
    tokens = request.token_ids[: request.num_prompt_tokens]
    while True:
        token = sample(tokens, request.sequence_index)
        tokens.append(token)
        if token in request.end_token_ids and len(tokens) - request.num_prompt_tokens > request.min_tokens:
            return tokens, "stop", token if token in request.params.stop_token_ids else None
        if len(tokens) >= request.limit_tokens:
            return tokens, "length", None


def simulated_kv(request: Request, num_tokens: int) -> list[int]:
    """K and V of the first positions."""
    start = crc32(repr(request.cache_root).encode())
    tokens = request.token_ids[:num_tokens]
    return list(accumulate(tokens, lambda seen, token: crc32(b"%d" % token, seen), initial=start))[1:]


class World:
    """Adds and ends requests by name and runs steps, each of them checked."""

    def __init__(
        self, num_blocks: int = 100, block_size: int = 16, *, max_num_seqs: int = 8, budget: int = 64, **settings: Any
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **settings
        )
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.host = [[POISON] * block_size for _ in range(self.scheduler.swap.host.num_blocks)]
        self.requests: dict[str, Request] = {}
        """All sequences there ever were, by name; of several with one name the last."""
        self.sequences: list[Request] = []
        self.ended_early: dict[Request, str] = {}
        self.last = Step()
        self._checked: set[Request] = set()

    @property
    def live(self) -> list[Request]:
        return list(self.scheduler)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        root: object = None,
        ends: Collection[int] = (),
        stops: Collection[int] = (),
        **params: Any,
    ) -> Request:
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, **params),
            priority=priority,
            limit_tokens=len(prompt) + max_tokens,
            end_token_ids=frozenset((*ends, *stops)),
            cache_root=root,
        )
        self.scheduler.add(request)
        self._note([request])
        return request

    def _note(self, requests: Sequence[Request]) -> None:
        self.sequences += requests
        self.requests.update((request.request_id, request) for request in requests)

    def finish(self, name: str, reason: str, stop_reason: str | None = None) -> Request:
        """Ends a sequence from outside."""
        request = self.scheduler.finish(name, reason, stop_reason)
        assert request is self.requests[name]
        self.ended_early[request] = reason
        self.check()
        return request

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.reset_prefix_cache()
        self.check()

    def output(self, name: str) -> list[int]:
        return self.requests[name].output_token_ids

    def step(self, failing: Collection[str] = (), broken_moves: bool = False) -> dict[str, int]:
        """Runs a step, with errors in the requests named; returns how many tokens of which request were in it.

        With `broken_moves`, blocks that the step moves are lost and the engine says so.
        """
        scheduler = self.scheduler
        running = {request: request.num_preemptions for request in scheduler.running}
        self.last = step = scheduler.schedule()
        assert bool(step.requests) == (len(scheduler) > 0), "deadlock: requests are left, but the step is empty"
        preempted = [request for request, before in running.items() if request.num_preemptions > before]
        assert all(request.num_preemptions <= running[request] + 1 for request in preempted), (
            "preempted twice in a step"
        )
        first = next(iter(running), None)
        assert first not in preempted or (first.overtook and scheduler.running), "the first in order was preempted"
        scheduled = dict(zip(step.requests, step.num_scheduled_tokens, strict=True))
        self._check_step(scheduled, used_up=bool(preempted))
        if broken_moves and (step.swap_out or step.swap_in or step.block_copies):
            scheduler.distrust_host()
            self.host = [[POISON] * scheduler.pool.block_size for _ in self.host]
            output, failing = StepOutput([-1] * len(scheduled)), {request.request_id for request in scheduled}
        else:
            output = self.execute(step)
        output.errors = {i: "broke" for i, request in enumerate(scheduled) if request.request_id in failing}
        self.ended_early.update((step.requests[i], "error") for i in output.errors)
        for i, children in scheduler.commit(step, output).items():
            assert [child.sequence_index for child in children] == list(range(1, step.requests[i].params.n))
            self._note(children)
        self.check()
        return {request.request_id: num for request, num in scheduled.items()}

    def _check_step(self, scheduled: dict[Request, int], used_up: bool) -> None:
        scheduler, step = self.scheduler, self.last
        assert len(scheduled) == len(step.requests), "a request is in the step twice"
        assert step.total_tokens == sum(scheduled.values()) <= scheduler.max_num_batched_tokens
        assert min(scheduled.values(), default=1) > 0
        assert all(request.status is Status.RUNNING for request in scheduled)
        assert not scheduler.running or scheduler.running[0] in scheduled, "the first in order stands still"
        used_up = used_up or step.total_tokens == scheduler.max_num_batched_tokens or not scheduler.pool.num_free
        for request in scheduler.running:
            lacking = len(request.token_ids) - request.num_computed_tokens
            assert 0 <= scheduled.get(request, 0) <= lacking
            assert lacking != 1 or scheduled[request] == 1, "a decoding request was not scheduled"
            assert used_up or scheduled[request] == lacking, "budget and blocks are left for one that could use them"
        pending = sum(request.num_pending_forks for request in scheduler.running)
        assert pending == scheduler._pending_forks
        assert len(scheduler.running) + pending <= scheduler.max_num_seqs

    def execute(self, step: Step) -> StepOutput:
        """Writes the simulated K and V of the step, reads back each request's whole history, and samples."""
        pool, size = self.scheduler.pool, self.scheduler.pool.block_size
        memory, host = self.memory, self.host
        for sources, targets, pairs in (
            (memory, host, step.swap_out),
            (host, memory, step.swap_in),
            (memory, memory, step.block_copies),
        ):
            moved = {target: list(sources[source]) for source, target in pairs}
            assert len(moved) == len(pairs), "two blocks are moved to one"
            for target, content in moved.items():
                targets[target] = content
        scheduled = [
            (request, request.num_computed_tokens, request.num_computed_tokens + num)
            for request, num in zip(step.requests, step.num_scheduled_tokens, strict=True)
        ]
        written = set()
        for request, start, end in scheduled:
            assert pool.blocks_for(end) == len(request.block_ids)
            for block in request.block_ids[pool.blocks_for(start) :]:
                self.memory[block] = [POISON] * size
            values = simulated_kv(request, end)
            for position in range(start, end):
                slot = request.block_ids[position // size], position % size
                assert pool.ref_counts[slot[0]] == 1, "a shared block is written"
                assert slot not in written
                written.add(slot)
                self.memory[slot[0]][slot[1]] = values[position]
        output = StepOutput([])
        for i, (request, _, end) in enumerate(scheduled):
            read = [value for block in request.block_ids for value in self.memory[block]]
            window = self.scheduler.window
            seen = 0 if window is None else max(0, request.num_computed_tokens - window + 1) // size
            assert request.num_dropped_blocks == seen, "a block outside the window is held, or one inside is not"
            assert read[seen * size : end] == simulated_kv(request, end)[seen * size :]
            if end < len(request.token_ids):
                output.token_ids.append(-1)
                continue
            output.token_ids.append(sample(request.token_ids, request.sequence_index))
            if request.num_pending_forks:
                output.fork_token_ids[i] = [sample(request.token_ids, j) for j in range(1, request.params.n)]
        return output

    def check(self) -> None:
        """What holds between steps; poisons what is free."""
        scheduler, pool, live = self.scheduler, self.scheduler.pool, self.live
        pool.check(request.held_block_ids for request in live)
        for block, references in enumerate(pool.ref_counts):
            if not references and pool._nodes[block] is None:
                self.memory[block] = [POISON] * pool.block_size
        swapped = [request for request in live if request.status is Status.SWAPPED]
        assert scheduler.num_swapped == len(swapped)
        scheduler.swap.check(swapped)
        for block, references in enumerate(scheduler.swap.host.ref_counts):
            if not references:
                self.host[block] = [POISON] * pool.block_size
        assert scheduler.running == sorted(scheduler.running, key=scheduler._order)
        assert set(scheduler.running) == {request for request in live if request.status is Status.RUNNING}
        waiting = [request for request in live if request.status is Status.WAITING]
        assert scheduler.num_waiting == len(waiting)
        if (waiting or swapped) and not scheduler.by_priority:
            first = min(map(scheduler._order, [*waiting, *swapped]))
            late = [request for request in scheduler.running if scheduler._order(request) > first]
            assert all(request.overtook for request in late), "a later request overtook an earlier one"
        assert scheduler.stats.num_preemptions == sum(request.num_preemptions for request in self.sequences)
        assert not any(request.block_ids for request in self.sequences if request.status is not Status.RUNNING)
        assert not any(request.host_block_ids for request in self.sequences if request.status is not Status.SWAPPED)
        use = kv_use(pool, scheduler.running)
        held = {block for request in scheduler.running for block in request.held_block_ids}
        assert (use.num_blocks, use.num_references) == (len(held), sum(pool.ref_counts))
        assert 0 <= use.num_empty_slots <= use.num_references * pool.block_size
        if not scheduler.running:
            assert (use.utilization, use.sharing) == (1, 1)
        for request in self.sequences:
            if request not in self._checked and request.finished:
                self._check_finished(request)
                self._checked.add(request)

    def _check_finished(self, request: Request) -> None:
        assert self.scheduler.get(request.request_id) is not request
        if request.num_cached_tokens:
            assert self.scheduler.pool.enable_prefix_caching
            assert request.num_cached_tokens < request.num_tokens
            assert request.num_cached_tokens % self.scheduler.pool.block_size == 0
        tokens, reason, stop_reason = expected(request)
        if request in self.ended_early:
            assert request.finish_reason == self.ended_early[request]
            assert request.token_ids == tokens[: len(request.token_ids)]
        else:
            assert (request.token_ids, request.finish_reason, request.stop_reason) == (tokens, reason, stop_reason)

    def until(self, condition: Callable[[], object]) -> None:
        """Runs steps, at least one token each, until the condition holds."""
        while not condition():
            assert self.step()

    def drain(self) -> None:
        """Runs until all have ended, and checks that this takes no longer than the rules allow."""
        # In order of arrival the first unfinished request gains a token in every step. Priorities may let it wait for all
        # that run, each of which in turn is first at some time. Before it is admitted, each other may overtake it once.
        bound = 2 * sum(request.limit_tokens * (request.num_pending_forks + 1) for request in self.live)
        bound *= len(self.scheduler.running) + 1 if self.scheduler.by_priority else 1
        for _ in range(bound):
            if not len(self.scheduler):
                break
            self.step()
        assert len(self.scheduler) == 0, "not all requests ended"
        assert self.step() == {}
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert self.scheduler.swap.host.num_free == self.scheduler.swap.host.num_blocks
        families = Counter(request.parent_id for request in self.sequences)
        for request in self.sequences:
            if request.sequence_index == 0 and request not in self.ended_early:
                assert families[request.request_id] >= request.params.n
