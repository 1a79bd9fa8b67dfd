"""What is counted, and how full KV memory is. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.engine.blocks import BlockPool
from octavo.engine.request import Request


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start. Prefix numbers are tokens: asked for at admission, and found."""

    num_preemptions: int = 0
    num_swaps: int = 0  # of these preemptions, those that moved blocks to the host; the others recompute
    num_overtakes: int = 0  # requests admitted before an earlier one that did not fit
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    peak_blocks: int = 0  # most blocks held at once

    @property
    def num_recomputes(self) -> int:
        """Preemptions whose tokens are computed again, as far as they are not found in the prefix cache."""
        return self.num_preemptions - self.num_swaps


@dataclass(frozen=True, slots=True)
class KVUse:
    """How running requests fill the blocks they hold. A shared block counts once, except in `num_references`."""

    block_size: int
    num_blocks: int = 0
    num_references: int = 0
    num_tokens: int = 0

    @property
    def utilization(self) -> float:
        """Tokens stored over slots allocated; 1 where nothing is allocated, for nothing is wasted."""
        return self.num_tokens / (self.num_blocks * self.block_size) if self.num_blocks else 1.0

    @property
    def num_empty_slots(self) -> int:
        """Fragmentation: slots that are allocated and hold no token."""
        return self.num_blocks * self.block_size - self.num_tokens

    @property
    def sharing(self) -> float:
        """Blocks that requests hold over distinct ones; 1 where nothing is shared."""
        return self.num_references / self.num_blocks if self.num_blocks else 1.0


def kv_use(pool: BlockPool, running: Iterable[Request]) -> KVUse:
    """Counts in O(running requests): only a request's last blocks have empty slots, and forks may hold the same last one."""
    size, references, empty = pool.block_size, 0, 0
    shared: set[int] = set()
    for request in running:
        if not request.block_ids:
            continue
        references += len(request.block_ids) - request.num_dropped_blocks
        if request.shares_last_block:
            if request.block_ids[-1] in shared:
                continue
            shared.add(request.block_ids[-1])
        empty += len(request.block_ids) * size - request.num_computed_tokens
    blocks = pool.num_blocks - pool.num_free
    return KVUse(size, blocks, references, blocks * size - empty)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state now, and its counters since start. Swapped requests are not among the waiting ones."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    kv: KVUse
    scheduler: SchedulerStats

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by running requests."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def prefix_hit_rate(self) -> float:
        """Share of admitted tokens whose K and V were found in the prefix cache."""
        return self.scheduler.prefix_hits / max(self.scheduler.prefix_queries, 1)
