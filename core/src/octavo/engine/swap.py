"""Swapping: the blocks of a preempted request go to host memory and come back, instead of being computed again. No torch.

Host blocks are a second pool. While a full block lies on the host, it is known which device block it came from or went to, and
as long as that one still holds the contents, nothing is copied twice: sequences that share a block share its copy, and
a request that returns adopts what others, or the prefix cache, kept on the device. A partly filled last block is copied alone:
whoever holds it there may write on.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.blocks import BlockPool
from octavo.engine.request import Request
from octavo.engine.step import Step

ASSUMED_BYTES_PER_SECOND = 8e9
"""Of copies between device and host: what PCIe 3 and two memory channels reach. Not measured, as such copies run unobserved."""
_WEIGHT = 0.25
"""Of the newest step in the running mean of what a prefill token costs."""


@dataclass(slots=True)
class SwapCosts:
    """Whether swapping a request is cheaper than computing its tokens again.

    Swapping costs the bytes that move, out now and back later, over the bandwidth of copies; blocks that are on the host
    already do not move out, and those that others hold do not move back. Recomputing costs the seconds that a prefill token
    took lately, for each token but those in leading blocks that others hold: they will be a prefix hit. What only the prefix
    cache holds counts as lost, for blocks are taken because they run out. Until a prefill was timed, swapping is taken to be
    cheaper.
    """

    bytes_per_block: int
    bytes_per_second: float = ASSUMED_BYTES_PER_SECOND
    seconds_per_token: float | None = None

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Takes a step that computed prompt tokens into account."""
        latest, before = seconds / num_tokens, self.seconds_per_token
        self.seconds_per_token = latest if before is None else before + _WEIGHT * (latest - before)

    def favour_swap(self, num_moves: int, num_tokens: int) -> bool:
        """`num_moves` blocks copied in all, against `num_tokens` computed again."""
        if self.seconds_per_token is None:
            return True
        return num_moves * self.bytes_per_block / self.bytes_per_second < num_tokens * self.seconds_per_token


class SwapSpace:
    """The host blocks, and which of them equal which device blocks. Without `costs`, swaps whenever there is room."""

    def __init__(self, pool: BlockPool, num_blocks: int, costs: SwapCosts | None = None) -> None:
        self.pool, self.costs = pool, costs
        self.host = BlockPool(num_blocks, pool.block_size, enable_prefix_caching=False)
        self._twins: dict[int, int] = {}  # by host block: the device block it equals, while pool.copies says the same

    def pays(self, request: Request) -> bool:
        """Whether to swap a running request rather than recompute it: something is computed, fits, and moves cheaply."""
        pool, computed = self.pool, request.num_computed_tokens
        if not computed or not self.host.num_blocks:
            return False
        blocks, num_full = self._computed(request)
        num_out = sum(i >= num_full or block not in pool.copies for i, block in enumerate(blocks))
        if num_out > self.host.num_free:
            return False
        if self.costs is None:
            return True
        others = [pool.ref_counts[block] > 1 for block in blocks[:num_full]]
        hits = pool.enable_prefix_caching and not request.num_dropped_blocks
        leading = [*others, False].index(False) if hits else 0
        moves = num_out + len(blocks) - sum(others)
        return self.costs.favour_swap(moves, computed - leading * pool.block_size)

    def _computed(self, request: Request) -> tuple[list[int], int]:
        """The blocks that hold computed tokens, and how many of them are full."""
        dropped, computed = request.num_dropped_blocks, request.num_computed_tokens
        blocks = request.block_ids[dropped : self.pool.blocks_for(computed)]
        return blocks, computed // self.pool.block_size - dropped

    def swap_out(self, request: Request, step: Step) -> None:
        """Gives the request host blocks, and the step what to copy there. The device blocks are the caller's to free."""
        assert not step.swap_in, "host blocks that this step reads could be overwritten first"
        copies, host = self.pool.copies, self.host
        # Copies run after this: what a new block will hold must be read where it still is.
        sources = {target: source for source, target in step.block_copies}
        blocks, num_full = self._computed(request)
        for i, block in enumerate(blocks):
            if i < num_full and (known := copies.get(block)) is not None:
                host.share([known])
                request.host_block_ids.append(known)
                continue
            (copy,) = host.allocate(1)
            request.host_block_ids.append(copy)
            step.swap_out.append((sources.get(block, block), copy))
            if i < num_full:
                self._pair(block, copy)

    def num_needed(self, request: Request) -> int:
        """Free device blocks that bringing a request back takes: all but those in use with equal contents."""
        in_use = 0
        if self.pool.copies:
            twins = map(self._twin, request.host_block_ids)
            in_use = sum(twin is not None and self.pool.ref_counts[twin] > 0 for twin in twins)
        return len(request.host_block_ids) - in_use

    def swap_in(self, request: Request, step: Step) -> None:
        """Gives a swapped request device blocks again; the caller has checked that there are enough."""
        pool = self.pool
        twins = [self._twin(copy) for copy in request.host_block_ids]
        pool.share([twin for twin in twins if twin is not None])
        blocks = pool.allocate(twins.count(None))
        step.swap_in += zip(
            (c for c, t in zip(request.host_block_ids, twins, strict=True) if t is None), blocks, strict=True
        )
        new = iter(blocks)
        request.block_ids = [0] * request.num_dropped_blocks
        num_full = request.num_computed_tokens // pool.block_size - request.num_dropped_blocks
        for i, (copy, twin) in enumerate(zip(request.host_block_ids, twins, strict=True)):
            block = next(new) if twin is None else twin
            request.block_ids.append(block)
            if i < num_full:
                self._pair(block, copy)
        self.release(request)

    def release(self, request: Request) -> None:
        """Gives back the host blocks of a request."""
        self.host.free(request.host_block_ids)
        for copy in request.host_block_ids:
            if not self.host.ref_counts[copy]:
                self._part(copy)
        request.host_block_ids = []

    def _pair(self, block: int, copy: int) -> None:
        self._part(copy)
        self.pool.copies[block] = copy
        self._twins[copy] = block

    def _part(self, copy: int) -> None:
        block = self._twins.pop(copy, None)
        if block is not None and self.pool.copies.get(block) == copy:
            del self.pool.copies[block]

    def _twin(self, copy: int) -> int | None:
        """The device block that still holds what a host block holds."""
        block = self._twins.get(copy)
        if block is None or self.pool.copies.get(block) != copy or not self.pool.holds_contents(block):
            return None
        return block

    def check(self, swapped: list[Request]) -> None:
        """Asserts the invariants; for tests."""
        self.host.check(request.host_block_ids for request in swapped)
        assert all(self.host.ref_counts[copy] for copy in self.pool.copies.values())
        assert all(self._twins.get(copy) is not None for copy in self.pool.copies.values())
