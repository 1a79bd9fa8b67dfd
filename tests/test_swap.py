"""Swapping through the whole engine: tiny models in hostile memory, whose outputs never depend on who was preempted how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from support import make_hostile, registry

from octavo import LLM, ConfigError, EngineConfig, KVGeometry, Platform, SamplingParams, Step, StepOutput
from octavo.attention.kv_format import PagedKV, PlainKV
from octavo.engine.kv_plan import plan_host_blocks
from octavo.engine.request import Status
from octavo.engine.swap import SwapCosts
from octavo.front.outputs import CompletionOutput
from octavo.testing import tiny_model
from octavo.testing.scripted import ScriptedModel

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MODES = ("recompute", "swap", "auto")
SPACE = "512KiB"  # 64 blocks of the model with two layers


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + 31 * seed + i * i * (seed + 1)) % 250 for i in range(length)]}


PROMPTS = [prompt(20 + n, n) for n in range(8)]


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "MistralForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"sliding_window": 20} if request.param == "MistralForCausalLM" else {}
    return tiny_model(tmp_path_factory.mktemp("model"), request.param, **window)


def engine(folder: Path, *, blocks: int = 5, mode: str = "swap", **settings: object) -> LLM:
    settings = {"swap_space": SPACE, "preemption_mode": mode, "max_num_seqs": 8, **settings}
    return make_hostile(LLM(str(folder), registry=registry(), num_blocks_override=blocks, **settings))


def solo(folder: Path, prompts: Sequence[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    llm = LLM(str(folder), registry=registry(), num_blocks_override=64, enable_prefix_caching=False)
    return [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]


def together(llm: LLM, prompts: Sequence[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(list(prompts), params)]


def nothing_leaks(llm: LLM) -> bool:
    stats = llm.stats()
    held = (stats.num_blocks - stats.num_free_blocks, stats.num_host_blocks - stats.num_free_host_blocks)
    return held == (0, 0) and (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_v16_outputs_equal_solo_runs_whatever_the_preemption_mode(folder: Path, mode: str, caching: bool) -> None:
    llm = engine(folder, mode=mode, enable_prefix_caching=caching)
    assert together(llm, PROMPTS) == solo(folder, PROMPTS)
    counts = llm.stats().scheduler
    assert counts.num_preemptions > 0
    assert counts.num_swaps == {"recompute": 0, "swap": counts.num_preemptions}.get(mode, counts.num_swaps)
    assert (counts.blocks_swapped_out > 0) == (counts.num_swaps > 0)
    assert counts.blocks_swapped_in <= counts.blocks_swapped_out
    assert nothing_leaks(llm)


@pytest.mark.parametrize("token_seconds", [1e-12, 1.0])
def test_auto_swaps_where_that_costs_less(folder: Path, token_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCosts, "note_prefill", lambda *measured: None)
    llm = engine(folder, mode="auto")
    costs = llm.engine.scheduler.swap.costs
    assert costs is not None
    assert costs.bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, heads, tokens, head_dim, bytes
    costs.seconds_per_token = token_seconds
    assert together(llm, PROMPTS) == solo(folder, PROMPTS)
    counts = llm.stats().scheduler
    assert (counts.num_swaps, counts.num_recomputes)[token_seconds == 1.0] == 0
    assert counts.num_preemptions > 0


def test_a_full_host_pool_means_recomputing(folder: Path) -> None:
    llm = engine(folder, swap_space="8KiB")
    assert together(llm, PROMPTS) == solo(folder, PROMPTS)
    assert llm.stats().num_host_blocks == 1
    assert llm.stats().scheduler.num_recomputes == llm.stats().scheduler.num_preemptions > 0
    assert nothing_leaks(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_forks_do_not_depend_on_memory(folder: Path, mode: str, caching: bool) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    prompts = [prompt(40), prompt(21, 1), prompt(33, 2)]
    wide = engine(folder, blocks=64, max_num_seqs=16)
    expected = [[o.token_ids for o in wide.generate(p, params)[0].outputs] for p in prompts]
    tight = engine(folder, blocks=6, mode=mode, enable_prefix_caching=caching)
    assert [[o.token_ids for o in output.outputs] for output in tight.generate(prompts, params)] == expected
    assert tight.stats().scheduler.num_preemptions > 0
    assert nothing_leaks(tight)


def test_aborted_requests_give_back_their_host_blocks(folder: Path) -> None:
    llm = engine(folder)
    order = llm._submit(PROMPTS, GREEDY, None)
    for _ in range(40):
        if not llm.stats().num_swapped:
            llm._processor.step()
    swapped = [r.request_id for r in llm.engine.scheduler if r.status is Status.SWAPPED]
    assert llm.stats().num_free_host_blocks < llm.stats().num_host_blocks
    for request_id in swapped:
        llm._processor.abort(request_id)
    assert llm.stats().num_swapped == 0
    assert llm.stats().num_free_host_blocks == llm.stats().num_host_blocks
    kept = [request_id for request_id in order if request_id not in swapped]
    found: dict[str, list[int]] = {}
    while llm.engine.has_unfinished:
        for delta in llm._processor.step():
            found[delta.output.request_id] = delta.completion.token_ids
    assert [found[request_id] for request_id in kept] == solo(folder, [PROMPTS[int(request_id)] for request_id in kept])
    assert nothing_leaks(llm)


def test_prompt_logprobs_are_whole_after_a_swap(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=1)
    llm = engine(folder, max_num_batched_tokens=9, max_num_seqs=4)
    outputs = llm.generate([prompt(30, n) for n in range(4)], params)
    assert llm.stats().scheduler.num_swaps > 0
    whole = engine(folder, blocks=64).generate([prompt(30, n) for n in range(4)], params)
    for output, expected in zip(outputs, whole, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(expected.prompt_logprobs) == 30
        for token, one, other in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True
        ):
            assert one is not None
            assert other is not None
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


# --- what goes wrong


def test_steps_that_fail_as_a_whole_swap_once_and_lose_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(folder)
    execute, calls = llm.engine.executor.execute, Counter[bool]()

    def only_alone(step: Step) -> StepOutput:
        calls[len(step.requests) > 1] += 1
        if len(step.requests) > 1:
            raise RuntimeError("no batches today")
        return execute(step)

    monkeypatch.setattr(llm.engine.executor, "execute", only_alone)
    assert together(llm, PROMPTS) == solo(folder, PROMPTS)
    assert calls[True] > 0
    assert llm.stats().scheduler.num_swaps > 0
    assert nothing_leaks(llm)


@pytest.mark.parametrize("kind", ["out", "in"])
def test_blocks_that_cannot_be_moved_end_the_step_and_nobody_reads_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    llm = engine(folder)
    move, broken = llm.engine.executor.move_blocks, []

    def breaks_once(swap_out: object, swap_in: object, copies: object) -> None:
        if (swap_out if kind == "out" else swap_in) and not broken:
            broken.append(kind)
            raise RuntimeError("the bus is on fire")
        move(swap_out, swap_in, copies)

    monkeypatch.setattr(llm.engine.executor, "move_blocks", breaks_once)
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
    assert broken
    ended = [o for o in outputs if o.finish_reason == "error"]
    assert 0 < len(ended) < len(outputs)
    assert all("the bus is on fire" in str(o.stop_reason) for o in ended)
    assert all(
        o.token_ids == tokens
        for o, tokens in zip(outputs, solo(folder, PROMPTS), strict=True)
        if o.finish_reason == "length"
    )
    assert nothing_leaks(llm)


# --- the pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_move_out_then_in_then_beside_each_other(dtype: torch.dtype) -> None:
    """Block 0 goes out and host block 3 comes into its place, which is then copied to a block that went out as well."""
    layers = ScriptedModel.attention_layers
    kv = PagedKV(PlainKV(KVGeometry(1, 1, 16, 4, dtype)), layers, 4, "cpu", num_host_blocks=4)
    for number in range(4):
        for tensors, value in ((kv.layers[0].tensors, number), (kv.host_layers[0].tensors, 10 + number)):
            for tensor in tensors:
                tensor[number] = value
    kv.swap_out([(0, 1), (2, 0)])
    kv.swap_in([(3, 0)])
    kv.copy_blocks([(0, 2), (3, 1)])
    for device, host in zip(kv.layers[0].tensors, kv.host_layers[0].tensors, strict=True):
        assert [block.unique().tolist() for block in device] == [[13.0], [3.0], [13.0], [3.0]]
        assert [block.unique().tolist() for block in host] == [[2.0], [0.0], [12.0], [13.0]]


def test_swap_space_is_read_in_gibibytes_or_with_a_unit() -> None:
    spaces = {"2": 2.0, 2: 2.0, "0.5": 0.5, "512MiB": 0.5, "3GiB": 3.0}
    assert {given: EngineConfig(model="m", swap_space=given).swap_space for given in spaces} == spaces


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swap_space": -1}, "greater than or equal to 0"),
        ({"swap_space": "much"}, "swap_space"),
        ({"swap_space": "nan"}, "swap_space"),
        ({"swap_space": 0, "preemption_mode": "swap"}, "preemption_mode is swap, but swap_space is 0"),
        ({"preemption_mode": "never"}, "preemption_mode"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_the_host_pool_is_planned_by_the_device_and_the_settings() -> None:
    cpu = Platform.detect("cpu")
    gpu = replace(cpu, device="cuda")

    def blocks(platform: Platform, **settings: object) -> int:
        return plan_host_blocks(EngineConfig(model="m", **settings), 2**20, platform)

    assert blocks(cpu) == 0, "on a CPU, swap space would be KV memory by another name"
    assert 0 < blocks(gpu) <= 4096
    assert 0 < blocks(cpu, preemption_mode="swap") <= 4096
    assert blocks(gpu, preemption_mode="recompute") == blocks(gpu, swap_space=0) == 0
    assert blocks(cpu, swap_space=0.25) == 256
    with pytest.raises(ConfigError, match="--swap-space 1e\\+06 GiB: the host has"):
        blocks(cpu, swap_space=1e6)
    with pytest.raises(ConfigError, match=r"holds not one block: that takes 1\.00 MiB"):
        blocks(cpu, swap_space="100KiB")


# --- the stress


Outputs = dict[tuple[str, int], CompletionOutput]


def traffic(random: Random, number: int) -> tuple[dict[str, list[int]], SamplingParams]:
    """A prompt that shares its start with others, ends early or late, and may ask for several outputs."""
    start = prompt(64, random.randrange(3))["prompt_token_ids"][: random.choice([0, 3, 8, 16, 19])]
    tokens = start + [random.randrange(250) for _ in range(random.randint(1, 10))]
    forks = {"n": random.choice([2, 3]), "temperature": 1.0} if random.random() < 0.15 else {"temperature": 0.0}
    salt = {"cache_salt": "tenant"} if random.random() < 0.2 else {}
    params = SamplingParams(max_tokens=random.randint(8, 30), ignore_eos=True, seed=number, **forks)
    return {"prompt_token_ids": tokens, **salt}, params


def run(llm: LLM, requests: Sequence[tuple[dict[str, list[int]], SamplingParams]], patience: dict[str, int]) -> Outputs:
    """All outputs of requests that are submitted at once; those that have a `patience` are aborted after so many steps."""
    llm._submit([p for p, _ in requests], [params for _, params in requests], None)
    found: Outputs = {}
    while llm.engine.has_unfinished:
        for request_id, left in list(patience.items()):
            request = llm.engine.scheduler.get(request_id)
            patience[request_id] -= request is not None and request.status is not Status.WAITING
            if left == 0:
                llm._processor.abort(request_id)
                del patience[request_id]
        for delta in llm._processor.step():
            if delta.finished:
                found[delta.output.request_id, delta.sequence_index] = delta.completion
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", sorted({f.name for f in registry().kv_formats.values()}))
def test_stress_500_requests_in_a_pool_for_three(kv_format: str, tmp_path: Path) -> None:
    """Each mode of preemption, with aborts, forks and shared prefixes: every finished output equals its solo run.

    500 requests for a plain format and one with scales in its blocks, 120 for the others: all take the same way.
    """
    many = 500 if kv_format in ("auto", "int8_per_token_head") else 120
    folder = tiny_model(tmp_path, num_hidden_layers=1)
    random = Random(1)
    requests = [traffic(random, number) for number in range(many)]
    patience = {str(number): random.randint(1, 30) for number in random.sample(range(many), many // 10)}
    settings = {
        "kv_cache_dtype": kv_format,
        "block_size": 2,
        "registry": registry(),
        **({"kv_scales": "unit"} if registry().kv_formats[kv_format].uses_scales else {}),
    }
    alone = LLM(str(folder), num_blocks_override=64, enable_prefix_caching=False, **settings)
    expected = [[o.token_ids for o in alone.generate(p, params, use_tqdm=False)[0].outputs] for p, params in requests]
    for mode in MODES:
        llm = LLM(
            str(folder), num_blocks_override=56, swap_space="64KiB", preemption_mode=mode, max_num_seqs=12, **settings
        )
        found = run(make_hostile(llm), requests, left := dict(patience))
        for number, outputs in enumerate(expected):
            for index, tokens in enumerate(outputs):
                completion = found.get((str(number), index))
                if str(number) in patience.keys() - left.keys() and (
                    completion is None or completion.finish_reason == "abort"
                ):
                    continue
                assert completion is not None, "a request was lost"
                assert (completion.token_ids, completion.finish_reason) == (tokens, "length"), completion.stop_reason
        counts = llm.stats().scheduler
        assert len(left) < many // 12, "most of those that lose patience are aborted while they run or are swapped"
        assert counts.num_preemptions > many // 5
        assert (counts.num_swaps > 0) == (mode != "recompute")
        assert counts.prefix_hits > 0
        assert nothing_leaks(llm)
