"""The prefix cache and the counts of KV memory as users meet them: salts, hits in outputs, reset, stats, windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import make_hostile, registry

from octavo import LLM, EngineConfig, RequestError, SamplingParams
from octavo.front.commands import generate
from octavo.model.decoder import attention_layers
from octavo.testing import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IDS = [(7 * i + i * i) % 250 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine(folder: Path, **settings: object) -> LLM:
    return make_hostile(LLM(str(folder), registry=registry(), **{"num_blocks_override": 64, **settings}))


def hit(llm: LLM, **prompt: object) -> tuple[int, list[int]]:
    (output,) = llm.generate({"prompt_token_ids": IDS, **prompt}, GREEDY)
    return output.num_cached_tokens, output.outputs[0].token_ids


# --- S11


def test_s11_tenants_of_different_salts_share_nothing(folder: Path) -> None:
    llm = engine(folder)
    answers = {(salt, turn): hit(llm, cache_salt=salt) for turn in range(2) for salt in ("a", "b", None)}
    assert {key: cached for key, (cached, _) in answers.items()} == {
        (salt, turn): 32 * turn for turn in range(2) for salt in ("a", "b", None)
    }
    assert len({tuple(tokens) for _, tokens in answers.values()}) == 1, "a salt changes no output"


def test_s11_a_salt_that_looks_like_something_else_is_a_salt(folder: Path) -> None:
    llm = engine(folder)
    for salt in (None, "None", "('a', None)", "a", "a ", "40"):
        assert hit(llm, cache_salt=salt)[0] == 0
    assert hit(llm)[0] == 32


@pytest.mark.parametrize("salt", ["", 7, b"salt", ["a"]])
def test_s11_a_salt_that_is_no_text_is_refused(folder: Path, salt: object) -> None:
    llm = engine(folder)
    with pytest.raises(RequestError, match="cache_salt must be a string that is not empty") as refusal:
        llm.generate({"prompt": "text", "cache_salt": salt}, GREEDY)
    assert refusal.value.param == "cache_salt"
    assert not llm.engine.has_unfinished


# --- reset, and off


def test_a_reset_forgets_all_prefixes_while_requests_run(folder: Path) -> None:
    llm = engine(folder)
    expected = hit(llm)[1]
    assert hit(llm) == (32, expected)
    stream = llm.stream({"prompt_token_ids": IDS}, GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is True
    assert hit(llm) == (0, expected)
    assert [delta.completion.token_ids for delta in stream][-1] == expected
    assert hit(llm) == (32, expected)


def test_without_the_cache_nothing_is_found(folder: Path) -> None:
    llm = engine(folder, enable_prefix_caching=False)
    first, second = hit(llm), hit(llm)
    assert first == second
    assert first[0] == 0
    assert (llm.stats().num_cached_blocks, llm.stats().prefix_hit_rate) == (0, 0)


# --- V35


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_v35_prompt_logprobs_beside_cached_prefixes_are_those_of_an_uncached_run(folder: Path, mode: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    whole = engine(folder, enable_prefix_caching=False).generate({"prompt_token_ids": IDS}, params)[0].prompt_logprobs
    llm = engine(
        folder, max_num_batched_tokens=7, max_num_seqs=4, preemption_mode=mode, swap_space="1MiB", num_blocks_override=8
    )
    hit(llm)
    outputs = llm.generate([{"prompt_token_ids": IDS}] * 3, params)
    assert whole is not None
    for output in outputs:
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert [None if p is None else list(p) for p in output.prompt_logprobs] == [
            None if p is None else list(p) for p in whole
        ]
        for token, found, expected in zip(IDS[1:], output.prompt_logprobs[1:], whole[1:], strict=True):
            assert found is not None
            assert expected is not None
            assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


# --- counts


def test_stats_tell_how_full_memory_is_and_what_is_shared(folder: Path) -> None:
    llm = engine(folder)
    hit(llm)
    streams = [llm.stream({"prompt_token_ids": [*IDS[:32], n]}, GREEDY) for n in range(3)]
    for stream in streams:
        next(stream)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (3, 0, 0)
    assert (stats.kv.num_blocks, stats.kv.num_references) == (2 + 3, 3 * 3)
    assert stats.kv.sharing == 9 / 5
    tails = sum(r.num_computed_tokens - 32 for r in llm.engine.scheduler)
    assert stats.kv.num_tokens == 32 + tails
    assert stats.kv.num_empty_slots == 5 * 16 - 32 - tails
    assert stats.kv.utilization == (32 + tails) / 80
    assert stats.kv_usage == 5 / 64
    assert stats.prefix_hit_rate == 3 * 32 / (40 + 3 * 33)
    for stream in streams:
        list(stream)
    assert llm.stats().kv.utilization == 1


def test_the_summary_of_a_run_counts_swaps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(
        model=str(folder), num_blocks_override=5, preemption_mode="swap", swap_space="1MiB", max_num_seqs=4
    )
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert generate(config, ["a" * 20, "b" * 24, "c" * 22], params, chat=False, as_json=False) == 0
    summary = capsys.readouterr().err
    assert "by swap)" in summary
    assert "prefix hits" in summary


# --- sliding windows


def test_a_model_whose_layers_all_have_a_window_outgrows_its_memory(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "MistralForCausalLM", sliding_window=20)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = {"prompt_token_ids": IDS * 3}
    (wide,) = LLM(str(model), registry=registry(), num_blocks_override=64).generate(prompt, params)
    small = engine(model, num_blocks_override=5)
    (narrow,) = small.generate(prompt, params)  # 320 tokens in memory for 80
    assert narrow.outputs[0].token_ids == wide.outputs[0].token_ids
    assert len(narrow.outputs[0].token_ids) == 200
    assert small.stats().scheduler.peak_blocks <= 5
    assert small.engine.model_info.sliding_window == 20


def test_a_model_with_a_layer_that_sees_everything_keeps_everything(tmp_path: Path) -> None:
    model = tiny_model(
        tmp_path,
        "Qwen2ForCausalLM",
        sliding_window=20,
        use_sliding_window=True,
        max_window_layers=1,
    )
    llm = engine(model, num_blocks_override=10)
    decoder = llm.engine.executor.runner.loaded.plan.config
    assert {layer.sliding_window for layer in attention_layers(decoder)} == {None, 20}
    assert llm.engine.model_info.sliding_window is None
    with pytest.raises(RequestError, match="KV memory holds 160"):
        llm.generate({"prompt_token_ids": IDS * 5}, GREEDY)
