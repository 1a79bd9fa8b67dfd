"""The block pool: who gets which block next, what a prefix lookup finds, and that neither depends on the pool's size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.blocks import BlockPool
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams

PARAMS = SamplingParams()


def request(tokens, root=None):
    return Request("r", tokens, PARAMS, cache_root=root)


def compute(pool, tokens, root=None):
    """A request whose tokens are all computed, as far as hits allow in blocks of others."""
    computed = request(tokens, root)
    pool.adopt_prefix(computed, pool.find_prefix(computed))
    computed.block_ids += pool.allocate(pool.blocks_for(len(tokens)) - len(computed.block_ids))
    computed.num_computed_tokens = len(tokens)
    pool.publish(computed)
    return computed


def hits(pool, tokens, root=None):
    return list(pool.find_prefix(request(tokens, root)))


def test_blocks_are_first_given_out_in_order():
    pool = BlockPool(5, 4)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free == 0
    pool.check([[0, 1], [2, 3, 4]])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert BlockPool(1, 4).blocks_for(tokens) == blocks


def test_uncached_blocks_are_reused_first_and_the_last_freed_before_others():
    pool = BlockPool(6, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(6) == [*second, *first, 4, 5]


def test_cached_blocks_are_reused_last_the_least_recently_used_first_and_ends_before_starts():
    pool = BlockPool(6, 2)
    a, b = compute(pool, [1, 2, 3, 4]), compute(pool, [5, 6, 7, 8])
    assert (a.block_ids, b.block_ids) == ([0, 1], [2, 3])
    pool.free(b.block_ids)
    pool.free(a.block_ids)
    assert pool.num_cached == 4
    assert pool.allocate(6) == [4, 5, 3, 2, 1, 0]


def test_a_hit_makes_cached_blocks_recently_used():
    pool = BlockPool(4, 2)
    a, b = compute(pool, [1, 2, 3, 4]), compute(pool, [5, 6, 7, 8])
    pool.free(a.block_ids)
    pool.free(b.block_ids)
    again = request([1, 2, 9])
    pool.adopt_prefix(again, pool.find_prefix(again))
    assert again.block_ids == [0]
    assert pool.num_free == 3
    pool.free(again.block_ids)
    assert pool.allocate(4) == [1, 3, 2, 0]


def test_only_cached_blocks_count_as_evicted():
    pool = BlockPool(4, 2)
    cached = compute(pool, [1, 2, 3, 4])
    pool.free(cached.block_ids)
    pool.allocate(2)
    assert (pool.num_evictions, pool.num_cached) == (0, 2)
    pool.allocate(1)
    assert (pool.num_evictions, pool.num_cached) == (1, 1)
    assert hits(pool, [1, 2, 3, 4, 5]) == [0]


def test_a_block_is_free_when_its_last_holder_gives_it_back():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.check([blocks])
    pool.free(blocks)
    assert pool.num_free == 3
    pool.check([])


def test_our_own_bugs_are_caught():
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([])
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    for num in (3, -1):
        with pytest.raises(AssertionError):
            BlockPool(2, 2).allocate(num)


def test_a_lookup_finds_full_blocks_only_and_leaves_a_token_to_compute():
    pool = BlockPool(9, 4)
    blocks = compute(pool, list(range(11))).block_ids
    assert pool.num_cached == 2
    found = {num: hits(pool, list(range(num))) for num in (1, 4, 5, 8, 9, 20)}
    assert found == {1: [], 4: [], 5: blocks[:1], 8: blocks[:1], 9: blocks[:2], 20: blocks[:2]}


def test_a_block_is_found_only_behind_the_same_tokens_and_root():
    pool = BlockPool(9, 2)
    compute(pool, [1, 2, 3, 4])
    assert hits(pool, [3, 4, 5]) == []
    assert hits(pool, [1, 3, 3, 4, 5]) == []
    assert hits(pool, [1, 2, 3, 5, 5]) == [0]
    assert hits(pool, [1, 2, 3, 4, 5], root="other") == []


def test_no_root_is_taken_for_a_node():
    """A child's key holds its parent, a first block's key holds its root: no root may equal a parent."""
    pool = BlockPool(9, 1)
    compute(pool, [1, 2, 3])
    for root in [*range(-5, 50), 0.0, True, "", (), (None, (1,))]:
        assert hits(pool, [1, 2, 3, 4], root) == hits(pool, [2, 3, 4], root) == hits(pool, [3, 4], root) == []


def test_what_is_not_computed_is_not_published():
    pool = BlockPool(9, 2)
    half = request([1, 2, 3, 4, 5, 6])
    half.block_ids = pool.allocate(3)
    half.num_computed_tokens = 3
    pool.publish(half)
    assert hits(pool, [1, 2, 3, 4, 5, 6, 7]) == half.block_ids[:1]
    half.num_computed_tokens = 6
    pool.publish(half)
    assert hits(pool, [1, 2, 3, 4, 5, 6, 7]) == half.block_ids


def test_of_equal_blocks_one_is_published_and_others_go_on_behind_it():
    pool = BlockPool(9, 2)
    a, b = request([1, 2, 3, 4]), request([1, 2, 5, 6])
    for each in (a, b):
        each.block_ids, each.num_computed_tokens = pool.allocate(2), 4
    pool.publish(a)
    pool.publish(b)
    assert pool.num_cached == 3
    assert hits(pool, [1, 2, 5, 6, 7]) == [a.block_ids[0], b.block_ids[1]]
    pool.check([a.block_ids, b.block_ids])
    pool.free(b.block_ids)
    assert pool.allocate(1) == [b.block_ids[0]]  # the copy nobody can find goes first


def test_without_prefix_caching_nothing_is_published():
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    computed = compute(pool, [1, 2, 3, 4])
    assert (pool.num_cached, computed.num_published_blocks) == (0, 2)
    assert hits(pool, [1, 2, 3, 4, 5]) == []


def test_reset_forgets_free_blocks_and_blocks_in_use():
    pool = BlockPool(8, 2)
    used, freed = compute(pool, [1, 2, 3, 4]), compute(pool, [5, 6])
    pool.free(freed.block_ids)
    waiting = request([1, 2, 3, 4, 5])
    assert len(pool.find_prefix(waiting)) == 2
    pool.reset_prefix_cache()
    assert pool.num_cached == 0
    assert list(pool.find_prefix(waiting)) == hits(pool, [5, 6, 7]) == []
    pool.check([used.block_ids])
    used.token_ids += [5, 6]
    used.block_ids += pool.allocate(1)
    used.num_computed_tokens = 6
    pool.publish(used)
    assert hits(pool, [1, 2, 3, 4, 5, 6, 7]) == []  # its start is forgotten
    pool.check([used.block_ids])


class Lookups(dict):
    """An index that counts the keys it is asked for."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)


def test_a_remembered_hit_is_not_looked_up_again():
    pool = BlockPool(20, 1)
    cached = compute(pool, list(range(10)))
    pool.free(cached.block_ids)
    pool._index = index = Lookups(pool._index)
    waiting = request(list(range(12)))
    assert list(pool.find_prefix(waiting)) == cached.block_ids
    assert index.count == 11
    pool.find_prefix(waiting)
    assert index.count == 12  # only what comes behind the hit
    pool.allocate(13)  # evicts the last 3
    assert list(pool.find_prefix(waiting)) == cached.block_ids[:7]
    assert index.count == 13


def test_a_remembered_hit_ends_where_a_block_came_to_hold_something_else():
    pool = BlockPool(4, 2)
    cached = compute(pool, [1, 2, 3, 4, 5, 6])
    waiting = request([1, 2, 3, 4, 5, 6, 7])
    assert list(pool.find_prefix(waiting)) == cached.block_ids
    pool.free(cached.block_ids)
    pool.allocate(1)
    other = compute(pool, [1, 2, 8, 9])  # shares the first block and takes the third for what it adds
    assert other.block_ids == [cached.block_ids[0], cached.block_ids[2]]
    assert list(pool.find_prefix(waiting)) == cached.block_ids[:2]


class Touched(list):
    """A list that counts how often its entries are read or written."""

    count = 0

    def __getitem__(self, i):
        Touched.count += 1
        return super().__getitem__(i)

    def __setitem__(self, i, value):
        Touched.count += 1
        super().__setitem__(i, value)


def test_the_work_does_not_grow_with_the_pool():
    work = {}
    for num_blocks in (64, 4096):
        pool = BlockPool(num_blocks, 2)
        for name in ("ref_counts", "_next", "_prev", "_nodes"):
            setattr(pool, name, Touched(getattr(pool, name)))
        Touched.count = 0
        held = [compute(pool, [i, *range(9)]) for i in range(5)]
        for each in held:
            pool.free(each.block_ids)
        again = [compute(pool, [i, *range(8), 10, 11, 12]) for i in range(5)]
        pool.free(again[0].block_ids)
        work[num_blocks] = Touched.count
    assert work[64] == work[4096]


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 3),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["compute", "compute", "compute", "free", "fork", "reset"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(0, 99),
        ),
        max_size=60,
    ),
)
def test_the_pool_agrees_with_plain_lists(num_blocks, block_size, operations):
    pool = BlockPool(num_blocks, block_size)
    uncached, cached = list(range(num_blocks)), []  # in the order in which they are to be taken
    held, content = [], {}

    def give_back(blocks):
        for block in reversed(blocks):
            if not any(block in other for other in held):
                if pool._nodes[block] is None:
                    uncached.insert(0, block)
                else:
                    cached.append(block)

    for operation, tokens, choice in operations:
        if operation == "compute":
            asked = request(tokens)
            found = list(pool.find_prefix(asked))
            assert len(found) * block_size < len(tokens)
            assert [content[block] for block in found] == [
                tuple(tokens[: (i + 1) * block_size]) for i in range(len(found))
            ]
            need = pool.blocks_for(len(tokens)) - len(found)
            if need + sum(block in uncached or block in cached for block in found) > pool.num_free:
                continue
            for block in found:
                if block in cached:
                    cached.remove(block)
            blocks = compute(pool, tokens).block_ids
            expected = (uncached + cached)[:need]
            assert blocks == found + expected
            del cached[: max(need - len(uncached), 0)], uncached[:need]
            content.update((b, tuple(tokens[: (i + 1) * block_size])) for i, b in enumerate(blocks))
            held.append(blocks)
        elif operation == "reset":
            pool.reset_prefix_cache()
            uncached, cached = uncached + cached, []
        elif held and operation == "free":
            blocks = held.pop(choice % len(held))
            pool.free(blocks)
            give_back(blocks)
        elif held:
            blocks = list(held[choice % len(held)])
            pool.share(blocks)
            held.append(blocks)
        pool.check(held)
        assert pool.num_free == len(uncached) + len(cached)
