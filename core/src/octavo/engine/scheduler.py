"""Decides, before each step, which requests compute how many tokens, and books the results afterwards. No torch.

There are no prefill and decode phases: every request lacks some tokens (`token_ids` beyond `num_computed_tokens`) and each
step computes some of them under one budget. The rules:

1. A request that lacks one token (decoding) gets it in every step.
2. What is left of the budget goes to those that lack more (prompts). The first in order may take half; the other running
   ones and, together as one, the newcomers share the rest evenly. A newcomer whose prompt does not fit into what is then
   left takes half of that if others wait behind it. So a short prompt that arrives while k long ones are being computed
   gets 1/(2k) of this budget in its first step if it needs that. What nobody wants goes to the first in order.
3. Newcomers are admitted in order (priority, then arrival), each once the pool has room for its whole prompt, for what the
   running ones still need for theirs, and for a further block of each sequence beside it. That block keeps preemptions rare.
4. When blocks run out, the request latest in that order gives up its own and starts again from its tokens later (its full
   blocks stay cached meanwhile). The first in order is never preempted, so everything ends.

Both calls together cost about half a microsecond for each running request, whatever the size of the pool
(benchmarks/scheduler.py).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from octavo.engine.blocks import BlockPool
from octavo.engine.request import Request, Status
from octavo.engine.step import Step, StepOutput
from octavo.errors import RequestError


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start. Prefix numbers are tokens: asked for at admission, and found."""

    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    peak_blocks: int = 0  # most blocks held at once


class Scheduler:
    """The queue of waiting requests, the list of running ones, and the pool of blocks they hold."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        by_priority: bool = False,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.by_priority = by_priority
        self.running: list[Request] = []  # in order: the last is the first to be preempted
        self.stats = SchedulerStats()
        self._heap: list[tuple[tuple[int, int, int], Request]] = []  # may hold requests that were aborted meanwhile
        self._requests: dict[str, Request] = {}
        self._num_sequences: dict[str, int] = {}  # unfinished ones, and forks to come, by parent id
        self._arrivals = count()
        self._pending_forks = 0  # sequences that running requests will still add

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pool.num_blocks * self.pool.block_size

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """An unfinished request."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request; raises RequestError at once for one that could never run."""
        assert request.token_ids, "the engine refuses empty prompts"
        if request.request_id in self._num_sequences:
            raise RequestError(f"request id '{request.request_id}' is in use", param="request_id")
        _, colon, number = request.request_id.rpartition(":")
        if colon and number.isdigit():
            raise RequestError(
                f"request id '{request.request_id}' ends in a colon and a number, as the names of further sequences do",
                param="request_id",
            )
        if request.params.n > self.max_num_seqs:
            raise RequestError(
                f"n = {request.params.n} sequences can never run at once: max_num_seqs is {self.max_num_seqs}",
                param="n",
            )
        if request.num_prompt_tokens >= self.capacity_tokens:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens, but KV memory holds {self.capacity_tokens} "
                f"({self.pool.num_blocks} blocks of {self.pool.block_size}), prompt and output together; "
                "shorten it, or raise kv_cache_memory_bytes",
                param="prompt",
            )
        request.limit_tokens = min(request.limit_tokens, self.capacity_tokens)
        request.arrival = next(self._arrivals)
        self._requests[request.request_id] = request
        self._num_sequences[request.request_id] = request.params.n
        self._enqueue(request)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> Request | None:
        """Ends a request between steps and frees its blocks; None where it is not known or already finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self.running.remove(request)
        self._end(request, reason, stop_reason)
        return request

    def schedule(self) -> Step:
        """Chooses what the next step computes; an empty step means that there is nothing to do."""
        step = Step()
        requests, counts = step.requests, step.num_scheduled_tokens
        size = self.pool.block_size
        prefills = []
        num_preempted = self.stats.num_preemptions
        for request in self.running:  # preemption shortens the list from its end, which iteration allows
            position = request.num_computed_tokens
            if position + 1 != len(request.token_ids):
                prefills.append(request)
                continue
            fits = position < len(request.block_ids) * size and not request.shares_last_block
            if fits or self._make_room(request, 1, step):
                requests.append(request)
                counts.append(1)
        step.total_tokens = len(requests)
        if prefills or self._heap:
            shares: dict[Request, int] = {}
            self._share(prefills, step, shares)
            if self._heap and self.stats.num_preemptions == num_preempted:
                self._admit(prefills, step, shares)
            self._widen(step, shares)
            requests += shares
            counts += shares.values()
        self.stats.num_steps += bool(requests)
        self.stats.num_scheduled_tokens += step.total_tokens
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_blocks - self.pool.num_free)
        return step

    def _share(self, prefills: list[Request], step: Step, shares: dict[Request, int]) -> None:
        """Divides the budget that decoding leaves among the running prompts; waiting ones count as one more."""
        rivals = len(prefills) - 1 + bool(self._heap)
        for i, request in enumerate(prefills):
            left = self.max_num_batched_tokens - step.total_tokens
            if left <= 0 or request.status is not Status.RUNNING:  # preempted, and so are all later ones
                break
            parts = rivals - i + 1 if i else min(2, rivals + 1)
            num = min(len(request.token_ids) - request.num_computed_tokens, -(-left // parts))
            if self._make_room(request, num, step):
                self._put(request, min(num, self._room(request)), step, shares)

    def _admit(self, prefills: list[Request], step: Step, shares: dict[Request, int]) -> None:
        """Moves waiting requests to running while budget, seats and blocks allow, strictly in order."""
        pool = self.pool
        owed = sum(pool.blocks_for(len(r.token_ids)) - len(r.block_ids) for r in prefills)
        while self._heap and (left := self.max_num_batched_tokens - step.total_tokens) > 0:
            request = self._heap[0][1]
            if request.status is not Status.WAITING:
                heapq.heappop(self._heap)
                continue
            others = len(self.running) + self._pending_forks + request.num_pending_forks
            if others >= self.max_num_seqs:
                break
            reads_cache = pool.enable_prefix_caching and request.params.prompt_logprobs is None
            hits = pool.find_prefix(request) if reads_cache else []
            need = pool.blocks_for(len(request.token_ids)) - len(hits)
            idle_hits = sum(pool.ref_counts[block] == 0 for block in hits)
            if need + idle_hits + owed + (others if self.running else 0) > pool.num_free:
                break
            heapq.heappop(self._heap)
            if reads_cache:
                self.stats.prefix_queries += len(request.token_ids)
                self.stats.prefix_hits += len(hits) * pool.block_size
            pool.adopt_prefix(request, hits)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
            request.status = Status.RUNNING
            self._pending_forks += request.num_pending_forks
            self._insert(request)
            num = len(request.token_ids) - request.num_computed_tokens
            if num > left:
                num = left - left // 2 if self._heap else left
            self._make_room(request, num, step)
            self._put(request, num, step, shares)
            owed += pool.blocks_for(len(request.token_ids)) - len(request.block_ids)

    def _widen(self, step: Step, shares: dict[Request, int]) -> None:
        """Gives what nobody wanted of the budget to the prompts that lack more, oldest first."""
        for request, num in shares.items():
            left = self.max_num_batched_tokens - step.total_tokens
            more = min(len(request.token_ids) - request.num_computed_tokens - num, left)
            if more > 0:
                self._make_room(request, num + more, step)  # preempts nobody: there is room for `num` already
                more = min(more, self._room(request) - num)
                self._put(request, more, step, shares)

    def _room(self, request: Request) -> int:
        """Tokens beyond those computed that the request's blocks can take."""
        return len(request.block_ids) * self.pool.block_size - request.num_computed_tokens

    def _put(self, request: Request, num: int, step: Step, shares: dict[Request, int]) -> None:
        shares[request] = shares.get(request, 0) + num
        step.total_tokens += num

    def _make_room(self, request: Request, num: int, step: Step) -> bool:
        """Gives the request blocks for up to `num` more tokens, and a last block of its own if it shares one.

        Takes what is free; preempts later requests only if not even one token would fit. False if the request was itself the
        last and had to be preempted.
        """
        pool = self.pool
        while not pool.num_free and (self._room(request) <= 0 or self._writes_shared(request)):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        if self._writes_shared(request):
            shared = request.block_ids[-1]
            (own,) = pool.allocate(1)
            request.block_ids[-1] = own
            pool.free([shared])
            step.block_copies.append((shared, own))
        request.shares_last_block = False
        want = pool.blocks_for(request.num_computed_tokens + num) - len(request.block_ids)
        request.block_ids += pool.allocate(min(want, pool.num_free))
        return True

    def _writes_shared(self, request: Request) -> bool:
        """True where the request's next token belongs into a block that another sequence still holds."""
        return request.shares_last_block and self.pool.ref_counts[request.block_ids[-1]] > 1

    def _preempt(self, request: Request, step: Step) -> None:
        """Takes all blocks from the last running request and queues it again; it leaves the step if it was in it."""
        assert self.running[-1] is request
        self.running.pop()
        if request in step.requests:  # decoding; prompts are scheduled in order, so the last is not in yet
            i = step.requests.index(request)
            step.total_tokens -= step.num_scheduled_tokens[i]
            del step.requests[i], step.num_scheduled_tokens[i]
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.stats.num_preemptions += 1
        self._enqueue(request)

    def commit(self, step: Step, output: StepOutput) -> dict[int, list[Request]]:
        """Books a computed step: tokens appended, full blocks published, requests finished or forked.

        Returns the new sequences of requests with n > 1, by index into the step; each holds its first token.
        """
        size = self.pool.block_size
        publish = self.pool.publish
        forks: dict[int, list[Request]] = {}
        ended = False
        for i, reason in output.errors.items():
            self._end(step.requests[i], "error", reason)
            ended = True
        for i, (request, num, token) in enumerate(
            zip(step.requests, step.num_scheduled_tokens, output.token_ids, strict=True)
        ):
            if request.status is Status.FINISHED:
                continue
            computed = request.num_computed_tokens + num
            request.num_computed_tokens = computed
            if computed // size > request.num_published_blocks:
                publish(request)
            if token < 0:
                continue
            if request.num_pending_forks:
                forks[i] = self._fork(request, output.fork_token_ids.get(i, []))
                ended = ended or any(child.finished for child in forks[i])
            tokens = request.token_ids
            tokens.append(token)
            if token in request.end_token_ids or len(tokens) >= request.limit_tokens:
                ended |= self._end_if_due(request, token)
        if ended:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
        return forks

    def _fork(self, request: Request, first_tokens: list[int]) -> list[Request]:
        """Splits a request whose prompt is computed: the others share all its blocks until they write."""
        assert len(first_tokens) == request.num_pending_forks
        partial = request.num_computed_tokens % self.pool.block_size != 0
        children = []
        for index, token in enumerate(first_tokens, start=1):
            child = request.fork(index)
            child.block_ids = list(request.block_ids)
            self.pool.share(child.block_ids)
            child.shares_last_block = request.shares_last_block = partial
            child.status = Status.RUNNING
            child.token_ids.append(token)
            self._requests[child.request_id] = child
            self._insert(child)
            children.append(child)
            self._end_if_due(child, token)
        self._pending_forks -= request.num_pending_forks
        request.num_pending_forks = 0
        return children

    def _end_if_due(self, request: Request, token: int) -> bool:
        if token in request.end_token_ids and request.num_output_tokens > request.min_tokens:
            self._end(request, "stop", token if token in request.params.stop_token_ids else None)
            return True
        if len(request.token_ids) >= request.limit_tokens:
            self._end(request, "length", None)
            return True
        return False

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """Finishes a request; the caller takes it out of `running`."""
        if request.status is Status.RUNNING:
            self._release(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]
        self._num_sequences[request.parent_id] -= 1 + request.num_pending_forks
        if not self._num_sequences[request.parent_id]:
            del self._num_sequences[request.parent_id]

    def _release(self, request: Request) -> None:
        """Gives back the blocks and seats of a running request."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.shares_last_block = False
        self._pending_forks -= request.num_pending_forks

    def _order(self, request: Request) -> tuple[int, int, int]:
        return (request.priority if self.by_priority else 0, request.arrival, request.sequence_index)

    def _enqueue(self, request: Request) -> None:
        if len(self._heap) > 2 * self.num_waiting + 64:  # mostly aborted ones
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._order(request), request))

    def _insert(self, request: Request) -> None:
        if not self.running or self._order(self.running[-1]) <= self._order(request):
            self.running.append(request)
        else:
            insort(self.running, request, key=self._order)
