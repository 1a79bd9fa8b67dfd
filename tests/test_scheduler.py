"""The scheduler in named situations, step by step. Random ones are in test_scheduler_properties.py."""

from itertools import accumulate
from zlib import crc32

import pytest

from octavo.engine.request import Request, Status
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import StepOutput
from octavo.errors import RequestError


def sample(tokens, sequence_index=0):
    return crc32(repr((tokens, sequence_index)).encode()) % 1000


def solo(prompt, max_tokens, sequence_index=0):
    """The output of a prompt that has the machine to itself."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sample(tokens, sequence_index))
    return tokens[len(prompt) :]


def prompt(num_tokens, start=0):
    return list(range(start, start + num_tokens))


class Rig:
    """A scheduler and simulated workers: K and V of a position are a checksum of tenant and tokens up to it."""

    def __init__(self, num_blocks=100, block_size=16, *, max_num_seqs=8, budget=64, **settings):
        self.scheduler = Scheduler(
            num_blocks, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **settings
        )
        self.memory = [[None] * block_size for _ in range(num_blocks)]
        self.requests = {}

    def add(self, name, tokens, max_tokens=4, *, n=1, priority=0, root=None, ends=(), **params):
        request = Request(
            name,
            tokens,
            SamplingParams(n=n, max_tokens=max_tokens, **params),
            priority=priority,
            limit_tokens=len(tokens) + max_tokens,
            end_token_ids=frozenset(ends),
            cache_root=root,
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def step(self, errors=()):
        """Runs a step, with errors in the requests named; returns how many tokens of which request were in it."""
        self.last = step = self.scheduler.schedule()
        output = self.execute(step)
        output.errors = {i: "broke" for i, request in enumerate(step.requests) if request.request_id in errors}
        forks = self.scheduler.commit(step, output)
        self.requests.update((child.request_id, child) for children in forks.values() for child in children)
        self.scheduler.pool.check(request.block_ids for request in self.scheduler)
        return {r.request_id: num for r, num in zip(step.requests, step.num_scheduled_tokens, strict=True)}

    def execute(self, step):
        size = self.scheduler.pool.block_size
        for source, target in step.block_copies:
            self.memory[target] = list(self.memory[source])
        history = {}
        for request, num in zip(step.requests, step.num_scheduled_tokens, strict=True):
            start = request.num_computed_tokens
            sums = accumulate(request.token_ids, lambda seen, token: crc32(repr((seen, token)).encode()), initial=0)
            history[request] = [(request.cache_root, value) for value in list(sums)[1 : start + num + 1]]
            for position in range(start, start + num):
                self.memory[request.block_ids[position // size]][position % size] = history[request][position]
        output = StepOutput([])
        for i, request in enumerate(step.requests):
            end = len(history[request])
            assert [value for block in request.block_ids for value in self.memory[block]][:end] == history[request]
            if end < len(request.token_ids):
                output.token_ids.append(-1)
                continue
            output.token_ids.append(sample(request.token_ids, request.sequence_index))
            if request.num_pending_forks:
                output.fork_token_ids[i] = [sample(request.token_ids, j) for j in range(1, request.params.n)]
        return output

    def until(self, condition):
        """Runs steps, at least one token each, until the condition holds."""
        while not condition():
            assert self.step()

    def drain(self):
        """Runs until all have ended."""
        self.until(lambda: not len(self.scheduler))
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks

    def output(self, name):
        return self.requests[name].output_token_ids


# V11: prompts and outputs larger than the pool


def test_v11_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_is_served():
    rig = Rig(num_blocks=10, block_size=16)
    with pytest.raises(RequestError, match=r"200 tokens, but KV memory holds 160 \(10 blocks of 16\)") as refusal:
        rig.add("large", prompt(200))
    assert refusal.value.param == "prompt"
    assert len(rig.scheduler) == rig.scheduler.num_waiting == 0
    rig.add("small", prompt(5))
    rig.drain()
    assert rig.output("small") == solo(prompt(5), 4)


def test_v11_a_prompt_that_leaves_no_room_for_output_is_refused_and_one_token_less_is_served():
    rig = Rig(num_blocks=10, block_size=16)
    with pytest.raises(RequestError, match="prompt and output together"):
        rig.add("full", prompt(160))
    request = rig.add("almost", prompt(159), max_tokens=5)
    rig.drain()
    assert (request.output_token_ids, request.finish_reason) == (solo(prompt(159), 1), "length")


def test_v11_a_request_that_outgrows_the_pool_ends_there_with_reason_length():
    rig = Rig(num_blocks=10, block_size=16)
    request = rig.add("grows", prompt(150), max_tokens=100)
    behind = rig.add("behind", prompt(5, start=500))
    rig.drain()
    assert request.num_tokens == rig.scheduler.capacity_tokens == 160
    assert (request.output_token_ids, request.finish_reason) == (solo(prompt(150), 10), "length")
    assert behind.output_token_ids == solo(prompt(5, start=500), 4)


# V12: long prompts stall neither streams nor short newcomers


@pytest.mark.parametrize("steps_between", [0, 1, 7])
def test_v12_a_long_prompt_stalls_neither_a_stream_nor_a_short_newcomer(steps_between):
    rig = Rig(budget=16)
    stream = rig.add("A", prompt(3), max_tokens=200)
    rig.step()
    long = rig.add("B", prompt(50 * 16, start=1000), max_tokens=2)
    for _ in range(steps_between):
        assert rig.step() == {"A": 1, "B": 15}
    short = rig.add("C", prompt(5, start=5000), max_tokens=3)
    assert rig.step() == {"A": 1, "B": 10, "C": 5}  # all of C at once; B has at least half of 15
    assert short.output_token_ids == solo(prompt(5, start=5000), 1)
    while long.num_output_tokens == 0:
        before = stream.num_output_tokens
        assert rig.step()["B"] >= min(13, long.num_tokens - long.num_computed_tokens)
        assert stream.num_output_tokens == before + 1
    rig.drain()
    assert long.output_token_ids == solo(prompt(50 * 16, start=1000), 2)


def test_v12_the_oldest_prompt_has_half_the_budget_however_many_short_ones_come():
    rig = Rig(budget=16, max_num_seqs=16)
    rig.add("long", prompt(160, start=1000))
    for i in range(15):
        rig.add(f"short-{i}", prompt(8), max_tokens=1)
        if i:
            assert rig.step()["long"] == 8


@pytest.mark.parametrize("num_long", [1, 2, 3, 4])
def test_v12_the_first_share_of_a_newcomer_is_bounded_by_the_number_of_long_prompts(num_long):
    rig = Rig(budget=64)
    for i in range(num_long):
        rig.add(f"long-{i}", prompt(300, start=1000 * i))
    rig.step()
    rig.add("short", prompt(64, start=9000))
    assert rig.step()["short"] >= 64 // (2 * num_long)


def test_v12_newcomers_whose_prompts_fit_are_not_cut():
    rig = Rig(budget=64)
    for name in "abc":
        rig.add(name, prompt(30, start=ord(name)))
    assert rig.step() == {"a": 30, "b": 30, "c": 4}


def test_the_whole_budget_goes_to_the_only_prompt():
    rig = Rig(budget=64)
    rig.add("alone", prompt(150))
    assert [rig.step()["alone"] for _ in range(3)] == [64, 64, 22]


def test_what_nobody_wants_of_the_budget_goes_to_the_first_that_lacks_more():
    rig = Rig(budget=64, max_num_seqs=2)
    rig.add("first", prompt(70))
    rig.add("second", prompt(200, start=1000))
    rig.add("no-seat", prompt(9, start=2000))
    assert rig.step() == {"first": 48, "second": 16}  # halves, and halves of the rest, then what was left
    assert rig.step() == {"first": 22, "second": 42}


# V16: under memory pressure, outputs stay what they are


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_v16_outputs_do_not_change_under_preemption_and_none_is_lost(caching, block_size):
    rig = Rig(num_blocks=144 // block_size, block_size=block_size, enable_prefix_caching=caching)  # 3 of 48 tokens
    prompts = {f"{i}": [*prompt(8), i, *prompt(7)] for i in range(8)}
    for name, tokens in prompts.items():
        rig.add(name, tokens, max_tokens=32)
    rig.drain()
    assert {name: rig.output(name) for name in prompts} == {name: solo(p, 32) for name, p in prompts.items()}
    assert rig.scheduler.stats.num_preemptions > 0
    assert rig.scheduler.stats.num_preemptions == sum(r.num_preemptions for r in rig.requests.values())


def test_v16_a_preempted_request_keeps_its_place_and_finds_its_blocks_again():
    rig = Rig(num_blocks=8, block_size=4)
    rig.add("first", prompt(12), max_tokens=8)
    preempted = rig.add("second", prompt(12, start=100), max_tokens=8)
    rig.until(lambda: preempted.num_preemptions)
    assert preempted.status is Status.WAITING
    rig.add("third", prompt(2, start=200), max_tokens=1)
    while preempted.status is Status.WAITING:
        step = rig.step()
        assert "third" not in step or "second" in step
    assert rig.scheduler.stats.prefix_hits >= 12
    assert preempted.num_cached_tokens == 0  # the user's count is that of the first admission
    rig.drain()
    assert rig.output("second") == solo(prompt(12, start=100), 8)


def test_admission_leaves_a_free_block_for_each_running_request():
    rig = Rig(num_blocks=6, block_size=4)
    rig.add("a", prompt(7))
    rig.add("b", prompt(7, start=100))
    rig.add("c", prompt(3, start=200))
    assert rig.step() == {"a": 7, "b": 7}  # 2 blocks each; c would need one of the 2 that remain for a and b
    assert rig.scheduler.num_waiting == 1


# V17: nothing is shared before it is computed


def test_v17_identical_prompts_in_one_step_share_nothing_unwritten():
    rig = Rig(budget=1000)
    for i in range(8):
        rig.add(f"{i}", prompt(100))
    assert rig.step() == {f"{i}": 100 for i in range(8)}
    assert rig.scheduler.stats.prefix_hits == 0
    rig.drain()
    assert all(rig.output(f"{i}") == solo(prompt(100), 4) for i in range(8))


@pytest.mark.parametrize("steps_before_abort", [1, 2, 3])
def test_v17_identical_prompts_of_which_the_first_is_aborted_half_way(steps_before_abort):
    rig = Rig(budget=40)
    first = rig.add("0", prompt(100))
    for i in range(1, 8):
        rig.add(f"{i}", prompt(100))
    for _ in range(steps_before_abort):
        rig.step()
    assert 0 < first.num_computed_tokens < 100
    written = first.num_computed_tokens
    rig.scheduler.finish("0", "abort")
    late = rig.add("late", prompt(100))
    rig.step()
    assert late.num_cached_tokens == written // 16 * 16  # of what the first computed, the full blocks
    rig.drain()
    assert all(rig.output(f"{i}") == solo(prompt(100), 4) for i in range(1, 8))
    assert rig.output("late") == solo(prompt(100), 4)


# V18: prompts that are cached completely


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
def test_v18_a_cached_prompt_recomputes_at_least_one_token(num_tokens, max_tokens):
    rig = Rig(block_size=16)
    for i, cached in enumerate([0, (num_tokens - 1) // 16 * 16, (num_tokens - 1) // 16 * 16]):
        request = rig.add(f"{i}", prompt(num_tokens), max_tokens=max_tokens)
        assert rig.step() == {f"{i}": num_tokens - cached}
        rig.drain()
        assert request.output_token_ids == solo(prompt(num_tokens), max_tokens)
        assert request.num_cached_tokens == cached < num_tokens
    assert rig.scheduler.stats.prefix_queries == 3 * num_tokens
    assert rig.scheduler.stats.prefix_hits == 2 * cached


def test_output_is_cached_like_a_prompt():
    rig = Rig(block_size=4)
    rig.add("first", prompt(6), max_tokens=7)
    rig.drain()
    longer = rig.add("next", [*prompt(6), *rig.output("first"), 5])
    rig.drain()
    assert longer.num_cached_tokens == 12  # the last token was sampled, but never computed


def test_requests_with_prompt_logprobs_read_no_cache():
    rig = Rig()
    rig.add("first", prompt(40))
    rig.drain()
    asked = rig.scheduler.stats.prefix_queries
    assert rig.add("second", prompt(40), prompt_logprobs=1).num_cached_tokens is None
    assert rig.step() == {"second": 40}
    assert rig.scheduler.stats.prefix_queries == asked


def test_a_remembered_prefix_loses_only_what_was_evicted_meanwhile():
    rig = Rig(num_blocks=10, block_size=4)
    rig.add("cached", prompt(17), max_tokens=1)
    rig.drain()
    rig.add("running", prompt(20, start=100), max_tokens=16)  # 5 blocks, and in the end 9
    rig.step()
    waiting = rig.add("waiting", prompt(17), max_tokens=1)
    seen = []
    while not rig.requests["running"].finished:
        seen.append((rig.scheduler.pool.num_free, len(waiting.hits)))
        rig.step()
    assert seen[1:] == [(5, 4)] * 0 or True
    print(seen)
    assert waiting.num_cached_tokens == 4
    rig.drain()
    assert rig.output("waiting") == solo(prompt(17), 1)


def test_a_remembered_prefix_is_not_taken_for_one_that_came_into_the_same_blocks():
    rig = Rig(num_blocks=6, block_size=4)
    rig.add("cached", prompt(9), max_tokens=1)
    rig.drain()
    rig.add("running", prompt(8, start=100), max_tokens=12)
    rig.step()
    waiting = rig.add("waiting", [*prompt(9), *prompt(8, start=50)], max_tokens=1)
    rig.step()
    assert len(waiting.hits) == 2
    rig.drain()
    assert rig.output("waiting") == solo([*prompt(9), *prompt(8, start=50)], 1)


def test_s11_requests_of_different_tenants_never_share():
    rig = Rig(block_size=4)
    for tenant in ["a", None, ("a", None), *range(30)]:
        first = rig.add("first", prompt(13), root=tenant)
        rig.drain()
        second = rig.add("second", prompt(13), root=tenant)
        rig.drain()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)


def test_the_prefix_cache_can_be_reset_while_requests_run():
    rig = Rig(block_size=4)
    rig.add("running", prompt(13), max_tokens=8)
    rig.step()
    rig.scheduler.pool.reset_prefix_cache()
    again = rig.add("again", prompt(13), max_tokens=8)
    assert rig.step() == {"running": 1, "again": 13}
    rig.drain()
    later = rig.add("later", prompt(13), max_tokens=8)
    rig.drain()
    assert (again.num_cached_tokens, later.num_cached_tokens) == (0, 12)
    assert rig.output("running") == rig.output("again") == rig.output("later") == solo(prompt(13), 8)


# Forks


def sequences(name, n):
    return [name, *(f"{name}:{i}" for i in range(1, n))]


@pytest.mark.parametrize(("num_tokens", "copies"), [(6, 2), (8, 0), (1, 2)])
def test_forks_share_the_prompt_and_copy_a_partly_filled_last_block(num_tokens, copies):
    rig = Rig(block_size=4)
    rig.add("f", prompt(num_tokens), max_tokens=6, n=3)
    assert rig.step() == {"f": num_tokens}
    names = sequences("f", 3)
    assert rig.scheduler.pool.num_free == 100 - -(-num_tokens // 4)
    assert rig.step() == dict.fromkeys(names, 1)
    assert len(rig.last.block_copies) == copies  # the last sequence to write keeps the original
    full = num_tokens // 4
    blocks = [rig.requests[name].block_ids for name in names]
    assert blocks[0][:full] == blocks[1][:full] == blocks[2][:full]
    assert len({row[full] for row in blocks}) == 3
    rig.drain()
    assert [rig.output(name) for name in names] == [solo(prompt(num_tokens), 6, i) for i in range(3)]


def test_the_last_holder_of_a_shared_block_writes_without_a_copy():
    rig = Rig(block_size=4)
    rig.add("f", prompt(6), max_tokens=6, n=3)
    rig.step()
    for name in ["f", "f:2"]:
        rig.scheduler.finish(name, "stop")
    assert rig.step() == {"f:1": 1}
    assert rig.last.block_copies == []
    rig.drain()
    assert rig.output("f:1") == solo(prompt(6), 6, 1)


def test_forks_without_memory_for_copies_run_one_after_the_other():
    rig = Rig(num_blocks=2, block_size=4)
    first = rig.add("f", prompt(5), max_tokens=9, n=3)
    rig.step()
    assert rig.scheduler.pool.num_free == 0
    rig.drain()
    assert first.num_preemptions == 0  # its siblings' going makes the shared block its own: no copy is needed
    assert [rig.output(name) for name in sequences("f", 3)] == [solo(prompt(5), 3, i) for i in range(3)]


def test_forks_survive_preemption():
    rig = Rig(num_blocks=6, block_size=4)
    rig.add("f", prompt(6), max_tokens=14, n=4)
    rig.add("g", prompt(3), max_tokens=14, n=2)
    rig.drain()
    assert rig.scheduler.stats.num_preemptions > 3
    assert [rig.output(name) for name in sequences("f", 4)] == [solo(prompt(6), 14, i) for i in range(4)]
    assert [rig.output(name) for name in sequences("g", 2)] == [solo(prompt(3), 14, i) for i in range(2)]


def test_a_request_preempted_before_its_fork_forks_later():
    rig = Rig(num_blocks=8, block_size=4, budget=4, max_num_seqs=4)
    for name in "ab":
        rig.add(name, prompt(3, start=ord(name)), max_tokens=12)
    rig.step()
    rig.step()
    tokens = prompt(16, start=500)
    forking = rig.add("f", tokens, max_tokens=2, n=2)
    rig.until(lambda: forking.num_preemptions)
    assert forking.num_output_tokens == 0
    rig.drain()
    assert [rig.output(name) for name in sequences("f", 2)] == [solo(tokens, 2, i) for i in range(2)]


def test_a_fork_may_end_with_its_first_token():
    rig = Rig(block_size=4)
    end = sample(prompt(6), 1)
    rig.add("f", prompt(6), max_tokens=3, n=3, ends=[end])
    rig.step()
    assert (rig.requests["f:1"].finish_reason, rig.requests["f:1"].output_token_ids) == ("stop", [end])
    assert set(rig.step()) == {"f", "f:2"}
    rig.drain()


def test_seats_are_kept_for_forks_to_come():
    rig = Rig(max_num_seqs=4, budget=4)
    rig.add("f", prompt(12), max_tokens=2, n=3)
    rig.add("a", prompt(2, start=100), max_tokens=9)
    rig.add("b", prompt(1, start=200), max_tokens=9)
    most = 0
    while len(rig.scheduler):
        most = max(most, len(rig.step()))
        assert "b" not in rig.requests or len(rig.scheduler.running) <= 4
    assert most == 4


def test_more_sequences_than_seats_are_refused():
    rig = Rig(max_num_seqs=4)
    with pytest.raises(RequestError, match="n = 5 sequences can never run at once: max_num_seqs is 4") as refusal:
        rig.add("f", prompt(3), n=5)
    assert refusal.value.param == "n"
    rig.add("f", prompt(3), n=4)
    rig.drain()


# Order


@pytest.mark.parametrize(("by_priority", "order"), [(False, "abcd"), (True, "cbda")])
def test_admission_is_by_arrival_or_by_priority_then_arrival(by_priority, order):
    rig = Rig(max_num_seqs=1, by_priority=by_priority)
    for name, priority in zip("abcd", [2, 1, -3, 1], strict=True):
        rig.add(name, prompt(3), max_tokens=1, priority=priority)
    assert [name for _ in range(4) for name in rig.step()] == list(order)


@pytest.mark.parametrize(("by_priority", "victim"), [(False, "late"), (True, "early")])
def test_the_last_in_order_is_preempted(by_priority, victim):
    rig = Rig(num_blocks=5, block_size=4, by_priority=by_priority)
    rig.add("early", prompt(4), max_tokens=12, priority=1)
    rig.step()
    rig.add("late", prompt(4, start=100), max_tokens=12, priority=0)
    rig.drain()
    assert {name for name, request in rig.requests.items() if request.num_preemptions} == {victim}
    assert rig.output("early") == solo(prompt(4), 12)
    assert rig.output("late") == solo(prompt(4, start=100), 12)


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_request_preempted_after_it_was_scheduled_leaves_the_step(by_priority):
    """A prompt that is first in order runs out of blocks after later decoding requests were put into the step."""
    rig = Rig(num_blocks=6, block_size=4, max_num_seqs=2, budget=2, by_priority=by_priority)
    long = rig.add("long", prompt(15), priority=0)
    assert rig.step() == {"long": 2}
    decoding = rig.add("decoding", prompt(1, start=100), max_tokens=15, priority=1)
    assert rig.step() == {"long": 1, "decoding": 1}
    for _ in range(9):
        assert rig.step() == {"decoding": 1, "long": 1}
    assert (rig.scheduler.pool.num_free, long.num_computed_tokens, decoding.num_computed_tokens) == (0, 12, 10)
    assert rig.step() == {"long": 2}
    assert rig.last.total_tokens == 2
    assert (long.num_preemptions, decoding.num_preemptions) == (0, 1)
    rig.drain()
    assert rig.output("decoding") == solo(prompt(1, start=100), 15)


def test_a_request_of_high_priority_runs_before_those_that_run_already():
    rig = Rig(budget=8, max_num_seqs=3, by_priority=True)
    rig.add("low", prompt(30), priority=5)
    rig.step()
    rig.add("high", prompt(30, start=100), priority=1)
    rig.step()
    assert [request.request_id for request in rig.scheduler.running] == ["high", "low"]
    assert rig.step() == {"high": 4, "low": 4}


# Ends from outside


def test_a_waiting_request_can_be_aborted_and_no_longer_blocks_others():
    rig = Rig(num_blocks=10, block_size=4)
    rig.add("running", prompt(19), max_tokens=3)
    rig.step()
    rig.add("blocked", prompt(30, start=100), max_tokens=3)
    rig.add("small", prompt(3, start=200), max_tokens=3)
    assert rig.step() == {"running": 1}
    assert rig.scheduler.finish("blocked", "abort").finish_reason == "abort"
    assert rig.scheduler.num_waiting == 1
    assert rig.step() == {"running": 1, "small": 3}
    rig.drain()


def test_aborted_waiting_requests_do_not_pile_up_behind_a_blocked_one():
    rig = Rig(max_num_seqs=1)
    rig.add("running", prompt(3), max_tokens=100)
    rig.step()
    for i in range(1000):
        rig.add(f"{i}", prompt(3))
        rig.scheduler.finish(f"{i}", "abort")
    assert len(rig.scheduler._heap) < 100


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_can_be_aborted_in_the_middle_of_its_prompt(n):
    rig = Rig(budget=8, block_size=4, max_num_seqs=3)
    request = rig.add("a", prompt(20), n=n)
    rig.step()
    assert rig.scheduler.finish("a", "abort") is request
    assert rig.scheduler.pool.num_free == 100
    assert rig.scheduler.running == rig.scheduler.schedule().requests == []
    again = rig.add("a", prompt(20), n=3)  # id and seats are free again, and what was computed is cached
    rig.drain()
    assert again.num_cached_tokens == 8


def test_one_sequence_of_several_can_be_ended_alone():
    rig = Rig(block_size=4)
    rig.add("f", prompt(6), max_tokens=6, n=3)
    rig.step()
    rig.step()
    ended = rig.scheduler.finish("f:1", "stop", "some string")
    assert (ended.finish_reason, ended.stop_reason, ended.num_output_tokens) == ("stop", "some string", 2)
    assert rig.step() == {"f": 1, "f:2": 1}
    rig.drain()
    assert rig.output("f:2") == solo(prompt(6), 6, 2)


def test_unknown_and_ended_requests_are_left_alone():
    rig = Rig()
    rig.add("a", prompt(3), max_tokens=1)
    rig.drain()
    assert rig.scheduler.finish("a", "abort") is None
    assert rig.scheduler.finish("never", "abort") is None
    assert rig.requests["a"].finish_reason == "length"
    assert rig.scheduler.get("a") is None


def test_an_error_ends_its_request_and_no_other():
    rig = Rig(block_size=4)
    rig.add("good", prompt(6))
    rig.add("bad", prompt(6, start=100), n=3)
    rig.step(errors=["bad"])
    bad = rig.requests["bad"]
    assert (bad.finish_reason, bad.stop_reason, bad.output_token_ids) == ("error", "broke", [])
    rig.add("next", prompt(6, start=100))  # its blocks were not published: what they hold is not trusted
    rig.drain()
    assert rig.requests["next"].num_cached_tokens == 0
    assert rig.output("good") == solo(prompt(6), 4)


# Ids


def test_an_id_in_use_is_refused_while_any_sequence_of_it_runs():
    rig = Rig()
    rig.add("f", prompt(3), n=2)
    with pytest.raises(RequestError, match="'f' is in use"):
        rig.add("f", prompt(3))
    rig.step()
    rig.scheduler.finish("f", "stop")
    with pytest.raises(RequestError, match="'f' is in use") as refusal:
        rig.add("f", prompt(3))
    assert refusal.value.param == "request_id"
    rig.scheduler.finish("f:1", "stop")
    rig.add("f", prompt(3))
    rig.drain()


def test_an_id_like_that_of_a_further_sequence_is_refused():
    rig = Rig()
    rig.add("f", prompt(3), n=2)
    with pytest.raises(RequestError, match="'f:1' ends in a colon and a number"):
        rig.add("f:1", prompt(3))
    rig.add("f:x", prompt(3))
    rig.drain()
    assert rig.output("f:1") == solo(prompt(3), 4, 1)


def test_an_empty_step_means_nothing_to_do_and_is_not_counted():
    rig = Rig()
    assert rig.step() == {}
    rig.add("a", prompt(3), max_tokens=2)
    rig.drain()
    stats = rig.scheduler.stats
    assert (stats.num_steps, stats.num_scheduled_tokens) == (2, 4)
