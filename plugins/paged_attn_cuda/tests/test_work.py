"""How a step is divided: each row sees exactly its positions, once, whatever the tiles, windows and parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_paged_attn_cuda.work import Tiling, divide

REQUESTS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 900)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    group=st.sampled_from([1, 3, 4, 8]),
    rows=st.sampled_from([16, 64]),
    columns=st.sampled_from([16, 64]),
    window=st.none() | st.integers(1, 300),
    programs=st.sampled_from([1, 7, 132]),
)
def test_every_position_is_summed_once(
    requests: list[tuple[int, int]], group: int, rows: int, columns: int, window: int | None, programs: int
) -> None:
    lens = [num for num, _ in requests]
    ends = [num + before for num, before in requests]
    chosen = np.arange(len(lens)) % 3 != 1
    work = divide(lens, ends, chosen, Tiling(group, rows, columns), window, programs)
    starts = np.cumsum([0, *lens])
    seen: dict[tuple[int, int], np.ndarray] = {}
    merged = {slot: merge for merge in work.merges for slot in range(merge[3], merge[3] + merge[4])}
    assert sorted(merged) == list(range(work.slots))
    for request, token, count, first_row, shift, begin, end, slot in work.items:
        assert (token, count) == (starts[request], lens[request] * group)
        assert shift == ends[request] - lens[request]
        assert 0 <= begin < end
        assert begin % columns == 0 or window is not None
        assert (slot >= 0) == (slot in merged)
        if slot >= 0:
            assert tuple(merged[slot][:3]) == (token, count, first_row)
        for row in range(first_row, min(first_row + rows, count)):
            position = shift + row // group
            oldest = 0 if window is None else max(0, position - window + 1)
            sums = seen.setdefault((request, row), np.zeros(ends[request], dtype=int))
            sums[max(begin, oldest) : min(end, position + 1)] += 1
    assert set(seen) == {(i, row) for i in np.flatnonzero(chosen) for row in range(lens[i] * group)}
    for (request, row), sums in seen.items():
        position = ends[request] - lens[request] + row // group
        oldest = 0 if window is None else max(0, position - window + 1)
        assert (sums[oldest : position + 1] == 1).all()
        assert not sums[:oldest].any()
        assert not sums[position + 1 :].any()


@pytest.mark.parametrize("programs", [1, 40, 264])
def test_long_decodes_fill_the_gpu_with_parts_of_like_length(programs: int) -> None:
    work = divide([1] * 4, [32_768] * 4, np.ones(4, dtype=bool), Tiling(4, 16, 64), None, programs)
    lengths = work.items[:, 6] - work.items[:, 5]
    assert len(work.items) >= 0.75 * programs
    assert len(work.items) <= 4 + programs
    assert lengths.max() <= 1.3 * lengths.mean()


def test_short_ones_are_not_cut() -> None:
    work = divide([1] * 3, [200, 256, 17], np.ones(3, dtype=bool), Tiling(1, 16, 64), None, 264)
    assert len(work.items) == 3
    assert work.slots == len(work.merges) == 0


def test_blocks_before_the_window_of_the_first_token_are_not_read() -> None:
    work = divide([70], [500], np.ones(1, dtype=bool), Tiling(1, 16, 64), 100, 264)
    assert work.items[:, 5].min() == 430 - 100 + 1
