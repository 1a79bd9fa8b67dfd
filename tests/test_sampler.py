"""Sampling against a slow oracle in plain Python, against exact distributions, and against itself in other company."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import Request
from octavo.engine.sampler import Sampler, uniform
from octavo.engine.sampling_params import SamplingParams

INF = math.inf


def request(prompt=(1, 2), output=(), *, seed=0, ends=(), bad_words=(), index=0, **params):
    given = {"seed": seed, "end_token_ids": frozenset(ends), "bad_word_ids": bad_words}
    made = Request("r", prompt, SamplingParams(**params), **given)
    made.token_ids += output
    made.sequence_index = index
    return made


def sample(logits, requests):
    logits = torch.as_tensor(logits)
    before = logits.clone()
    rows = Sampler(logits.shape[1]).sample(logits, requests)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())  # never written to
    return rows


def tokens_of(logits, **params):
    """The token of a single row; fails if the row has an error."""
    rows = sample(torch.as_tensor(logits)[None], [request(**params)])
    assert rows.errors == {}
    return rows.token_ids[0][0]


def altered(logits, req):
    """All that changes logits before the temperature, in the documented order."""
    params, output = req.params, req.output_token_ids
    logits = list(logits)
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -INF
    for *start, last in req.bad_word_ids:
        if output[len(output) - len(start) :] == start:
            logits[last] = -INF
    if len(output) < params.min_tokens:
        for token in req.end_token_ids:
            logits[token] = -INF
    for token, bias in params.logit_bias.items():
        logits[token] += min(100, max(-100, bias))
    for token in set(req.token_ids):
        logits[token] *= params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


def distribution(logits, params, slack=0.0):
    """What may be drawn, as (token, probability) in the order in which the sampler adds them up."""
    peak = max(logits)
    weights = [math.exp((value - peak) / params.temperature) for value in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    narrowed = params.top_p < 1 or params.min_p > 0 or 0 < params.top_k < len(logits)
    kept = ranked[: params.top_k] if params.top_k > 0 else ranked
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if params.top_p < 1 and mass >= (params.top_p + slack) * total and nucleus:
            break
        if weights[token] < (params.min_p - slack) * weights[kept[0]] and nucleus:
            break
        mass += weights[token]
        nucleus.append(token)
    return [(token, weights[token] / mass) for token in (nucleus if narrowed else sorted(nucleus)) if weights[token]]


def possible_tokens(logits, req, number):
    """The tokens that this random number may mean, a little rounding granted."""
    logits, found = altered(logits, req), set()
    if req.params.greedy:
        return {max(range(len(logits)), key=lambda token: (round(logits[token], 4), -token))}
    for slack in (-1e-5, 0.0, 1e-5):
        pairs = distribution(logits, req.params, slack)
        ends = list(itertools.accumulate(share for _, share in pairs))
        for nudge in (-1e-5, 0.0, 1e-5):
            place = bisect.bisect_right(ends, max(0.0, number + nudge))
            found.add(pairs[min(place, len(pairs) - 1)][0])
    return found


VOCAB = 150
TOKEN = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw, most_forks=2):
    def sometimes(strategy, default):
        return draw(st.just(default) | strategy)

    temperature = draw(st.sampled_from([0.0, 1e-4, 0.3, 0.8, 1.0, 1.7, 50.0]))
    return request(
        draw(st.lists(TOKEN, min_size=1, max_size=5)),
        draw(st.lists(TOKEN, max_size=6)),
        seed=draw(st.integers(0, 2**64 - 1)),
        ends=draw(st.sets(TOKEN, max_size=2)),
        bad_words=sometimes(st.lists(st.lists(TOKEN, min_size=1, max_size=2), max_size=2), ()),
        index=draw(st.integers(0, 3)),
        n=1 + draw(st.integers(0, most_forks)) * (temperature >= 1e-4),
        temperature=temperature,
        top_k=sometimes(st.sampled_from([1, 3, 20, 64, 100, 149, 500]), 0),
        top_p=sometimes(st.sampled_from([1e-6, 0.3, 0.9, 0.999]), 1.0),
        min_p=sometimes(st.sampled_from([0.001, 0.1, 1.0]), 0.0),
        repetition_penalty=sometimes(st.sampled_from([0.5, 1.3, 2.0]), 1.0),
        frequency_penalty=sometimes(st.sampled_from([-2.0, 0.4, 2.0]), 0.0),
        presence_penalty=sometimes(st.sampled_from([-2.0, 0.7, 2.0]), 0.0),
        logit_bias=sometimes(st.dictionaries(TOKEN, st.sampled_from([-500.0, -3.0, 2.0, 1000.0]), max_size=3), {}),
        allowed_token_ids=sometimes(st.lists(TOKEN, min_size=20, max_size=80), None),
        min_tokens=sometimes(st.integers(0, 9), 0),
        logprobs=sometimes(st.sampled_from([0, 1, 5, 70, -1]), None),
    )


@st.composite
def logit_rows(draw, rows):
    """Rows as models make them, with many equal values, flat, peaked, with forbidden tokens, and broken."""
    made = []
    for _ in range(rows):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        row = torch.randn(VOCAB, generator=generator) * 3
        broken = row.index_fill(0, torch.tensor(draw(TOKEN)), draw(st.sampled_from([math.nan, INF])))
        holes = row.masked_fill(torch.rand(VOCAB, generator=generator) < 0.5, -INF)
        made.append(draw(st.sampled_from([row, row.round(), row * 0, row * 10, holes, broken, row * 0 - INF])))
    return torch.stack(made)


@settings(deadline=None, max_examples=200)
@given(logit_rows(1), requests())
def test_v19_every_token_is_the_one_that_a_plain_oracle_draws(logits, req):
    rows = sample(logits, [req])
    values = [float(value) for value in logits[0]]
    if any(math.isnan(value) or value == INF for value in values) or max(altered(values, req)) == -INF:
        assert rows.token_ids == [[]]
        assert rows.errors.keys() == {0}
        return
    assert rows.errors == {}
    assert len(rows.token_ids[0]) == req.params.n
    for index, token in enumerate(rows.token_ids[0]):
        number = uniform(req.seed, len(req.token_ids), req.sequence_index + index)
        assert token in possible_tokens(values, req, number)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_v19_a_row_is_the_same_in_any_company(data):
    count = data.draw(st.integers(2, 6))
    reqs = [data.draw(requests()) for _ in range(count)]
    logits = data.draw(logit_rows(count))
    order = data.draw(st.permutations(range(count)))
    together = sample(logits[list(order)], [reqs[row] for row in order])
    for place, row in enumerate(order):
        alone = sample(logits[row : row + 1], [reqs[row]])
        assert alone.token_ids[0] == together.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[place]  # bit for bit
        assert alone.errors.get(0) == together.errors.get(place)


@pytest.mark.parametrize("vocab", [64, 1000, 20_000])
def test_v19_a_row_is_the_same_in_any_company_with_large_vocabularies(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(18, vocab, generator=generator) * torch.linspace(0.5, 6, 18)[:, None]
    logits[::3] = logits[::3].bfloat16().float()
    kinds = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}, {"top_k": 900, "top_p": 0.99}]
    reqs = [request(seed=row, logprobs=3, **kinds[row % 5]) for row in range(18)]
    together = sample(logits, reqs)
    for row in range(18):
        alone = sample(logits[row : row + 1], reqs[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
        if row % 2:
            assert alone.token_ids[0][0] in possible_tokens(logits[row].tolist(), reqs[row], uniform(row, 2, 0))


def test_v19_penalties_come_and_go_with_their_request():
    logits = torch.tensor([[0.0, 3.0, 2.9, 1.0]] * 2)
    a, b = request([1], temperature=0, repetition_penalty=2.0), request([1], temperature=0)
    assert sample(logits, [a, b]).token_ids == [[2], [1]]
    assert sample(logits, [b, a]).token_ids == [[1], [2]]


def test_v19_presence_and_frequency_look_at_the_output_only():
    logits = [0.0, 3.0, 2.0]
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert tokens_of(logits, prompt=[1, 1], temperature=0, **{penalty: 1.5}) == 1
        assert tokens_of(logits, prompt=[0], output=[1], temperature=0, **{penalty: 1.5}) == 2
    assert tokens_of([0.0, 3.0, 2.0], prompt=[0], output=[1, 1], temperature=0, presence_penalty=0.9) == 1
    assert tokens_of([0.0, 3.0, 2.0], prompt=[0], output=[1, 1], temperature=0, frequency_penalty=0.9) == 2
    assert tokens_of(logits, prompt=[1], temperature=0, repetition_penalty=2.0) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-40, 0.0, -0.0])
@pytest.mark.parametrize("narrow", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.1}])
def test_v20_tiny_temperatures(dtype, temperature, narrow):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, generator=generator) * 20
    logits[77] = torch.finfo(torch.float16).max  # what divided by a small temperature would overflow
    assert tokens_of(logits.to(dtype), temperature=temperature, **narrow) == 77
    assert tokens_of(-logits.abs().to(dtype).index_fill(0, torch.tensor(5), -0.0), temperature=temperature) == 5


def test_v20_huge_temperatures_are_uniform_over_what_is_allowed():
    drawn = {tokens_of([9.0, 0.0, 5.0], seed=seed, temperature=1e300, allowed_token_ids=[0, 2]) for seed in range(40)}
    assert drawn == {0, 2}


@pytest.mark.parametrize("broken", [math.nan, INF])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"allowed_token_ids": [4]}])
def test_broken_logits_end_their_row_only(broken, params):
    logits = torch.arange(5.0).repeat(3, 1)
    logits[1, 3] = broken
    good = [request(seed=7, logprobs=2, **params) for _ in range(3)]
    rows = sample(logits, good)
    assert rows.errors == {1: "the model's logits are not finite"}
    assert rows.token_ids[1] == []
    assert rows.logprobs[1] == []
    alone = sample(logits[:1], good[:1])
    assert rows.token_ids[0] == rows.token_ids[2] == alone.token_ids[0]
    assert rows.logprobs[0] == rows.logprobs[2] == alone.logprobs[0]


def test_a_row_without_any_token_left_is_an_error():
    reqs = [request(allowed_token_ids=[1], bad_words=[[1]]), request()]
    rows = sample(torch.zeros(2, 3), reqs)
    assert rows.errors == {0: "the sampling parameters leave no token"}
    assert len(rows.token_ids[1]) == 1


@pytest.mark.parametrize("odd", [-1, 3, 2**31, 2**63])
@pytest.mark.parametrize(
    "where",
    [
        lambda odd: request(logit_bias={odd: 1.0}),
        lambda odd: request(allowed_token_ids=[0, odd]),
        lambda odd: request([odd], repetition_penalty=1.1),
        lambda odd: request([0], [odd], presence_penalty=1.0),
        lambda odd: request(ends=[odd], min_tokens=1),
        lambda odd: request(bad_words=[[odd]]),
    ],
)
def test_s02_ids_outside_the_vocabulary_touch_no_other_logit(odd, where):
    rows = sample(torch.tensor([[0.0, 1.0, 2.0]] * 2), [where(odd), request([0], temperature=0)])
    assert rows.errors == {0: f"token id {odd} is outside the model's vocabulary of 3 tokens"}
    assert rows.token_ids == [[], [2]]


def test_s02_prompt_logprobs_of_an_id_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="token id -1 is outside"):
        Sampler(3).prompt_logprobs(torch.zeros(1, 3), [-1], 0)


def test_v31_min_tokens_masks_all_ends():
    logits = [5.0, 4.0, 3.0, 2.0]
    for output, token in (([], 3), ([3], 3), ([3, 3], 0)):
        assert tokens_of(logits, output=output, ends=[0, 1, 2], min_tokens=2, temperature=0) == token


def test_bad_words_are_never_completed():
    logits = [0.0, 5.0, 4.0]
    assert tokens_of(logits, temperature=0, bad_words=[[1]]) == 2
    assert tokens_of(logits, output=[2], temperature=0, bad_words=[[2, 1], []]) == 2
    assert (
        tokens_of(logits, prompt=[2], temperature=0, bad_words=[[2, 1]]) == 1
    )  # begun by the prompt: not a word of ours
    assert tokens_of(logits, output=[0, 0], temperature=0, bad_words=[[2, 0, 0, 1], [2, 1]]) == 1


def test_greedy_takes_the_first_of_equal_tokens():
    for vocab in (10, 64, 5000):
        logits = torch.zeros(vocab)
        logits[[3, 7, vocab - 1]] = 1.0
        assert tokens_of(logits, temperature=0) == 3


def assert_follows(counts, pairs):
    """Chi-square, far beyond chance: the seeds are fixed, so this either always fails or never does."""
    total, expected = sum(counts.values()), dict(pairs)
    assert set(counts) <= set(expected)
    common = {token: share * total for token, share in expected.items() if share * total >= 5}
    statistic = sum((counts.get(token, 0) - mean) ** 2 / mean for token, mean in common.items())
    assert statistic < len(common) + 4 * math.sqrt(2 * len(common)) + 4


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 2.0, "top_p": 0.97},
        {"min_p": 0.15},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {4: 2.0}},
    ],
)
@pytest.mark.parametrize("how", ["seeds", "positions", "forks"])
def test_draws_follow_the_exact_distribution(params, how):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3)) * 1.5
    reqs = [request(seed=seed, **params) for seed in range(4000)]
    if how == "positions":  # the prompt's repeated tokens change nothing but its length
        reqs = [request([1, 2] * (size // 2 + 1) + [1] * (size % 2), **params) for size in range(400)]
    elif how == "forks":
        reqs = [request(seed=seed, n=100, **params) for seed in range(40)]
    rows = sample(logits.expand(len(reqs), -1), reqs)
    counts = Counter(itertools.chain(*rows.token_ids))
    assert_follows(counts, distribution(altered(logits.tolist(), reqs[0]), reqs[0].params))


def test_a_fork_draws_what_it_would_draw_alone():
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(4))
    alone = [sample(logits, [request(seed=9, index=index)]).token_ids[0][0] for index in range(5)]
    assert sample(logits, [request(seed=9, n=5)]).token_ids == [alone]


def test_random_numbers_are_even_and_strangers_to_their_neighbours():
    grid = [[uniform(seed, position, 0) for position in range(300)] for seed in range(100)]
    flat = list(itertools.chain(*grid))
    assert len(set(flat)) == len(flat)
    assert_follows(Counter(math.floor(number * 10) for number in flat), [(tenth, 0.1) for tenth in range(10)])
    by_index = [uniform(0, position, index) for position in range(100) for index in range(300)]
    pairs = [
        [(line[i], line[i + 1]) for line in grid for i in range(299)],  # the next position
        [(grid[i][j], grid[i + 1][j]) for i in range(99) for j in range(300)],  # the next seed
        list(itertools.pairwise(by_index)),  # the next sequence
        [(uniform(i, i, 0), uniform(i + 1, i + 1, 0)) for i in range(30_000)],
        [(uniform(i, 1, 2), uniform(1, i, 2)) for i in range(2, 30_000)],
    ]
    for pair in pairs:
        correlation = sum((a - 0.5) * (b - 0.5) for a, b in pair) * 12 / len(pair)
        assert abs(correlation) < 4 / math.sqrt(len(pair))


def test_random_numbers_take_any_integer():
    assert all(0 <= uniform(number, number, number) < 1 for number in (-1, 2**64 - 1, 2**80, -(2**70)))
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def assert_logprobs(entries, logits, token, count):
    values = torch.log_softmax(logits.double(), -1)
    order = sorted(range(len(logits)), key=lambda t: (-float(logits[t]), t))[:count]
    chosen, *top = entries
    assert chosen[0] == token
    assert chosen[2] == 1 + int((logits > logits[token]).sum())
    assert [t for t, _, _ in top] == order
    assert [rank for _, _, rank in top] == list(range(1, len(order) + 1))
    assert all(abs(value - float(values[t])) < 1e-4 for t, value, _ in entries)


@pytest.mark.parametrize("count", [0, 1, 5, 65, 5000, -1])
@pytest.mark.parametrize("vocab", [100, 9000])
@pytest.mark.parametrize("coarse", [False, True])  # coarse: many equal logits
def test_logprobs_are_of_the_raw_logits(count, vocab, coarse):
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab + count)) * 3
    logits = logits.round() if coarse else logits
    reqs = [request(n=3, logprobs=count, temperature=5.0, logit_bias={7: 100.0}), request()]
    rows = sample(logits, reqs)
    assert rows.logprobs[1] is None
    count = vocab if count < 0 else min(count, vocab)
    for token, found in zip(rows.token_ids[0], rows.logprobs[0], strict=True):
        assert_logprobs(found.entries, logits[0], token, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs(dtype):
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(5)).to(dtype)
    following = random.Random(0).choices(range(300), k=40)
    for count in (0, 3, -1):
        found = Sampler(300).prompt_logprobs(logits, following, count)
        for row, (token, item) in enumerate(zip(following, found, strict=True)):
            assert_logprobs(item.entries, logits[row].float(), token, 300 if count < 0 else count)
    assert Sampler(300).prompt_logprobs(logits[:0], [], 5) == []
    logits[0, 1] = math.nan
    broken, good = Sampler(300).prompt_logprobs(logits[:2], [3, 3], 1)
    assert math.isnan(broken.entries[0][1])
    assert_logprobs(good.entries, logits[1].float(), 3, 1)


def test_no_rows():
    rows = sample(torch.empty(0, 7), [])
    assert (rows.token_ids, rows.logprobs, rows.errors) == ([], [], {})
