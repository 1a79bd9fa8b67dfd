"""Cases V11, V12, V15-V20 through the whole engine with real (tiny) models: greedy results never depend on circumstances."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import make_hostile, registry, scripted_llm

from octavo import LLM, RequestError, SamplingParams
from octavo.testing import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + 31 * seed + i * i * (seed + 1)) % 250 for i in range(length)]}


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "MistralForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"sliding_window": 20} if request.param == "MistralForCausalLM" else {}
    return tiny_model(tmp_path_factory.mktemp("model"), request.param, **window)


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without sliding windows: what it computed stays in memory."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine(folder: Path, *, blocks: int = 64, hostile: bool = True, **settings: object) -> LLM:
    llm = LLM(str(folder), registry=registry(), num_blocks_override=blocks, **settings)
    return make_hostile(llm) if hostile else llm


def solo(folder: Path, prompts: list[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Each prompt alone, in its own engine, whole prompt at once, no cache."""
    llm = engine(folder, hostile=False, enable_prefix_caching=False)
    return [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]


def together(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


# --- V11


def test_v11_prompt_over_the_pool_is_refused_and_others_are_served(unlimited: Path) -> None:
    llm = engine(unlimited, blocks=10, block_size=16)
    with pytest.raises(RequestError, match=r"200 tokens.*holds 160"):
        llm.generate(prompt(200), GREEDY)
    assert together(llm, [prompt(5)]) == solo(unlimited, [prompt(5)])


def test_v11_output_runs_to_the_pool_limit(unlimited: Path) -> None:
    llm = engine(unlimited, blocks=10, block_size=16)
    (output,) = llm.generate(prompt(150), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 10
    assert llm.stats().num_free_blocks == 10


def test_v11_bad_prompt_in_a_list_leaves_nothing_behind(unlimited: Path) -> None:
    llm = engine(unlimited, blocks=10)
    with pytest.raises(RequestError, match="prompt 1: "):
        llm.generate([prompt(5), prompt(500)], GREEDY)
    assert not llm.engine.has_unfinished
    assert together(llm, [prompt(5)]) == solo(unlimited, [prompt(5)])


# --- V12


def test_v12_a_long_prompt_stalls_nobody(folder: Path) -> None:
    """Bounds: a decode advances in every step; a short newcomer has its first token after one step."""
    llm = engine(folder, max_num_batched_tokens=8, max_num_seqs=8, max_model_len=512)
    step = llm._processor.step
    llm._submit(prompt(6), GREEDY, None)
    first = [delta.output.request_id for delta in step()]
    assert first == ["0"]
    llm._submit(prompt(8 * 50, seed=1), GREEDY, None)
    step()
    llm._submit(prompt(3, seed=2), GREEDY, None)
    seen: list[str] = []
    for _ in range(2):
        deltas = [delta.output.request_id for delta in step()]
        assert "0" in deltas, "the decoding stream advances in every step"
        seen += deltas
        if "2" in seen:
            break
    assert "2" in seen, "the newcomer has its first token"
    assert "1" not in seen, "while the long prompt is still being computed"
    long = llm.engine.scheduler.get("1")
    assert long is not None
    assert long.num_computed_tokens > 0


# --- V15


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_v15_unwritten_memory_is_never_read(folder: Path, length: int) -> None:
    assert together(engine(folder), [prompt(length)]) == solo(folder, [prompt(length)])


def test_v15_batch_of_unequal_lengths(folder: Path) -> None:
    prompts = [prompt(n, n) for n in (1, 33, 15, 17, 2, 32, 16, 31)]
    assert together(engine(folder), prompts) == solo(folder, prompts)


# --- V16


@pytest.mark.parametrize("budget", [2048, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_v16_preemption_changes_no_token(folder: Path, budget: int, caching: bool) -> None:
    prompts = [prompt(20 + n, n) for n in range(8)]
    llm = engine(
        folder,
        blocks=5,
        block_size=16,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 256),
        enable_prefix_caching=caching,
    )
    assert together(llm, prompts) == solo(folder, prompts)
    assert llm.stats().scheduler.num_preemptions > 0
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_v16_sampled_requests_survive_preemption_too(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
    prompts = [prompt(20 + n, n) for n in range(8)]
    llm = engine(folder, blocks=5)
    assert together(llm, prompts, params) == solo(folder, prompts, params)
    assert llm.stats().scheduler.num_preemptions > 0


# --- V17


def test_v17_equal_prompts_in_one_step(folder: Path) -> None:
    prompts = [prompt(100)] * 8
    assert together(engine(folder, blocks=80), prompts) == solo(folder, prompts[:1]) * 8


def test_v17_first_one_aborted_in_its_prefill(folder: Path) -> None:
    llm = engine(folder, blocks=80, max_num_batched_tokens=64, max_num_seqs=8)
    order = llm._submit([prompt(100)] * 3, GREEDY, None)
    llm._processor.step()
    llm._processor.abort(order[0])
    assert together(llm, [prompt(100)]) == solo(folder, [prompt(100)])


# --- V18


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_v18_prompt_that_is_fully_cached(folder: Path, length: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm = engine(folder)
    outputs = [llm.generate(prompt(length), params)[0] for _ in range(3)]
    expected = solo(folder, [prompt(length)], params)[0]
    assert [o.outputs[0].token_ids for o in outputs] == [expected] * 3
    assert [o.num_cached_tokens for o in outputs] == [0] + [(length - 1) // 16 * 16] * 2


def test_v18_prompt_logprobs_do_not_read_the_cache(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    llm = engine(folder, max_num_batched_tokens=7, max_num_seqs=4)
    outputs = [llm.generate(prompt(40), params)[0] for _ in range(3)]
    whole = engine(folder, enable_prefix_caching=False).generate(prompt(40), params)[0]
    for output in outputs:
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == 40
        for token, found, expected in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True
        ):
            assert found is not None
            assert expected is not None
            assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
            assert found[token].rank == expected[token].rank


# --- V19, V20


@pytest.mark.parametrize("reverse", [False, True])
def test_v19_penalties_touch_their_own_row_only(folder: Path, reverse: bool) -> None:
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    punished = plain.model_copy(update={"repetition_penalty": 2.0, "presence_penalty": 0.5})
    prompts, params = [prompt(12), prompt(9, 3)], [punished, plain]
    expected = [solo(folder, [p], one)[0] for p, one in zip(prompts, params, strict=True)]
    if reverse:
        prompts, params, expected = prompts[::-1], params[::-1], expected[::-1]
    assert [o.outputs[0].token_ids for o in engine(folder).generate(prompts, params)] == expected


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-40, 0.0, -0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_v20_tiny_temperatures(folder: Path, temperature: float, dtype: str) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=6, seed=0, ignore_eos=True)
    greedy = params.model_copy(update={"temperature": 0.0})
    llm = engine(folder, dtype=dtype)
    assert together(llm, [prompt(9)], params) == together(llm, [prompt(9)], greedy)


def test_v20_negative_temperature_is_refused() -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=-0.5)


# --- n > 1


def test_n_outputs_share_the_prompt_and_differ(folder: Path) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    llm = engine(folder, blocks=40)
    (output,) = llm.generate(prompt(40), params)
    texts = [tuple(o.token_ids) for o in output.outputs]
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert all(len(t) == 20 for t in texts)
    tight = engine(folder, blocks=6)
    (again,) = tight.generate(prompt(40), params)
    assert [tuple(o.token_ids) for o in again.outputs] == texts, "forks do not depend on memory pressure"
    assert tight.stats().scheduler.num_preemptions > 0
    assert tight.stats().num_free_blocks == 6


def test_a_failing_step_ends_only_the_request_that_fails(tmp_path: Path) -> None:
    scripts = {(1, 2, 3): [65, 66], (4, 5): [67]}
    llm = scripted_llm(tmp_path, scripts)
    good, bad = {"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [9, 9]}
    outputs = llm.generate([good, bad, {"prompt_token_ids": [4, 5]}], SamplingParams(temperature=0, max_tokens=5))
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert "no script" in str(outputs[1].outputs[0].stop_reason)
    assert [o.outputs[0].text for o in outputs] == ["AB", "", "C"]
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
