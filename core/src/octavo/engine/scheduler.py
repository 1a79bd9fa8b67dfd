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
   While the first does not fit, small ones behind it may run on what it cannot use, each once. They never delay it: as soon
   as it would fit without them they are preempted.
4. When blocks run out, the request latest in that order gives up its own. It waits, in its old place, either with its blocks
   on the host (swap.py), to go on where it was, or to start again from its tokens (its full blocks stay cached meanwhile).
   The first in order is never preempted, so everything ends.
5. Where every layer has a sliding window, blocks that left it are given back at once, and only what is in it must fit.

Both calls together cost about half a microsecond for each running request, whatever the size of the pool
(benchmarks/scheduler.py).
"""

from __future__ import annotations

import time
from collections import Counter

from octavo.engine.ledger import Ledger
from octavo.engine.request import Request, Status
from octavo.engine.step import Step

LOOK_PAST = 4
"""Requests behind one that does not fit that are looked at in a step."""
SMALL = 4
"""A request may overtake one that needs this many times as many blocks."""


class Scheduler(Ledger):
    """What to compute next; see the rules above."""

    def schedule(self) -> Step:
        """Chooses what the next step computes; an empty step means that there is nothing to do."""
        step = Step()
        requests, counts = step.requests, step.num_scheduled_tokens
        size = self.pool.block_size
        prefills = []
        if self.running and self.running[-1].overtook and self._queue:
            self._recall(step)
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
        if prefills or self._queue:
            shares: dict[Request, int] = {}
            self._share(prefills, step, shares)
            if self._queue and self.stats.num_preemptions == num_preempted:
                self._admit(prefills, step, shares)
            self._widen(step, shares)
            requests += shares
            counts += shares.values()
        if step.swap_out or step.swap_in:
            self.stats.blocks_swapped_out += len(step.swap_out)
            self.stats.blocks_swapped_in += len(step.swap_in)
        self.last_step = step
        self.stats.num_steps += bool(requests)
        self.stats.num_scheduled_tokens += step.total_tokens
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_blocks - self.pool.num_free)
        return step

    def _share(self, prefills: list[Request], step: Step, shares: dict[Request, int]) -> None:
        """Divides the budget that decoding leaves among the running prompts; waiting ones count as one more."""
        rivals = len(prefills) - 1 + bool(self._queue)
        for i, request in enumerate(prefills):
            left = self.max_num_batched_tokens - step.total_tokens
            if left <= 0 or request.status is not Status.RUNNING:  # preempted, and so are all later ones
                break
            parts = rivals - i + 1 if i else min(2, rivals + 1)
            num = min(len(request.token_ids) - request.num_computed_tokens, -(-left // parts))
            if self._make_room(request, num, step):
                self._put(request, min(num, self._room(request)), step, shares)

    def _admit(self, prefills: list[Request], step: Step, shares: dict[Request, int]) -> None:
        """Moves waiting requests to running while budget, seats and blocks allow, in order except for rule 3."""
        owed = self._owed(prefills)
        passed: list[Request] = []  # those in the queue's front that do not fit
        while (request := self._queue.head()) and (left := self.max_num_batched_tokens - step.total_tokens) > 0:
            if (passed and not self._may_overtake(passed[0], request, owed)) or not self._fits(request, owed):
                passed.append(self._queue.pop())
                if passed[0].num_preemptions or len(passed) > LOOK_PAST or not self._has_spare(owed):
                    break
                continue
            self._queue.pop()
            if passed:
                request.overtook = True
                self.stats.num_overtakes += 1
            self._start(request, step)
            num = len(request.token_ids) - request.num_computed_tokens
            if num > left:
                num = left - left // 2 if self._queue else left
            self._make_room(request, num, step)
            self._put(request, min(num, self._room(request)), step, shares)
            owed += self._owed([request])
        for request in passed:
            self._queue.push(request, self.num_waiting + self.num_swapped)

    def _fits(self, request: Request, owed: int) -> bool:
        """Whether there are a seat and blocks for a waiting request, beside the blocks that running prompts still need."""
        others = len(self.running) + self._pending_forks + request.num_pending_forks
        if others >= self.max_num_seqs:
            return False
        return self._need(request) + owed + (others if self.running else 0) <= self.pool.num_free

    def _need(self, request: Request) -> int:
        """Free blocks that a waiting request takes until all its tokens are computed."""
        pool = self.pool
        if request.status is Status.SWAPPED:
            held = len(request.host_block_ids)
            return self._most(request, request.num_dropped_blocks) - held + self.swap.num_needed(request)
        if not self._reads_cache(request):
            return self._most(request, 0)
        hits = pool.find_prefix(request)
        dropped = self._num_dead(len(hits) * pool.block_size)
        return self._most(request, dropped) - sum(pool.ref_counts[block] > 0 for block in hits[dropped:])

    def _most(self, request: Request, num_dropped: int) -> int:
        """Most blocks that a request without its first ones holds at once until all its tokens are computed."""
        num = self.pool.blocks_for(len(request.token_ids)) - num_dropped
        return num if self.window is None else min(num, self._span(self.max_num_batched_tokens), self.pool.num_blocks)

    def _owed(self, prefills: list[Request]) -> int:
        """Free blocks that running requests will take until all their tokens are computed."""
        if self.window is None:
            return sum(self.pool.blocks_for(len(r.token_ids)) - len(r.block_ids) for r in prefills)
        held = [len(r.block_ids) - r.num_dropped_blocks for r in prefills]
        return sum(max(self._most(r, r.num_dropped_blocks) - h, 0) for r, h in zip(prefills, held, strict=True))

    def _reads_cache(self, request: Request) -> bool:
        return self.pool.enable_prefix_caching and request.params.prompt_logprobs is None

    def _start(self, request: Request, step: Step) -> None:
        """Makes a waiting request, for which there is room, a running one with what is computed of it already."""
        pool = self.pool
        if request.status is Status.SWAPPED:
            self.swap.swap_in(request, step)
            self.num_swapped -= 1
            if not request.num_dropped_blocks:  # commit publishes its blocks again, which are new ones
                request.num_published_blocks, request.cache_node = 0, request.cache_root
        else:
            hits = request.hits  # found when its need was counted
            if self._reads_cache(request):
                self.stats.prefix_queries += len(request.token_ids)
                self.stats.prefix_hits += len(hits) * pool.block_size
            pool.adopt_prefix(request, hits)
            self._drop(request)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                request.first_scheduled_time = time.monotonic()
        request.status = Status.RUNNING
        self._pending_forks += request.num_pending_forks
        self._insert(request)

    def _has_spare(self, owed: int) -> bool:
        """Whether there are a seat and a block that running requests will not soon need."""
        others = len(self.running) + self._pending_forks
        return others < self.max_num_seqs and owed + others < self.pool.num_free

    def _may_overtake(self, head: Request, request: Request, owed: int) -> bool:
        """Whether a request may run before the first, which does not fit: once, new, and small all its life."""
        if request.overtook or request.num_preemptions or request.num_pending_forks:
            return False
        most = self.pool.blocks_for(request.limit_tokens)
        if most * SMALL > self._most(head, 0):
            return False
        return most + owed + len(self.running) + self._pending_forks <= self.pool.num_free

    def _recall(self, step: Step) -> None:
        """Preempts those that overtook the first waiting request once it fits without them, and a step's growth besides."""
        head = self._queue.head()
        if head is None:
            return
        place, kept = self._order(head), len(self.running)
        while kept and self.running[kept - 1].overtook and self._order(self.running[kept - 1]) > place:
            kept -= 1
        recalled = self.running[kept:]
        others = kept + self._pending_forks + head.num_pending_forks
        prefills = [r for r in self.running if r.num_computed_tokens + 1 != len(r.token_ids)]
        if not recalled or others >= self.max_num_seqs or self._fits(head, self._owed(prefills)):
            return
        held = Counter(block for request in recalled for block in request.held_block_ids)
        freed = sum(self.pool.ref_counts[block] == count for block, count in held.items())
        owed = self._owed([r for r in prefills if r not in recalled])
        if self._need(head) + owed + (2 * others if kept else 0) <= self.pool.num_free + freed:
            for request in reversed(recalled):
                self._preempt(request, step)

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
        self.stats.num_preemptions += 1
        request.num_preemptions += 1
        if swaps := self.swap.pays(request):
            self.swap.swap_out(request, step)
        if step.block_copies:
            step.block_copies = [pair for pair in step.block_copies if pair[1] != request.block_ids[-1]]
        self._release(request)
        if swaps:
            request.status = Status.SWAPPED
            self.num_swapped += 1
            self.stats.num_swaps += 1
        else:
            self._start_over(request)
        self._queue.push(request, self.num_waiting + self.num_swapped)
