"""The scheduler under random loads, driven with simulated KV memory: whatever happens, every output equals its solo run.

The simulated K and V of a position are a checksum of the tenant and of all tokens up to it, as a real model's depend on all
of them. Blocks are poisoned when they are freed and when they are given out, so that a read of anything but what this
request (or an equal prefix) wrote is seen at once.
"""

from collections import Counter
from itertools import accumulate
from random import Random
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.request import Request, Status
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import StepOutput

STABLE = settings(deadline=None, derandomize=True, database=None)
VOCAB = 6  # few tokens: prompts share prefixes, and ends come early
POISON = -1


def sample(tokens, sequence_index):
    """The simulated model's next token."""
    return crc32(bytes([*tokens, sequence_index])) % VOCAB


def kv(cache_root, tokens):
    """The simulated K and V of all positions."""
    start = crc32(repr(cache_root).encode())
    return list(accumulate(tokens, lambda seen, token: crc32(bytes([token]), seen), initial=start))[1:]


def solo(request):
    """What the sequence becomes when nothing interferes: its tokens, finish reason and stop reason."""
    tokens = request.token_ids[: request.num_prompt_tokens]
    while True:
        token = sample(tokens, request.sequence_index)
        tokens.append(token)
        if token in request.end_token_ids and len(tokens) - request.num_prompt_tokens > request.min_tokens:
            return tokens, "stop", token if token in request.params.stop_token_ids else None
        if len(tokens) >= request.limit_tokens:
            return tokens, "length", None


class World:
    """A scheduler, its simulated workers, and every check that can be made from outside."""

    def __init__(self, num_blocks, block_size, max_num_seqs, budget, caching=True, by_priority=False):
        self.scheduler = Scheduler(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            by_priority=by_priority,
        )
        self.memory = [[POISON] * block_size for _ in range(num_blocks)]
        self.sequences = {}  # all there ever were
        self.expected = {}  # finish reasons of those that were ended from outside
        self.num_preempted = 0

    def add(self, prompt, *, max_tokens, ends=(), stops=(), min_tokens=0, n=1, priority=0, root=None):
        params = SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops)
        request = Request(
            str(len(self.sequences)),
            prompt,
            params,
            priority=priority,
            limit_tokens=len(prompt) + max_tokens,
            end_token_ids=frozenset((*ends, *stops)),
            cache_root=root,
        )
        self.scheduler.add(request)
        self.sequences[request.request_id] = request
        return request

    def finish(self, request, reason):
        assert self.scheduler.finish(request.request_id, reason) is request
        self.expected[request] = reason
        self.poison_free()

    @property
    def live(self):
        return list(self.scheduler)

    def step(self, failing=()):
        scheduler, order = self.scheduler, self.scheduler._order
        running, counted = list(scheduler.running), scheduler.stats.num_preemptions
        step = scheduler.schedule()
        assert bool(step.requests) == (len(scheduler) > 0), "deadlock: requests are left, but the step is empty"
        self.check_step(step)
        preempted = [request for request in running if request.status is Status.WAITING]
        assert scheduler.stats.num_preemptions - counted == len(preempted)
        assert not preempted or running[0] not in preempted, "the first in order was preempted"
        self.num_preempted += len(preempted)
        if not preempted:
            self.check_budget_is_used(step)
        if not step.requests:
            return
        assert scheduler.running[0] in step.requests, "the first in order stands still"
        output = self.execute(step)
        output.errors = {i: "broke" for i, request in enumerate(step.requests) if request in failing}
        forks = scheduler.commit(step, output)
        for i, children in forks.items():
            assert [child.sequence_index for child in children] == list(range(1, step.requests[i].params.n))
            self.sequences.update((child.request_id, child) for child in children)
        self.expected.update((step.requests[i], "error") for i in output.errors)
        assert scheduler.running == sorted(scheduler.running, key=order)
        waiting = [order(request) for request in self.live if request.status is Status.WAITING]
        if scheduler.running and waiting and not scheduler.by_priority:
            assert order(scheduler.running[-1]) < min(waiting), "a later request overtook an earlier one"
        self.poison_free()

    def check_step(self, step):
        scheduler = self.scheduler
        scheduled = dict(zip(step.requests, step.num_scheduled_tokens, strict=True))
        assert len(scheduled) == len(step.requests), "a request is in the step twice"
        assert step.total_tokens == sum(step.num_scheduled_tokens) <= scheduler.max_num_batched_tokens
        assert min(step.num_scheduled_tokens, default=1) > 0
        assert all(request.status is Status.RUNNING for request in scheduled)
        for request in scheduler.running:
            lacking = len(request.token_ids) - request.num_computed_tokens
            assert lacking > 0
            assert scheduled.get(request, 0) <= lacking
            if lacking == 1:
                assert scheduled[request] == 1, "a decoding request was not scheduled"
        pending = sum(request.num_pending_forks for request in scheduler.running)
        assert pending == scheduler._pending_forks
        assert len(scheduler.running) + pending <= scheduler.max_num_seqs

    def check_budget_is_used(self, step):
        """Nobody who could use what is left of the budget was given less than it lacks."""
        scheduled = dict(zip(step.requests, step.num_scheduled_tokens, strict=True))
        if step.total_tokens < self.scheduler.max_num_batched_tokens and self.scheduler.pool.num_free:
            for request in self.scheduler.running:
                assert scheduled[request] == len(request.token_ids) - request.num_computed_tokens

    def execute(self, step):
        """Writes the simulated K and V of the step, reads back each request's whole history, and samples."""
        pool, size = self.scheduler.pool, self.scheduler.pool.block_size
        copied = [(target, list(self.memory[source])) for source, target in step.block_copies]
        assert len(copied) == len({target for target, _ in copied}), "two copies go to one block"
        for target, content in copied:
            self.memory[target] = content
        written = set()
        for request, num in zip(step.requests, step.num_scheduled_tokens, strict=True):
            start = request.num_computed_tokens
            assert pool.blocks_for(start + num) == len(request.block_ids)
            for block in request.block_ids[pool.blocks_for(start) :]:
                self.memory[block] = [POISON] * size
            values = kv(request.cache_root, request.token_ids)
            for position in range(start, start + num):
                block = request.block_ids[position // size]
                assert pool.ref_counts[block] == 1, "a shared block is written"
                assert (block, position % size) not in written
                written.add((block, position % size))
                self.memory[block][position % size] = values[position]
        output = StepOutput([])
        for i, (request, num) in enumerate(zip(step.requests, step.num_scheduled_tokens, strict=True)):
            end = request.num_computed_tokens + num
            read = [value for block in request.block_ids for value in self.memory[block]][:end]
            assert read == kv(request.cache_root, request.token_ids)[:end]
            if end < len(request.token_ids):
                output.token_ids.append(POISON)
                continue
            output.token_ids.append(sample(request.token_ids, request.sequence_index))
            if request.num_pending_forks:
                output.fork_token_ids[i] = [sample(request.token_ids, j) for j in range(1, request.params.n)]
        return output

    def poison_free(self):
        pool = self.scheduler.pool
        for block, references in enumerate(pool.ref_counts):
            if not references and pool._keys[block] is None:
                self.memory[block] = [POISON] * pool.block_size

    def check(self):
        """What holds between steps."""
        scheduler = self.scheduler
        live = self.live
        scheduler.pool.check(request.block_ids for request in live)
        assert [r for r in live if r.status is Status.RUNNING and r not in scheduler.running] == []
        assert scheduler.num_waiting == sum(request.status is Status.WAITING for request in live)
        assert scheduler.stats.num_preemptions == self.num_preempted
        assert self.num_preempted == sum(request.num_preemptions for request in self.sequences.values())
        for request in self.sequences.values():
            if request.status is not Status.RUNNING:
                assert not request.block_ids
            if request.num_cached_tokens:
                assert scheduler.pool.enable_prefix_caching
                assert request.num_cached_tokens < request.num_tokens
                assert request.num_cached_tokens % scheduler.pool.block_size == 0
            if request.finished:
                assert scheduler.get(request.request_id) is None
                self.check_output(request)
            else:
                assert scheduler.get(request.request_id) is request

    def check_output(self, request):
        tokens, reason, stop_reason = solo(request)
        if request in self.expected:
            assert request.finish_reason == self.expected[request]
            assert request.token_ids == tokens[: len(request.token_ids)]
        else:
            assert (request.token_ids, request.finish_reason, request.stop_reason) == (tokens, reason, stop_reason)

    def drain(self):
        """Runs until all have ended, and checks that this takes no longer than the rules allow."""
        # In order of arrival the first unfinished request gains a token in every step. Priorities may let it wait for all
        # that run, each of which in turn is first at some time.
        bound = sum(request.limit_tokens * (request.num_pending_forks + 1) for request in self.live)
        if self.scheduler.by_priority:
            bound *= len(self.scheduler.running) + 1
        for _ in range(bound):
            if not len(self.scheduler):
                break
            self.step()
            self.check()
        assert len(self.scheduler) == 0, "not all requests ended"
        self.step()
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_blocks
        for request in self.sequences.values():
            assert request.finished
        families = Counter(request.parent_id for request in self.sequences.values())
        for request in self.sequences.values():
            if request.sequence_index == 0 and request not in self.expected:
                assert families[request.request_id] == request.params.n


BLOCKS, SIZES, BUDGETS = st.integers(3, 12), st.integers(1, 5), st.integers(1, 64)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=2)


class Traffic(RuleBasedStateMachine):
    """Arrivals, ends and steps in any order."""

    @initialize(
        num_blocks=BLOCKS,
        block_size=SIZES,
        budget=BUDGETS,
        max_num_seqs=st.integers(1, 8),
        caching=st.sampled_from([True, True, True, False]),
        by_priority=st.booleans(),
    )
    def start(self, num_blocks, block_size, budget, max_num_seqs, caching, by_priority):
        self.world = World(num_blocks, block_size, min(max_num_seqs, budget), budget, caching, by_priority)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 16),
        ends=TOKENS,
        stops=TOKENS,
        min_tokens=st.integers(0, 4),
        n=st.sampled_from([1, 1, 1, 2, 3, 4]),
        priority=st.integers(-1, 1),
        root=st.sampled_from([None, None, 1, 2]),
    )
    def add(self, prompt, max_tokens, min_tokens, n, **others):
        scheduler = self.world.scheduler
        prompt = prompt[: scheduler.capacity_tokens - 1]
        n, min_tokens = min(n, scheduler.max_num_seqs), min(min_tokens, max_tokens)
        self.world.add(prompt, max_tokens=max_tokens, min_tokens=min_tokens, n=n, **others)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, data, reason):
        self.world.finish(data.draw(st.sampled_from(self.world.live)), reason)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()
            self.world.check()

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def step_with_an_error(self, data):
        self.world.step(failing=[data.draw(st.sampled_from(self.world.scheduler.running))])

    @rule()
    def reset_prefix_cache(self):
        self.world.scheduler.pool.reset_prefix_cache()
        self.world.poison_free()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(STABLE, max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("by_priority", [False, True])
@settings(STABLE, max_examples=150)
@given(seed=st.integers(0, 1 << 32), num_blocks=BLOCKS, block_size=SIZES, budget=BUDGETS, max_num_seqs=st.integers(1, 8))
def test_long_random_traces_keep_all_promises(by_priority, seed, num_blocks, block_size, budget, max_num_seqs):
    random = Random(seed)
    world = World(num_blocks, block_size, min(max_num_seqs, budget), budget, random.random() < 0.8, by_priority)
    capacity = world.scheduler.capacity_tokens
    common = [random.randrange(VOCAB) for _ in range(20)]
    for _ in range(60):
        if random.random() < 0.5:
            prompt = common[: random.randrange(20)] + [random.randrange(VOCAB) for _ in range(random.randint(1, 8))]
            world.add(
                prompt[: capacity - 1],
                max_tokens=random.randint(4, 24),
                ends=random.sample(range(VOCAB), random.randrange(2)),
                min_tokens=random.randrange(4),
                n=min(random.choice([1, 1, 1, 2, 3, 4]), world.scheduler.max_num_seqs),
                priority=random.randrange(3),
                root=random.choice([None, None, 1, 2]),
            )
        if world.live and random.random() < 0.05:
            world.finish(random.choice(world.live), random.choice(["abort", "stop"]))
        for _ in range(random.randrange(4)):
            world.step()
            world.check()
    world.drain()


def test_the_traces_reach_what_they_are_meant_to_test():
    """A guard against a harness that is too tame: forks, preemptions, hits and copies all happen in such a load."""
    copies = hits = 0
    world = World(8, 2, 4, 8)
    execute = world.execute

    def counting(step):
        nonlocal copies
        copies += len(step.block_copies)
        return execute(step)

    world.execute = counting
    for i in range(20):
        world.add([0, 1, 1, 0, i % 3], max_tokens=5, n=1 + i % 3)
    world.drain()
    hits = world.scheduler.stats.prefix_hits
    assert min(copies, hits, world.num_preempted) > 5
