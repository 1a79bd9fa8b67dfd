"""Swap, sliding windows, overtaking and the counts of KV memory, step by step over simulated memory."""

from itertools import product

import pytest
from scheduler_world import World, solo

from octavo.engine.request import Status
from octavo.engine.stats import kv_use
from octavo.engine.step import StepOutput
from octavo.engine.swap import SwapCosts
from octavo.errors import RequestError


def prompt(num_tokens, start=0):
    return list(range(start, start + num_tokens))


def crowded(**settings):
    """Two requests in 8 blocks, of which the second must give way."""
    world = World(num_blocks=8, block_size=4, **{"num_host_blocks": 20, **settings})
    world.add("first", prompt(12), max_tokens=8)
    second = world.add("second", prompt(12, start=100), max_tokens=8)
    world.until(lambda: second.num_preemptions)
    return world, second


# Swap


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_request_goes_on_where_it_was(caching):
    world, second = crowded(enable_prefix_caching=caching)
    computed = second.num_computed_tokens
    assert (second.status, second.block_ids, world.scheduler.num_swapped) == (Status.SWAPPED, [], 1)
    assert len(second.host_block_ids) == world.scheduler.pool.blocks_for(computed)
    assert world.scheduler.num_waiting == 0
    world.until(lambda: second.status is Status.RUNNING)
    assert second.num_computed_tokens == computed + 1
    world.drain()
    assert world.output("second") == solo(prompt(12, start=100), 8)
    stats = world.scheduler.stats
    assert (stats.num_preemptions, stats.num_swaps, stats.num_recomputes) == (1, 1, 0)
    assert stats.num_scheduled_tokens == 2 * (12 + 7), "no token was computed twice"


def test_what_the_prefix_cache_kept_meanwhile_is_adopted_instead_of_copied():
    world, _ = crowded()
    copied = world.scheduler.stats.blocks_swapped_out
    world.drain()
    assert 0 < world.scheduler.stats.blocks_swapped_in < copied


def test_swapped_blocks_that_came_back_are_known_to_the_prefix_cache_again():
    world, second = crowded()
    world.scheduler.pool.reset_prefix_cache()
    world.until(lambda: second.finished)
    again = world.add("again", [*prompt(12, start=100), *world.output("second"), 1])
    world.drain()
    assert again.num_cached_tokens == 16


def test_swapped_requests_come_back_in_order_before_newcomers():
    world = World(num_blocks=8, block_size=4, num_host_blocks=20, budget=100)
    for i, name in enumerate("abc"):
        world.add(name, prompt(7, start=100 * i), max_tokens=21)
    world.until(lambda: world.scheduler.num_swapped == 2)
    world.add("new", prompt(2, start=900), max_tokens=2)
    started = []
    while world.live:
        started += [name for name in world.step() if name not in started]
    assert started.index("b") < started.index("c") < started.index("new")


def test_a_full_host_pool_means_recomputing():
    world, second = crowded(num_host_blocks=3)
    assert (second.status, second.num_computed_tokens, second.host_block_ids) == (Status.WAITING, 0, [])
    assert (world.scheduler.stats.num_swaps, world.scheduler.stats.num_recomputes) == (0, 1)
    world.drain()


def forks(caching):
    world = World(num_blocks=9, block_size=4, num_host_blocks=20, max_num_seqs=4, enable_prefix_caching=caching)
    world.add("f", prompt(14), max_tokens=20, n=3)
    world.until(lambda: world.scheduler.num_swapped == 2)
    return world


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_that_forks_share_are_swapped_once(caching):
    world = forks(caching)
    one, two = world.requests["f:1"], world.requests["f:2"]
    assert one.host_block_ids[:3] == two.host_block_ids[:3]
    assert set(one.host_block_ids[3:]).isdisjoint(two.host_block_ids[3:])
    host = world.scheduler.swap.host
    assert host.num_blocks - host.num_free == len({*one.host_block_ids, *two.host_block_ids})
    first = world.requests["f"].block_ids[:3]
    world.until(lambda: one.status is Status.RUNNING)
    assert one.block_ids[:3] == first or world.requests["f"].finished
    world.drain()
    assert [world.output(name) for name in ("f", "f:1", "f:2")] == [solo(prompt(14), 20, i) for i in range(3)]


def test_blocks_that_others_still_hold_are_not_copied_back():
    world = World(num_blocks=11, block_size=4, num_host_blocks=20)
    world.add("first", prompt(16), max_tokens=20)
    world.step()
    second = world.add("second", [*prompt(16), 7], max_tokens=14)
    world.until(lambda: second.num_preemptions)
    assert second.status is Status.SWAPPED
    assert sum(world.scheduler.pool.ref_counts[block] for block in world.requests["first"].block_ids[:4]) == 4
    world.scheduler.pool.reset_prefix_cache()  # so only what is in use counts
    needed = world.scheduler.swap.num_needed(second)
    assert needed == len(second.host_block_ids) - 4
    world.drain()


def test_an_aborted_swapped_request_gives_back_its_host_blocks():
    world, second = crowded()
    world.finish("second", "abort")
    host = world.scheduler.swap.host
    assert (host.num_free, world.scheduler.num_swapped, second.finish_reason) == (host.num_blocks, 0, "abort")
    world.drain()


def test_lost_moves_let_swapped_requests_compute_again():
    world, second = crowded()
    world.scheduler.distrust_host()
    assert (second.status, second.num_computed_tokens) == (Status.WAITING, 0)
    assert world.scheduler.swap.host.num_free == 20
    world.drain()
    assert world.output("second") == solo(prompt(12, start=100), 8)


def test_a_swap_takes_a_block_that_is_still_to_be_copied_from_where_it_is():
    """Forks get their own last blocks in a step, and are preempted for two earlier prompts in the same step."""
    met = 0
    for budget, length in product(range(8, 24), range(1, 4)):
        world = World(num_blocks=60, block_size=4, num_host_blocks=30, max_num_seqs=5, budget=budget)
        prompts = [world.add(name, prompt(60, start=start)) for name, start in (("one", 100), ("two", 200))]
        world.add("f", prompt(length), max_tokens=12, n=3)
        world.until(lambda world=world: "f:2" in world.requests)
        scheduler = world.scheduler
        if any(len(p.block_ids) * 4 > p.num_computed_tokens or p.num_output_tokens for p in prompts):
            continue
        met += 1
        stolen = scheduler.pool.allocate(scheduler.pool.num_free - 2)  # two forks copy, the third writes in place
        (shared,) = world.requests["f"].block_ids
        step = scheduler.schedule()
        assert [source for source, _ in step.swap_out] == [shared, shared]
        assert [source for source, _ in step.block_copies] == [shared]
        scheduler.commit(step, world.execute(step))
        scheduler.pool.free(stolen)
        world.check()
        world.drain()
        assert [world.output(f"f{end}") for end in ("", ":1", ":2")] == [solo(prompt(length), 12, i) for i in range(3)]
    assert met


@pytest.mark.parametrize(
    ("seconds_per_token", "swaps"),
    [(None, True), (0.6, True), (0.5, False), (0.4, False)],  # 12 tokens against 6 moves
)
def test_the_cost_model_compares_moves_with_tokens(seconds_per_token, swaps):
    costs = SwapCosts(bytes_per_block=10, bytes_per_second=10.0, seconds_per_token=seconds_per_token)
    assert costs.favour_swap(num_moves=6, num_tokens=12) is swaps


def test_the_cost_of_a_token_follows_what_was_measured():
    costs = SwapCosts(1)
    costs.note_prefill(10, 20.0)
    assert costs.seconds_per_token == 2.0
    costs.note_prefill(10, 60.0)
    assert costs.seconds_per_token == 3.0


def test_tokens_that_others_keep_cached_make_recomputing_cheaper():
    """Both hold 16 tokens; one shares them with a running request. A move costs as much as 3 tokens take to compute."""
    decisions = {}
    for shared in (True, False):
        world = World(num_blocks=30, block_size=4, num_host_blocks=20, swap_costs=SwapCosts(1, 1.0, 1 / 3))
        world.add("holder", prompt(20, start=0 if shared else 500), max_tokens=9)
        world.step()
        request = world.add("r", prompt(18), max_tokens=9)
        world.step()
        decisions[shared] = world.scheduler.swap.pays(request)
    assert decisions == {True: False, False: False}  # 9 or 5 + 5 moves against 18 / 3 or 2 / 3
    world = World(num_blocks=30, block_size=4, num_host_blocks=20, swap_costs=SwapCosts(1, 1.0, 1.0))
    request = world.add("r", prompt(18), max_tokens=9)
    world.step()
    assert world.scheduler.swap.pays(request)  # 5 + 5 moves against 18


# Sliding windows


@pytest.mark.parametrize("window", [1, 4, 5, 8, 13])
def test_blocks_that_left_the_window_are_given_back_at_once(window):
    world = World(num_blocks=40, block_size=4, sliding_window=window)
    request = world.add("a", prompt(10), max_tokens=60)
    while world.step() and not request.finished:
        first_seen = max(0, request.num_computed_tokens - window + 1)
        assert request.num_dropped_blocks == first_seen // 4
        assert world.scheduler.pool.num_blocks - world.scheduler.pool.num_free == len(request.held_block_ids)
        assert len(request.held_block_ids) <= (window + 1) // 4 + 2
    assert request.output_token_ids == solo(prompt(10), 60)


def test_a_window_that_fits_has_no_limit_of_length():
    world = World(num_blocks=4, block_size=4, sliding_window=8)
    request = world.add("long", prompt(100), max_tokens=50)
    world.drain()
    assert request.output_token_ids == solo(prompt(100), 50)
    narrow = World(num_blocks=2, block_size=4, sliding_window=8)
    with pytest.raises(RequestError, match="KV memory holds 8"):
        narrow.add("long", prompt(100))


def test_windows_let_more_requests_run_at_once():
    running = {}
    for window in (None, 8):
        world = World(num_blocks=24, block_size=4, sliding_window=window, budget=100)
        for i in range(6):
            world.add(f"{i}", prompt(30, start=100 * i), max_tokens=8)
        world.step()
        world.step()
        running[window] = len(world.scheduler.running)
        world.drain()
    assert running[8] > running[None]


def test_dropped_blocks_stay_cached_for_others():
    world = World(num_blocks=40, block_size=4, sliding_window=6)
    world.add("first", prompt(24), max_tokens=9)
    world.step()
    assert world.requests["first"].num_dropped_blocks == 4
    second = world.add("second", prompt(24), max_tokens=9)
    world.step()
    assert second.num_cached_tokens == 20
    assert second.num_dropped_blocks == 4
    world.drain()


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_windows_forks_and_preemption_together(num_host_blocks):
    world = World(num_blocks=5, block_size=4, sliding_window=9, max_num_seqs=4, num_host_blocks=num_host_blocks)
    for i in range(3):
        world.add(f"{i}", prompt(13, start=100 * i), max_tokens=30, n=2)
    world.drain()
    assert world.scheduler.stats.num_preemptions > 0
    for i in range(3):
        assert world.output(f"{i}") == solo(prompt(13, start=100 * i), 30)
        assert world.output(f"{i}:1") == solo(prompt(13, start=100 * i), 30, 1)


# Counts


def test_kv_use_counts_shared_blocks_once_and_empty_slots():
    world = World(num_blocks=40, block_size=4)
    world.add("f", prompt(6), max_tokens=6, n=3)
    world.step()
    use = kv_use(world.scheduler.pool, world.scheduler.running)
    assert (use.num_blocks, use.num_references, use.num_tokens, use.num_empty_slots) == (2, 6, 6, 2)
    assert (use.utilization, use.sharing) == (0.75, 3.0)
    world.step()  # the full block is shared, each has its own last one, with 3 of 4 slots taken
    use = kv_use(world.scheduler.pool, world.scheduler.running)
    assert (use.num_blocks, use.num_references, use.num_tokens) == (4, 6, 4 + 3 * 3)
    assert use.num_empty_slots == 3


def test_kv_use_knows_windows():
    world = World(num_blocks=40, block_size=4, sliding_window=4)
    world.add("a", prompt(13), max_tokens=6)
    world.step()
    use = kv_use(world.scheduler.pool, world.scheduler.running)
    assert (use.num_blocks, use.num_references, use.num_tokens) == (2, 2, 5)


# The bugs of vLLM's scheduler that cases.md lists in 5.4, by the number of the first report


def test_vllm45387_a_cached_prompt_reserves_what_it_still_has_to_compute():
    """Deadlock: blocks were reserved for what a request had, but not for the rest of its prompt. Nothing runs, all wait."""
    for num_host_blocks in (0, 40):
        world = World(num_blocks=12, block_size=4, budget=6, max_num_seqs=4, num_host_blocks=num_host_blocks)
        for i in range(4):
            world.add(f"{i}", [*prompt(16), i, *prompt(26, start=50 * i)], max_tokens=4)
        world.drain()
        assert {f"{i}": world.output(f"{i}") for i in range(4)} == {
            f"{i}": solo([*prompt(16), i, *prompt(26, start=50 * i)], 4) for i in range(4)
        }


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_vllm16315_one_missing_block_preempts_one_request(num_host_blocks):
    """Thrash: freed blocks came back too late, so that one victim after another was taken in a step."""
    world = World(num_blocks=16, block_size=4, num_host_blocks=num_host_blocks)
    for i in range(4):
        world.add(f"{i}", prompt(12, start=100 * i), max_tokens=20)
    while world.live:
        before = world.scheduler.stats.num_preemptions
        world.step()
        assert world.scheduler.stats.num_preemptions <= before + 1


def test_vllm37307_chunked_prompts_are_not_admitted_beyond_what_fits():
    """Over-admission: the first chunks of many prompts fitted, the prompts did not, and all preempted each other."""
    world = World(num_blocks=40, block_size=4, budget=16, max_num_seqs=16)
    for i in range(12):
        world.add(f"{i}", prompt(60, start=1000 * i), max_tokens=2)
    world.drain()
    assert world.scheduler.stats.num_preemptions == 0


def test_vllm31731_small_requests_pass_a_heavy_one_and_do_not_delay_it():
    """Head of line: one request that needs much KV memory blocks all behind it. Here small ones run on what it cannot use."""

    def run(with_small_ones):
        world = World(num_blocks=40, block_size=4, budget=200, max_num_seqs=16)
        world.add("running", prompt(60), max_tokens=40)  # 15 blocks, and in the end 25
        world.step()
        heavy = world.add("heavy", prompt(110, start=1000), max_tokens=4)  # 28 blocks of the 25 that are free
        smalls = [
            world.add(f"small-{i}", prompt(8, start=5000 + 100 * i), max_tokens=12) for i in range(with_small_ones)
        ]
        steps = 0
        while heavy.status is Status.WAITING:
            world.step()
            steps += 1
        early = sum(small.num_output_tokens > 0 for small in smalls)
        world.drain()
        return steps, early, world.scheduler.stats

    alone, _, _ = run(0)
    beside, early, stats = run(6)
    assert beside == alone, "the heavy one starts as if nobody had passed it"
    assert early == stats.num_overtakes == 6


def test_vllm31731_those_that_passed_give_way_once_and_do_not_pass_again():
    world = World(num_blocks=40, block_size=4, budget=200, max_num_seqs=16, num_host_blocks=40)
    world.add("running", prompt(60), max_tokens=6)
    world.step()
    heavy = world.add("heavy", prompt(150, start=1000), max_tokens=4)  # 38 blocks
    small = world.add("small", prompt(8, start=5000), max_tokens=20)
    assert world.step() == {"running": 1, "small": 8}
    world.until(lambda: heavy.status is Status.RUNNING)
    assert (small.num_preemptions, small.status) == (1, Status.SWAPPED)
    assert world.requests["running"].num_preemptions == 0
    world.add("huge", prompt(155, start=9000), max_tokens=1)
    world.drain()
    assert small.num_preemptions == 1
    assert world.output("small") == solo(prompt(8, start=5000), 20)


def test_vllm31731_a_preempted_head_is_not_passed():
    world, second = crowded(num_host_blocks=0)
    world.add("small", prompt(1, start=900), max_tokens=1)
    while second.status is Status.WAITING:
        assert "small" not in world.step() or second.status is Status.RUNNING


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_vllm23347_a_request_that_was_scheduled_and_then_preempted_is_in_no_step(num_host_blocks):
    """Priority: the victim had been put into the step already; the step then named one without blocks."""
    world = World(
        num_blocks=6, block_size=4, max_num_seqs=2, budget=2, by_priority=True, num_host_blocks=num_host_blocks
    )
    world.add("long", prompt(15), priority=0)
    world.step()
    decoding = world.add("decoding", prompt(1, start=100), max_tokens=15, priority=1)
    while not decoding.num_preemptions:
        step = world.step()
    assert step == {"long": 2}
    assert world.last.total_tokens == 2
    world.drain()
    assert world.output("decoding") == solo(prompt(1, start=100), 15)


@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_vllm49097_a_preemption_makes_the_step_skip_nobody(num_host_blocks):
    """Priority: the list shrank while it was gone through, so the request behind the victim was left out."""
    world = World(num_blocks=14, block_size=4, by_priority=True, num_host_blocks=num_host_blocks)
    for i, priority in enumerate([2, 0, 1, 0, 2]):
        world.add(f"{i}", prompt(8, start=100 * i), max_tokens=16, priority=priority)
    while world.live:
        before = {request: request.num_computed_tokens for request in world.scheduler.running}
        world.step()
        for request, computed in before.items():
            assert request.num_computed_tokens > computed or request.num_preemptions or request.finished
    assert world.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_vllm41951_a_preempted_request_keeps_its_place_among_its_priority(num_host_blocks):
    world = World(num_blocks=8, block_size=4, by_priority=True, num_host_blocks=num_host_blocks)
    world.add("first", prompt(12), max_tokens=8, priority=1)
    second = world.add("second", prompt(12, start=100), max_tokens=8, priority=1)
    world.until(lambda: second.num_preemptions)
    world.add("later", prompt(12, start=200), max_tokens=2, priority=1)
    order = []
    while world.live:
        order += [name for name in world.step() if name not in order]
    assert order == ["first", "second", "later"]


@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_vllm38624_tokens_are_neither_doubled_nor_lost_by_preemption(num_host_blocks):
    """Placeholders survived a preemption: tokens came twice, or as -1."""
    world, second = crowded(num_host_blocks=num_host_blocks)
    seen = list(second.token_ids)
    while not second.finished:
        world.step()
        assert second.token_ids[: len(seen)] == seen
        assert len(second.token_ids) <= len(seen) + 1
        assert min(second.token_ids) >= 0
        seen = list(second.token_ids)


@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_vllm37076_blocks_in_use_are_never_given_to_others(num_host_blocks):
    """Use after free: hits were counted as free, and taken by an allocation before they were held."""
    world = World(num_blocks=10, block_size=4, budget=40, max_num_seqs=6, num_host_blocks=num_host_blocks)
    for i in range(24):
        world.add(f"{i}", [*prompt(8 + 4 * (i % 3)), i], max_tokens=7)
        world.step()
    world.drain()
    assert world.scheduler.stats.prefix_hits > 0
    assert world.scheduler.pool.num_evictions > 0


def test_vllm12621_equal_tokens_of_tenants_and_lookalike_keys_never_meet():
    """Collisions: keys are compared, not hashed; a salt that looks like another tenant's root is another salt."""
    world = World(block_size=4)
    roots = [None, "a", ("a",), ("a", None), ("a", 13), "('a', None)", 0, "0", ""]
    for root in roots:
        request = world.add(f"{root!r}", prompt(13), root=root)
        world.drain()
        assert request.num_cached_tokens == 0


def test_vllm415_a_hit_and_a_miss_give_the_same():
    for root in (None, "tenant"):
        world = World(block_size=4)
        outputs = []
        for i in range(3):
            request = world.add(f"{i}", prompt(17), max_tokens=9, root=root)
            world.drain()
            outputs.append(request.output_token_ids)
        assert outputs == [solo(prompt(17), 9)] * 3
        assert request.num_cached_tokens == 16


def test_an_error_of_a_swapped_in_request_ends_it_alone():
    world, second = crowded()
    while second.status is Status.SWAPPED:
        scheduler = world.scheduler
        step = scheduler.schedule()
        output = world.execute(step)
        if second in step.requests:
            output = StepOutput(output.token_ids, errors={step.requests.index(second): "broke"})
            world.ended_early[second] = "error"
        scheduler.commit(step, output)
        world.check()
    assert second.finish_reason == "error"
    world.drain()
