"""KV blocks as the scheduler sees them: who holds which, which are free, and which hold a known prefix.

Only numbers live here; the bytes are the workers'. Free blocks form one doubly linked list: blocks of no further use at the
front, reused first, and blocks that hold a published prefix behind them, least recently used first. Every operation is
O(1) per block, whatever the size of the pool.

The prefix cache is a tree kept in one dict. A published block is a node; its key is (parent node, its tokens), so two
prompts share a block only if all tokens up to its end are equal: a lookup compares tokens, not hashes, and cannot collide.
The root of a chain is the request's `cache_root`: requests with different roots (tenants) never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.engine.request import Request

FREE, CACHED, USED, SHARED = range(4)
"""What a block is: of no use, free but with a known prefix, held once, held by several."""


class _Node:
    """A published block in the tree of prefixes. Equal to no other node and to no root; `key` is None once it is evicted."""

    __slots__ = ("block", "key", "published_at")

    def __init__(self, key: tuple[object, tuple[int, ...]], block: int, published_at: int) -> None:
        self.key: tuple[object, tuple[int, ...]] | None = key
        self.block = block
        self.published_at = published_at  # value of num_evictions then


class BlockPool:
    """Reference counts, free list and prefix cache of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = num_blocks
        self.num_evictions = 0
        """Cached blocks taken for other use so far; also the clock by which remembered hits are checked."""
        self.ref_counts = [0] * num_blocks
        self.states = bytearray(num_blocks)
        """What each block is. It follows from reference counts and prefixes; kept so that a reader copies it at once."""
        self.copies: dict[int, int] = {}
        """Blocks whose contents are also on the host, and where: kept by SwapSpace, forgotten when a block is given out."""
        # The free list: entry num_blocks is the sentinel that closes the ring.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._index: dict[object, _Node] = {}  # by key
        self._nodes: list[_Node | None] = [None] * num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks that hold a published prefix, in use or free."""
        return len(self._index)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num: int) -> list[int]:
        """Takes `num` free blocks, each with one reference; the caller has checked `num_free`."""
        assert 0 <= num <= self.num_free
        taken = []
        after, before, nodes, sentinel = self._next, self._prev, self._nodes, self.num_blocks
        counts, states = self.ref_counts, self.states
        block = after[sentinel]
        for _ in range(num):
            if (node := nodes[block]) is not None:
                del self._index[node.key]
                node.key = nodes[block] = None  # its children keep the node, but not its whole ancestry
                self.num_evictions += 1
            counts[block], states[block] = 1, USED
            taken.append(block)
            block = after[block]
        after[sentinel] = block
        before[block] = sentinel
        self.num_free -= num
        if self.copies:
            for block in taken:
                self.copies.pop(block, None)
        return taken

    def holds_contents(self, block: int) -> bool:
        """Whether what was written to a block is still to be relied on: somebody holds it, or the prefix cache does."""
        return self.ref_counts[block] > 0 or self._nodes[block] is not None

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block; free ones (cached) leave the free list."""
        for block in block_ids:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1
            self.states[block] = SHARED if self.ref_counts[block] > 1 else USED

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each block of one request, last block first, so that prefixes outlive their ends."""
        counts, nodes, states = self.ref_counts, self._nodes, self.states
        for block in reversed(block_ids):
            counts[block] -= 1
            if counts[block] == 0:
                if nodes[block] is None:
                    states[block] = FREE
                    self._link(block, self.num_blocks)
                else:
                    states[block] = CACHED
                    self._link(block, self._prev[self.num_blocks])
            else:
                assert counts[block] > 0, f"block {block} freed twice"
                states[block] = SHARED if counts[block] > 1 else USED

    def _link(self, block: int, left: int) -> None:
        right = self._next[left]
        self._next[left] = self._prev[right] = block
        self._prev[block], self._next[block] = left, right
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        left, right = self._prev[block], self._next[block]
        self._next[left], self._prev[right] = right, left
        self.num_free -= 1

    def find_prefix(self, request: Request) -> list[int]:
        """The longest run of published blocks that holds the start of the request, leaving at least one token to compute.

        The result is remembered in the request: only the part of it that was evicted since is looked up again.
        """
        hits, tokens, size = request.hits, request.token_ids, self.block_size
        if request.hit_evictions != self.num_evictions:
            for i, hit in enumerate(hits):
                if (known := self._nodes[hit]) is None or known.published_at > request.hit_evictions:
                    del hits[i:]
                    break
            request.hit_evictions = self.num_evictions
        node: object = self._nodes[hits[-1]] if hits else request.cache_root
        for start in range(len(hits) * size, len(tokens) - size, size):
            found = self._index.get((node, tuple(tokens[start : start + size])))
            if found is None:
                break
            hits.append(found.block)
            node = found
        return hits

    def publish(self, request: Request) -> None:
        """Makes the request's newly filled blocks available to others. Called after the forward that filled them."""
        size = self.block_size
        full = request.num_computed_tokens // size
        if not self.enable_prefix_caching:
            request.num_published_blocks = full
            return
        index, nodes, node = self._index, self._nodes, request.cache_node
        for i in range(request.num_published_blocks, full):
            key = (node, tuple(request.token_ids[i * size : (i + 1) * size]))
            if (holder := index.get(key)) is None:
                block = request.block_ids[i]
                if (
                    known := nodes[block]
                ) is not None:  # published behind a parent that was evicted: found again from here on
                    del index[known.key]
                    known.key = None
                index[key] = nodes[block] = holder = _Node(key, block, self.num_evictions)
            node = holder
        request.cache_node = node
        request.num_published_blocks = full

    def adopt_prefix(self, request: Request, hits: Sequence[int]) -> None:
        """Gives the request the blocks that `find_prefix` found."""
        self.share(hits)
        request.block_ids = list(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_published_blocks = len(hits)
        request.cache_node = self._nodes[hits[-1]] if hits else request.cache_root
        request.hits = []
        request.hit_evictions = -1

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes; blocks in use stay with their requests."""
        for node in self._index.values():
            node.key = None
        self._index.clear()
        self._nodes = [None] * self.num_blocks
        self.states = self.states.replace(bytes([CACHED]), bytes([FREE]))
        self.num_evictions += 1

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts the invariants against the blocks that all requests hold; for tests, O(pool)."""
        counts = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the blocks that requests hold"
        free = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            free.append(block)
            block = self._next[block]
        assert len(free) == len(set(free)) == self.num_free
        assert all(counts[block] == 0 for block in free)
        assert self.num_free + sum(c > 0 for c in counts) == self.num_blocks
        cached = [self._nodes[block] is not None for block in free]
        assert cached == sorted(cached), "an uncached block stands behind a cached one"
        known = (node is not None for node in self._nodes)
        assert list(self.states) == [min(c + 1, SHARED) if c else int(k) for c, k in zip(counts, known, strict=True)]
        assert all(node.key == key and self._nodes[node.block] is node for key, node in self._index.items())
        assert len(self._index) == sum(node is not None for node in self._nodes), (
            "a block holds a prefix nobody can find"
        )
