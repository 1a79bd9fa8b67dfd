"""The requests that are not finished, their seats and blocks, and what becomes of them when a step is done. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import nsmallest
from itertools import count

from octavo.engine.blocks import BlockPool
from octavo.engine.request import Request, Status
from octavo.engine.stats import SchedulerStats
from octavo.engine.step import Step, StepOutput
from octavo.engine.swap import SwapCosts, SwapSpace
from octavo.engine.waiting import Order, WaitingQueue
from octavo.errors import RequestError


class Ledger:
    """The queue of waiting requests, the list of running ones, and the pools of blocks they hold.

    `num_host_blocks` of 0 means that preempted requests recompute; `swap_costs` choose case by case, without them all swap that
    can. `sliding_window` is the widest of a model whose layers all have one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        by_priority: bool = False,
        num_host_blocks: int = 0,
        swap_costs: SwapCosts | None = None,
        sliding_window: int | None = None,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.swap = SwapSpace(self.pool, num_host_blocks, swap_costs)
        self.window = sliding_window
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.by_priority = by_priority
        self.running: list[Request] = []  # in order: the last is the first to be preempted
        self.stats = SchedulerStats()
        self.last_step = Step()
        self.num_swapped = 0
        self._queue = WaitingQueue(self._order)
        self._requests: dict[str, Request] = {}
        self._num_sequences: dict[str, int] = {}  # unfinished ones, and forks to come, by parent id
        self._arrivals = count()
        self._pending_forks = 0  # sequences that running requests will still add

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request may have: what fits into the whole pool, but no limit where its window always does."""
        if self.window is not None and self._span(1) <= self.pool.num_blocks:
            return 1 << 62
        return self.pool.num_blocks * self.pool.block_size

    def _span(self, num: int) -> int:
        """Most blocks that a request holds while it computes `num` tokens: they and the window before them."""
        assert self.window is not None
        return (self.window + num + self.pool.block_size - 3) // self.pool.block_size + 1

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those that are swapped not counted."""
        return len(self._requests) - len(self.running) - self.num_swapped

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def snapshot(self) -> list[Request]:
        """All unfinished requests, copied at once: for other threads."""
        return list(self._requests.values())

    def first_waiting(self, most: int) -> list[Request]:
        """The first that wait or are swapped, in order. May be called from other threads."""
        waits = [r for r in self.snapshot() if r.status is Status.WAITING or r.status is Status.SWAPPED]
        return nsmallest(most, waits, key=self._order)

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
        self._queue.push(request, self.num_waiting + self.num_swapped)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> Request | None:
        """Ends a request between steps and frees its blocks; None where it is not known or already finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self.running.remove(request)
        self._end(request, reason, stop_reason)
        return request

    def distrust_host(self) -> None:
        """Lets all swapped requests recompute: blocks could not be moved, and nobody knows which were."""
        for request in self._requests.values():
            if request.status is Status.SWAPPED:
                self.swap.release(request)
                self.num_swapped -= 1
                self._start_over(request)

    def commit(self, step: Step, output: StepOutput) -> dict[int, list[Request]]:
        """Books a computed step: tokens appended, full blocks published, requests finished or forked.

        Returns the new sequences of requests with n > 1, by index into the step; each holds its first token.
        """
        size, window = self.pool.block_size, self.window
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
            if window is not None:
                self._drop(request)
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
            self.pool.share(child.held_block_ids)
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
        # a grammar forbids ends that come too early, as far as it can
        due = request.num_output_tokens > request.min_tokens or request.grammar is not None
        if token in request.end_token_ids and due:
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
        elif request.status is Status.SWAPPED:
            self.swap.release(request)
            self.num_swapped -= 1
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]
        self._num_sequences[request.parent_id] -= 1 + request.num_pending_forks
        if not self._num_sequences[request.parent_id]:
            del self._num_sequences[request.parent_id]

    def _release(self, request: Request) -> None:
        """Gives back the blocks and seats of a running request."""
        self.pool.free(request.held_block_ids)
        request.block_ids = []
        request.shares_last_block = False
        self._pending_forks -= request.num_pending_forks

    def _order(self, request: Request) -> Order:
        return (request.priority if self.by_priority else 0, request.arrival, request.sequence_index)

    def _insert(self, request: Request) -> None:
        if not self.running or self._order(self.running[-1]) <= self._order(request):
            self.running.append(request)
        else:
            insort(self.running, request, key=self._order)

    def _start_over(self, request: Request) -> None:
        """Makes a request that has lost its blocks one that waits to compute all its tokens again."""
        request.num_computed_tokens = request.num_dropped_blocks = 0
        request.status = Status.WAITING

    def _num_dead(self, position: int) -> int:
        """Blocks that the token at a position and all later ones never read: wholly before its window."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.pool.block_size

    def _drop(self, request: Request) -> None:
        """Gives back the blocks that the next token no longer reads; they stay cached while nobody needs them."""
        dropped, dead = request.num_dropped_blocks, self._num_dead(request.num_computed_tokens)
        if dead > dropped:
            self.pool.free(request.block_ids[dropped:dead])
            request.block_ids[dropped:dead] = [0] * (dead - dropped)
            request.num_dropped_blocks = dead
