"""The scheduler under random loads, over simulated KV memory: whatever happens, every output equals its solo run."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_world import VOCAB, World

from octavo.engine.swap import SwapCosts

STABLE = settings(deadline=None, derandomize=True, database=None)

HOST = st.sampled_from([0, 1, 4, 30])
COSTS = st.sampled_from([None, None, 0.1, 0.5])
"""Seconds that a token takes to compute, where one that a block takes to move is 1; None: swap what can be swapped."""
WINDOWS = st.sampled_from([None, None, 1, 3, 7, 20])
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
        num_host_blocks=HOST,
        token_cost=COSTS,
        window=WINDOWS,
    )
    def start(
        self, num_blocks, block_size, budget, max_num_seqs, caching, by_priority, num_host_blocks, token_cost, window
    ):
        self.world = World(
            num_blocks,
            block_size,
            max_num_seqs=min(max_num_seqs, budget),
            budget=budget,
            enable_prefix_caching=caching,
            by_priority=by_priority,
            num_host_blocks=num_host_blocks,
            swap_costs=None if token_cost is None else SwapCosts(1, 1.0, token_cost),
            sliding_window=window,
        )

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
        name = str(len(self.world.sequences))
        self.world.add(name, prompt, max_tokens, min_tokens=min_tokens, n=n, **others)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, data, reason):
        self.world.finish(data.draw(st.sampled_from(sorted(r.request_id for r in self.world.live))), reason)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def step_with_an_error(self, data):
        self.world.step(failing=[data.draw(st.sampled_from([r.request_id for r in self.world.scheduler.running]))])

    @rule()
    def step_whose_blocks_cannot_be_moved(self):
        self.world.step(broken_moves=True)

    @rule()
    def reset_prefix_cache(self):
        self.world.reset_prefix_cache()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(STABLE, max_examples=500, stateful_step_count=40)


@pytest.mark.parametrize("by_priority", [False, True])
@settings(STABLE, max_examples=400)
@given(
    seed=st.integers(0, 1 << 32),
    num_blocks=BLOCKS,
    block_size=SIZES,
    budget=BUDGETS,
    max_num_seqs=st.integers(1, 8),
    num_host_blocks=HOST,
    token_cost=COSTS,
    window=WINDOWS,
)
def test_long_random_traces_keep_all_promises(
    by_priority, seed, num_blocks, block_size, budget, max_num_seqs, num_host_blocks, token_cost, window
):
    random = Random(seed)
    world = World(
        num_blocks,
        block_size,
        max_num_seqs=min(max_num_seqs, budget),
        budget=budget,
        enable_prefix_caching=random.random() < 0.8,
        by_priority=by_priority,
        num_host_blocks=num_host_blocks,
        swap_costs=None if token_cost is None else SwapCosts(1, 1.0, token_cost),
        sliding_window=window,
    )
    capacity = world.scheduler.capacity_tokens
    common = [random.randrange(VOCAB) for _ in range(20)]
    for i in range(60):
        if random.random() < 0.5:
            prompt = common[: random.randrange(20)] + [random.randrange(VOCAB) for _ in range(random.randint(1, 8))]
            world.add(
                str(i),
                prompt[: capacity - 1],
                max_tokens=random.randint(4, 24),
                ends=random.sample(range(VOCAB), random.randrange(2)),
                min_tokens=random.randrange(4),
                n=min(random.choice([1, 1, 1, 2, 3, 4]), world.scheduler.max_num_seqs),
                priority=random.randrange(3),
                root=random.choice([None, None, 1, 2]),
            )
        if world.live and random.random() < 0.05:
            world.finish(random.choice(world.live).request_id, random.choice(["abort", "stop"]))
        for _ in range(random.randrange(4)):
            world.step(broken_moves=random.random() < 0.02)
    world.drain()


def test_the_traces_reach_what_they_are_meant_to_test():
    """A guard against a harness that is too tame: forks, preemptions, hits and copies all happen in such a load."""
    world = World(8, 2, max_num_seqs=4, budget=8)
    for i in range(20):
        world.add(str(i), [0, 1, 1, 0, i % 3], max_tokens=5, n=1 + i % 3)
    copies = 0
    while world.live:
        world.step()
        copies += len(world.last.block_copies)
    stats = world.scheduler.stats
    assert min(copies, stats.prefix_hits, stats.num_preemptions) > 5
