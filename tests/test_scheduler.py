"""The scheduler in named situations, step by step. Random ones are in test_scheduler_properties.py."""

import pytest
from scheduler_world import World, sample, solo

from octavo.engine.request import Status
from octavo.errors import RequestError


def prompt(num_tokens, start=0):
    return list(range(start, start + num_tokens))


# V11: prompts and outputs larger than the pool


def test_v11_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_is_served():
    world = World(num_blocks=10, block_size=16)
    with pytest.raises(RequestError, match=r"200 tokens, but KV memory holds 160 \(10 blocks of 16\)") as refusal:
        world.add("large", prompt(200))
    assert refusal.value.param == "prompt"
    assert len(world.scheduler) == world.scheduler.num_waiting == 0
    world.add("small", prompt(5))
    world.drain()
    assert world.output("small") == solo(prompt(5), 4)


def test_v11_a_prompt_that_leaves_no_room_for_output_is_refused_and_one_token_less_is_served():
    world = World(num_blocks=10, block_size=16)
    with pytest.raises(RequestError, match="prompt and output together"):
        world.add("full", prompt(160))
    request = world.add("almost", prompt(159), max_tokens=5)
    world.drain()
    assert (request.output_token_ids, request.finish_reason) == (solo(prompt(159), 1), "length")


def test_v11_a_request_that_outgrows_the_pool_ends_there_with_reason_length():
    world = World(num_blocks=10, block_size=16)
    request = world.add("grows", prompt(150), max_tokens=100)
    behind = world.add("behind", prompt(5, start=500))
    world.drain()
    assert request.num_tokens == world.scheduler.capacity_tokens == 160
    assert (request.output_token_ids, request.finish_reason) == (solo(prompt(150), 10), "length")
    assert behind.output_token_ids == solo(prompt(5, start=500), 4)


# V12: long prompts stall neither streams nor short newcomers


@pytest.mark.parametrize("steps_between", [0, 1, 7])
def test_v12_a_long_prompt_stalls_neither_a_stream_nor_a_short_newcomer(steps_between):
    world = World(budget=16)
    stream = world.add("A", prompt(3), max_tokens=200)
    world.step()
    long = world.add("B", prompt(50 * 16, start=1000), max_tokens=2)
    for _ in range(steps_between):
        assert world.step() == {"A": 1, "B": 15}
    short = world.add("C", prompt(5, start=5000), max_tokens=3)
    assert world.step() == {"A": 1, "B": 10, "C": 5}  # all of C at once; B has at least half of 15
    assert short.output_token_ids == solo(prompt(5, start=5000), 1)
    while long.num_output_tokens == 0:
        before = stream.num_output_tokens
        assert world.step()["B"] >= min(13, long.num_tokens - long.num_computed_tokens)
        assert stream.num_output_tokens == before + 1
    world.drain()
    assert long.output_token_ids == solo(prompt(50 * 16, start=1000), 2)


def test_v12_the_oldest_prompt_has_half_the_budget_however_many_short_ones_come():
    world = World(budget=16, max_num_seqs=16)
    world.add("long", prompt(160, start=1000))
    for i in range(15):
        world.add(f"short-{i}", prompt(8), max_tokens=1)
        if i:
            assert world.step()["long"] == 8


@pytest.mark.parametrize("num_long", [1, 2, 3, 4])
def test_v12_the_first_share_of_a_newcomer_is_bounded_by_the_number_of_long_prompts(num_long):
    world = World(budget=64)
    for i in range(num_long):
        world.add(f"long-{i}", prompt(300, start=1000 * i))
    world.step()
    world.add("short", prompt(64, start=9000))
    step = world.step()
    assert step["short"] >= 64 // (2 * num_long)
    assert step["long-0"] >= 32


def test_v12_newcomers_whose_prompts_fit_are_not_cut():
    world = World(budget=64)
    for name in "abc":
        world.add(name, prompt(30, start=ord(name)))
    assert world.step() == {"a": 30, "b": 30, "c": 4}


def test_the_whole_budget_goes_to_the_only_prompt():
    world = World(budget=64)
    world.add("alone", prompt(150))
    assert [world.step()["alone"] for _ in range(3)] == [64, 64, 22]


def test_what_nobody_wants_of_the_budget_goes_to_the_first_that_lacks_more():
    world = World(budget=64, max_num_seqs=2)
    world.add("first", prompt(70))
    world.add("second", prompt(200, start=1000))
    world.add("no-seat", prompt(9, start=2000))
    assert world.step() == {"first": 48, "second": 16}  # halves, and halves of the rest, then what was left
    assert world.step() == {"first": 22, "second": 42}


# V16: under memory pressure, outputs stay what they are


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_v16_outputs_do_not_change_under_preemption_and_none_is_lost(caching, block_size):
    world = World(num_blocks=144 // block_size, block_size=block_size, enable_prefix_caching=caching)  # 3 of 48 tokens
    prompts = {f"{i}": [*prompt(8), i, *prompt(7)] for i in range(8)}
    for name, tokens in prompts.items():
        world.add(name, tokens, max_tokens=32)
    world.drain()
    assert {name: world.output(name) for name in prompts} == {name: solo(p, 32) for name, p in prompts.items()}
    assert world.scheduler.stats.num_preemptions > 0
    assert world.scheduler.stats.num_preemptions == sum(r.num_preemptions for r in world.requests.values())


def test_v16_a_preempted_request_keeps_its_place_and_finds_its_blocks_again():
    world = World(num_blocks=8, block_size=4)
    world.add("first", prompt(12), max_tokens=8)
    preempted = world.add("second", prompt(12, start=100), max_tokens=8)
    world.until(lambda: preempted.num_preemptions)
    assert preempted.status is Status.WAITING
    world.add("third", prompt(2, start=200), max_tokens=1)
    while preempted.status is Status.WAITING:
        step = world.step()
        assert "third" not in step or "second" in step
    assert world.scheduler.stats.prefix_hits >= 12
    assert preempted.num_cached_tokens == 0  # the user's count is that of the first admission
    world.drain()
    assert world.output("second") == solo(prompt(12, start=100), 8)


def test_admission_leaves_a_free_block_for_each_running_request():
    world = World(num_blocks=6, block_size=4)
    world.add("a", prompt(7))
    world.add("b", prompt(7, start=100))
    world.add("c", prompt(3, start=200))
    assert world.step() == {"a": 7, "b": 7}  # 2 blocks each; c would need one of the 2 that remain for a and b
    assert world.scheduler.num_waiting == 1


def test_admission_counts_the_forks_of_a_newcomer_unless_it_is_alone():
    world = World(num_blocks=6, block_size=4)
    world.add("alone", prompt(23), max_tokens=1, n=3)
    assert world.step() == {"alone": 23}
    world.add("running", prompt(3, start=100), max_tokens=2)
    world.add("forks", prompt(9, start=200), max_tokens=2, n=3)
    assert world.step() == {"running": 3}  # of the 5 blocks left, forks would need 3 at first and 3 soon after
    world.drain()
    assert world.scheduler.stats.num_preemptions == 0


def test_admission_counts_what_running_prompts_still_need():
    world = World(num_blocks=12, block_size=4, budget=8, max_num_seqs=3)
    world.add("a", prompt(20))
    world.add("b", prompt(20, start=100))
    world.add("c", prompt(4, start=200))
    assert world.step() == {"a": 6, "b": 2}
    assert world.scheduler.pool.num_free == 9  # of which a and b will need 7 for their prompts, and one each soon after
    assert world.step() == {"a": 6, "b": 2}
    assert world.scheduler.num_waiting == 1
    world.drain()
    assert world.scheduler.stats.num_preemptions == 0


def test_a_prompt_that_is_preempted_for_an_earlier_one_gets_no_share():
    world = World(num_blocks=26, block_size=1, budget=3, max_num_seqs=3)
    world.add("decoding", prompt(1), max_tokens=20)
    world.step()
    first, second = world.add("first", prompt(10, start=100)), world.add("second", prompt(10, start=200))
    while world.scheduler.pool.num_free >= 3:
        assert world.step() == {"decoding": 1, "first": 1, "second": 1}
    assert world.scheduler.pool.num_free == 1  # for the one that decodes
    assert world.step() == {"decoding": 1, "first": 2}
    assert (second.status, second.block_ids, second.num_computed_tokens) == (Status.WAITING, [], 0)
    assert first.num_preemptions == 0
    world.drain()
    assert world.output("second") == solo(prompt(10, start=200), 4)


# V17: nothing is shared before it is computed


def test_v17_identical_prompts_in_one_step_share_nothing_unwritten():
    world = World(budget=1000)
    for i in range(8):
        world.add(f"{i}", prompt(100))
    assert world.step() == {f"{i}": 100 for i in range(8)}
    assert world.scheduler.stats.prefix_hits == 0
    world.drain()
    assert all(world.output(f"{i}") == solo(prompt(100), 4) for i in range(8))


@pytest.mark.parametrize("steps_before_abort", [1, 2, 3])
def test_v17_identical_prompts_of_which_the_first_is_aborted_half_way(steps_before_abort):
    world = World(budget=40)
    first = world.add("0", prompt(100))
    for i in range(1, 8):
        world.add(f"{i}", prompt(100))
    for _ in range(steps_before_abort):
        world.step()
    assert 0 < first.num_computed_tokens < 100
    written = first.num_computed_tokens
    world.finish("0", "abort")
    late = world.add("late", prompt(100))
    world.step()
    assert late.num_cached_tokens == written // 16 * 16  # of what the first computed, the full blocks
    world.drain()
    assert all(world.output(f"{i}") == solo(prompt(100), 4) for i in range(1, 8))
    assert world.output("late") == solo(prompt(100), 4)


# V18: prompts that are cached completely


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
def test_v18_a_cached_prompt_recomputes_at_least_one_token(num_tokens, max_tokens):
    world = World(block_size=16)
    for i, cached in enumerate([0, (num_tokens - 1) // 16 * 16, (num_tokens - 1) // 16 * 16]):
        request = world.add(f"{i}", prompt(num_tokens), max_tokens=max_tokens)
        assert world.step() == {f"{i}": num_tokens - cached}
        world.drain()
        assert request.output_token_ids == solo(prompt(num_tokens), max_tokens)
        assert request.num_cached_tokens == cached < num_tokens
    assert world.scheduler.stats.prefix_queries == 3 * num_tokens
    assert world.scheduler.stats.prefix_hits == 2 * cached


def test_output_is_cached_like_a_prompt():
    world = World(block_size=4)
    world.add("first", prompt(6), max_tokens=7)
    world.drain()
    longer = world.add("next", [*prompt(6), *world.output("first"), 5])
    world.drain()
    assert longer.num_cached_tokens == 12  # the last token was sampled, but never computed


def test_requests_with_prompt_logprobs_read_no_cache():
    world = World()
    world.add("first", prompt(40))
    world.drain()
    asked = world.scheduler.stats.prefix_queries
    assert world.add("second", prompt(40), prompt_logprobs=1).num_cached_tokens is None
    assert world.step() == {"second": 40}
    assert world.scheduler.stats.prefix_queries == asked


def test_a_remembered_prefix_loses_only_what_was_evicted_meanwhile():
    world = World(num_blocks=10, block_size=4)
    world.add("cached", prompt(17), max_tokens=1)
    world.drain()
    world.add("running", prompt(20, start=100), max_tokens=16)  # 5 blocks, and in the end 9
    world.step()
    waiting = world.add("waiting", prompt(17), max_tokens=1)
    seen = set()
    while not world.requests["running"].finished:
        world.step()
        if waiting.status is Status.WAITING and not world.requests["running"].finished:
            assert len(waiting.hits) == world.scheduler.pool.num_free
            seen.add(len(waiting.hits))
    assert seen == {4, 3, 2, 1}
    world.drain()
    assert waiting.num_cached_tokens == 4
    assert world.output("waiting") == solo(prompt(17), 1)


def test_a_remembered_prefix_is_not_taken_for_one_that_came_into_the_same_blocks():
    world = World(num_blocks=6, block_size=4)
    world.add("cached", prompt(9), max_tokens=1)
    world.drain()
    world.add("running", prompt(8, start=100), max_tokens=12)
    world.step()
    waiting = world.add("waiting", [*prompt(9), *prompt(8, start=50)], max_tokens=1)
    world.step()
    assert len(waiting.hits) == 2
    world.drain()
    assert world.output("waiting") == solo([*prompt(9), *prompt(8, start=50)], 1)


def test_s11_requests_of_different_tenants_never_share():
    world = World(block_size=4)
    for tenant in ["a", None, ("a", None), *range(30)]:
        first = world.add("first", prompt(13), root=tenant)
        world.drain()
        second = world.add("second", prompt(13), root=tenant)
        world.drain()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)


def test_the_prefix_cache_can_be_reset_while_requests_run():
    world = World(block_size=4)
    world.add("running", prompt(13), max_tokens=8)
    world.step()
    world.scheduler.pool.reset_prefix_cache()
    again = world.add("again", prompt(13), max_tokens=8)
    assert world.step() == {"running": 1, "again": 13}
    world.drain()
    later = world.add("later", prompt(13), max_tokens=8)
    world.drain()
    assert (again.num_cached_tokens, later.num_cached_tokens) == (0, 12)
    assert world.output("running") == world.output("again") == world.output("later") == solo(prompt(13), 8)


# Forks


def sequences(name, n):
    return [name, *(f"{name}:{i}" for i in range(1, n))]


@pytest.mark.parametrize(("num_tokens", "copies"), [(6, 2), (8, 0), (1, 2)])
def test_forks_share_the_prompt_and_copy_a_partly_filled_last_block(num_tokens, copies):
    world = World(block_size=4)
    world.add("f", prompt(num_tokens), max_tokens=6, n=3)
    assert world.step() == {"f": num_tokens}
    names = sequences("f", 3)
    assert world.scheduler.pool.num_free == 100 - -(-num_tokens // 4)
    assert world.step() == dict.fromkeys(names, 1)
    assert len(world.last.block_copies) == copies  # the last sequence to write keeps the original
    full = num_tokens // 4
    blocks = [world.requests[name].block_ids for name in names]
    assert blocks[0][:full] == blocks[1][:full] == blocks[2][:full]
    assert len({row[full] for row in blocks}) == 3
    world.drain()
    assert [world.output(name) for name in names] == [solo(prompt(num_tokens), 6, i) for i in range(3)]


def test_the_last_holder_of_a_shared_block_writes_without_a_copy():
    world = World(block_size=4)
    world.add("f", prompt(6), max_tokens=6, n=3)
    world.step()
    for name in ["f", "f:2"]:
        world.finish(name, "stop")
    assert world.step() == {"f:1": 1}
    assert world.last.block_copies == []
    world.drain()
    assert world.output("f:1") == solo(prompt(6), 6, 1)


def test_forks_without_memory_for_copies_run_one_after_the_other():
    world = World(num_blocks=2, block_size=4)
    first = world.add("f", prompt(5), max_tokens=9, n=3)
    world.step()
    assert world.scheduler.pool.num_free == 0
    world.drain()
    assert first.num_preemptions == 0  # its siblings' going makes the shared block its own: no copy is needed
    assert [world.output(name) for name in sequences("f", 3)] == [solo(prompt(5), 3, i) for i in range(3)]


def test_forks_survive_preemption():
    world = World(num_blocks=6, block_size=4)
    world.add("f", prompt(6), max_tokens=14, n=4)
    world.add("g", prompt(3), max_tokens=14, n=2)
    world.drain()
    assert world.scheduler.stats.num_preemptions > 3
    assert [world.output(name) for name in sequences("f", 4)] == [solo(prompt(6), 14, i) for i in range(4)]
    assert [world.output(name) for name in sequences("g", 2)] == [solo(prompt(3), 14, i) for i in range(2)]


def test_a_request_preempted_before_its_fork_forks_later():
    world = World(num_blocks=11, block_size=4, budget=4, max_num_seqs=4)
    for name in "ab":
        world.add(name, prompt(3, start=ord(name)), max_tokens=20)
    tokens = prompt(24, start=500)
    forking = world.add("f", tokens, max_tokens=2, n=2)
    world.until(lambda: forking.num_preemptions)
    assert forking.num_output_tokens == 0
    world.drain()
    assert [world.output(name) for name in sequences("f", 2)] == [solo(tokens, 2, i) for i in range(2)]


def test_a_fork_may_end_with_its_first_token():
    world = World(block_size=4)
    end = sample(prompt(6), 1)
    world.add("f", prompt(6), max_tokens=3, n=3, ends=[end])
    world.step()
    assert (world.requests["f:1"].finish_reason, world.requests["f:1"].output_token_ids) == ("stop", [end])
    assert set(world.step()) == {"f", "f:2"}
    world.drain()


def test_seats_are_kept_for_forks_to_come():
    world = World(max_num_seqs=4, budget=4)
    world.add("f", prompt(12), max_tokens=2, n=3)
    world.add("a", prompt(2, start=100), max_tokens=9)
    world.add("b", prompt(1, start=200), max_tokens=9)
    most = 0
    while len(world.scheduler):
        most = max(most, len(world.step()))
        assert "b" not in world.requests or len(world.scheduler.running) <= 4
    assert most == 4


def test_more_sequences_than_seats_are_refused():
    world = World(max_num_seqs=4)
    with pytest.raises(RequestError, match="n = 5 sequences can never run at once: max_num_seqs is 4") as refusal:
        world.add("f", prompt(3), n=5)
    assert refusal.value.param == "n"
    world.add("f", prompt(3), n=4)
    world.drain()


# Order


@pytest.mark.parametrize(("by_priority", "order"), [(False, "abcd"), (True, "cbda")])
def test_admission_is_by_arrival_or_by_priority_then_arrival(by_priority, order):
    world = World(max_num_seqs=1, by_priority=by_priority)
    for name, priority in zip("abcd", [2, 1, -3, 1], strict=True):
        world.add(name, prompt(3), max_tokens=1, priority=priority)
    assert [name for _ in range(4) for name in world.step()] == list(order)


@pytest.mark.parametrize(("by_priority", "victim"), [(False, "late"), (True, "early")])
def test_the_last_in_order_is_preempted(by_priority, victim):
    world = World(num_blocks=5, block_size=4, by_priority=by_priority)
    world.add("early", prompt(4), max_tokens=12, priority=1)
    world.step()
    world.add("late", prompt(4, start=100), max_tokens=12, priority=0)
    world.drain()
    assert {name for name, request in world.requests.items() if request.num_preemptions} == {victim}
    assert world.output("early") == solo(prompt(4), 12)
    assert world.output("late") == solo(prompt(4, start=100), 12)


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_request_preempted_after_it_was_scheduled_leaves_the_step(by_priority):
    """A prompt that is first in order runs out of blocks after later decoding requests were put into the step."""
    world = World(num_blocks=6, block_size=4, max_num_seqs=2, budget=2, by_priority=by_priority)
    long = world.add("long", prompt(15), priority=0)
    assert world.step() == {"long": 2}
    decoding = world.add("decoding", prompt(1, start=100), max_tokens=15, priority=1)
    assert world.step() == {"long": 1, "decoding": 1}
    for _ in range(9):
        assert world.step() == {"decoding": 1, "long": 1}
    assert (world.scheduler.pool.num_free, long.num_computed_tokens, decoding.num_computed_tokens) == (0, 12, 10)
    assert world.step() == {"long": 2}
    assert world.last.total_tokens == 2
    assert (long.num_preemptions, decoding.num_preemptions) == (0, 1)
    world.drain()
    assert world.output("decoding") == solo(prompt(1, start=100), 15)


def test_a_request_of_high_priority_runs_before_those_that_run_already():
    world = World(budget=8, max_num_seqs=3, by_priority=True)
    world.add("low", prompt(30), priority=5)
    world.step()
    world.add("high", prompt(30, start=100), priority=1)
    world.step()
    assert [request.request_id for request in world.scheduler.running] == ["high", "low"]
    assert world.step() == {"high": 4, "low": 4}


# Ends from outside


def test_a_waiting_request_can_be_aborted_and_no_longer_blocks_others():
    world = World(num_blocks=10, block_size=4)
    world.add("running", prompt(19), max_tokens=3)
    world.step()
    world.add("blocked", prompt(30, start=100), max_tokens=3)
    world.add("small", prompt(3, start=200), max_tokens=9)  # not small enough to overtake
    assert world.step() == {"running": 1}
    assert world.finish("blocked", "abort").finish_reason == "abort"
    assert world.scheduler.num_waiting == 1
    assert world.step() == {"running": 1, "small": 3}
    world.drain()


def test_aborted_waiting_requests_do_not_pile_up_behind_a_blocked_one():
    world = World(max_num_seqs=1)
    world.add("running", prompt(3), max_tokens=100)
    world.step()
    for i in range(1000):
        world.add(f"{i}", prompt(3))
        world.finish(f"{i}", "abort")
    assert len(world.scheduler._queue) < 100


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_can_be_aborted_in_the_middle_of_its_prompt(n):
    world = World(budget=8, block_size=4, max_num_seqs=3)
    world.add("a", prompt(20), n=n)
    world.step()
    world.finish("a", "abort")
    assert world.scheduler.pool.num_free == 100
    assert world.scheduler.running == world.scheduler.schedule().requests == []
    again = world.add("a", prompt(20), n=3)  # id and seats are free again, and what was computed is cached
    world.drain()
    assert again.num_cached_tokens == 8


def test_one_sequence_of_several_can_be_ended_alone():
    world = World(block_size=4)
    world.add("f", prompt(6), max_tokens=6, n=3)
    world.step()
    world.step()
    ended = world.finish("f:1", "stop", "some string")
    assert (ended.finish_reason, ended.stop_reason, ended.num_output_tokens) == ("stop", "some string", 2)
    assert world.step() == {"f": 1, "f:2": 1}
    world.drain()
    assert world.output("f:2") == solo(prompt(6), 6, 2)


def test_unknown_and_ended_requests_are_left_alone():
    world = World()
    world.add("a", prompt(3), max_tokens=1)
    world.drain()
    assert world.scheduler.finish("a", "abort") is None
    assert world.scheduler.finish("never", "abort") is None
    assert world.requests["a"].finish_reason == "length"
    assert world.scheduler.get("a") is None


def test_an_error_ends_its_request_and_no_other():
    world = World(block_size=4)
    world.add("good", prompt(6))
    world.add("bad", prompt(6, start=100), n=3)
    world.step(failing=["bad"])
    bad = world.requests["bad"]
    assert (bad.finish_reason, bad.stop_reason, bad.output_token_ids) == ("error", "broke", [])
    world.add("next", prompt(6, start=100))  # its blocks were not published: what they hold is not trusted
    world.drain()
    assert world.requests["next"].num_cached_tokens == 0
    assert world.output("good") == solo(prompt(6), 4)


# Ids


def test_an_id_in_use_is_refused_while_any_sequence_of_it_runs():
    world = World()
    world.add("f", prompt(3), n=2)
    with pytest.raises(RequestError, match="'f' is in use"):
        world.add("f", prompt(3))
    world.step()
    world.finish("f", "stop")
    with pytest.raises(RequestError, match="'f' is in use") as refusal:
        world.add("f", prompt(3))
    assert refusal.value.param == "request_id"
    world.finish("f:1", "stop")
    world.add("f", prompt(3))
    world.drain()


def test_an_id_like_that_of_a_further_sequence_is_refused():
    world = World()
    world.add("f", prompt(3), n=2)
    with pytest.raises(RequestError, match="'f:1' ends in a colon and a number"):
        world.add("f:1", prompt(3))
    world.add("f:x", prompt(3))
    world.drain()
    assert world.output("f:1") == solo(prompt(3), 4, 1)


def test_an_empty_step_means_nothing_to_do_and_is_not_counted():
    world = World()
    assert world.step() == {}
    world.add("a", prompt(3), max_tokens=2)
    world.drain()
    stats = world.scheduler.stats
    assert (stats.num_steps, stats.num_scheduled_tokens) == (2, 4)
