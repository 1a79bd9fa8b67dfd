"""Which format stores which layer: the map, the layout that comes of it, and engines whose layers are stored differently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit_subjects import ByteKV, Fp8KV
from support import make_hostile, registry

from octavo import LLM, AttentionRequest, ConfigError, EngineConfig, KVGeometry, Registry, SamplingParams
from octavo.attention.kv_format import (
    BFloat16KV,
    DecodingBackend,
    KVLayout,
    MixedBackend,
    PagedKV,
    PlainKV,
    ranges,
)
from octavo.attention.reference import ReferenceAttention
from octavo.cli import main
from octavo.front.doctor import examine
from octavo.testing import hostile, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
GEOMETRY = KVGeometry(6, 2, 16, 8, torch.float32)
MIXED = "0,2=auto,*=toy_int8"


class NativeFp8(ReferenceAttention):
    """Reads e5m2 as it is, and nothing else."""

    name = "native_fp8"
    rank = 20
    loads = frozenset({torch.float8_e5m2})

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        return None if request.kv_dtype in cls.loads else f"cannot read {request.kv_dtype}"


def installed(**changes: object) -> Registry:
    formats = {**registry().kv_formats, "toy_fp8": Fp8KV, "toy_int8": ByteKV}
    return replace(registry(), kv_formats=formats, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def engine(folder: Path, dtype_map: object = MIXED, *, blocks: int = 64, **settings: object) -> LLM:
    plugins = settings.pop("plugins", None) or installed()
    return LLM(str(folder), registry=plugins, kv_cache_dtype_map=dtype_map, num_blocks_override=blocks, **settings)


def memory(llm: LLM) -> PagedKV:
    return llm.engine.executor.runner.kv  # type: ignore[attr-defined, no-any-return]


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + 31 * seed + i * i * (seed + 1)) % 250 for i in range(length)]}


PROMPTS = [prompt(5), prompt(37, 1), prompt(16, 2), prompt(61, 3)]


def outputs(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


# --- the setting


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0,1=auto,*=fp8", {"0,1": "auto", "*": "fp8"}),
        ("*=fp8", {"*": "fp8"}),
        (" 0 , 4-7 = auto, 3=fp8 ", {"0,4-7": "auto", "3": "fp8"}),
        ("", {}),
        ({"0, 1": "auto", 2: "fp8"}, {"0,1": "auto", "2": "fp8"}),
    ],
)
def test_commas_belong_to_the_entry_that_they_lead_to(given: object, expected: Mapping[str, str]) -> None:
    assert EngineConfig(model="-", kv_cache_dtype_map=given).kv_cache_dtype_map == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0,1", "'0,1' is given no value"),
        ("0=auto,3", "'3' is given no value"),
        ("0=", "'0' is given no value"),
        ("first=fp8", "expected layers as 3, 0-7 or \\*, got 'first'"),
        ("*.k_proj=fp8", "expected layers"),
        ("-1=fp8", "expected layers"),
        ("=fp8", "expected layers"),
        ("1=auto,2,1=fp8", "'1' is given twice"),
    ],
)
def test_what_is_no_map_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(model="-", kv_cache_dtype_map=given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("4=toy_int8", "the model has layers 0 to 3"),
        ("2-9=toy_int8", "the model has layers 0 to 3"),
        ("3-2=toy_int8", "a range goes upwards"),
        ("0-3=toy_int8,2=auto", "leave no layer for this one"),
        ("0,1,2,3=auto,*=toy_int8", "leave no layer for this one"),
        ("0=int5", "int5: no such format; installed: .*toy_int8"),
    ],
)
def test_a_map_that_does_not_fit_the_model_is_refused(folder: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(folder, given)


def test_the_first_match_wins_and_other_layers_follow_the_general_setting(folder: Path) -> None:
    llm = engine(folder, "1=toy_int8,0-1=toy_fp8", kv_cache_dtype="bfloat16")
    assert [f.name for f in memory(llm).layout.formats] == ["toy_fp8", "toy_int8", "bfloat16", "bfloat16"]
    assert [kv.key.dtype for kv in memory(llm).layers] == [
        torch.float8_e5m2,
        torch.int8,
        torch.bfloat16,
        torch.bfloat16,
    ]


# --- the layout


def test_layers_stored_alike_share_a_format_that_counts_them_alone() -> None:
    layout = KVLayout.of([PlainKV, ByteKV, ByteKV, PlainKV, BFloat16KV, ByteKV], GEOMETRY)
    assert [f.geometry.num_layers for f in layout.layers_by_format] == [2, 3, 1]
    assert list(layout.layers_by_format.values()) == [[0, 3], [1, 2, 5], [4]]
    assert layout.name == "auto (layers 0,3), toy_int8 (layers 1-2,5), bfloat16 (layers 4)"
    assert KVLayout.of([PlainKV] * 6, GEOMETRY).name == "auto"
    elements = 2 * 2 * 8  # sides, heads, tokens
    assert layout.bytes_per_block() == elements * (2 * 16 * 4 + 3 * (16 + 4) + 16 * 2)
    kv = PagedKV(layout, [None] * 6, 5, "cpu")  # type: ignore[list-item]
    taken = sum(tensor.untyped_storage().nbytes() for layer in kv.layers for tensor in layer.tensors)
    assert taken == 5 * layout.bytes_per_block()
    assert kv.block_size == 8


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_copying_blocks_copies_every_layers_tensors() -> None:
    kv = PagedKV(KVLayout.of([PlainKV, ByteKV], replace(GEOMETRY, num_layers=2)), [None, None], 4, "cpu")  # type: ignore[list-item]
    for number, tensor in enumerate(t for layer in kv.layers for t in layer.tensors):
        tensor[1] = number + 1
    kv.copy_blocks([(1, 3)])
    for number, tensor in enumerate(t for layer in kv.layers for t in layer.tensors):
        assert (tensor[3] == number + 1).all()
        assert not tensor[2].any()


# --- engines


def test_storing_some_layers_in_fewer_bits_matters(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(dtype_map: str) -> list[float]:
        (output,) = engine(folder, dtype_map).generate(prompt(61, 3), params)
        assert output.prompt_logprobs is not None
        return [next(iter(found.values())).logprob for found in output.prompt_logprobs[1:] if found]

    plain, mixed, coarse = (torch.tensor(logprobs(text)) for text in ("", MIXED, "*=toy_int8"))
    assert 0 < (plain - mixed).abs().max() < 0.5
    assert not torch.equal(mixed, coarse)


@pytest.mark.parametrize("dtype_map", [MIXED, "3=toy_fp8,*=bfloat16", "0=toy_fp8,1-2=toy_int8"])
def test_tokens_do_not_depend_on_blocks_chunks_or_neighbours(folder: Path, dtype_map: str) -> None:
    alone = engine(folder, dtype_map, enable_prefix_caching=False)
    expected = [alone.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
    for settings in (
        {},
        {"block_size": 4},
        {"block_size": 32},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"blocks": 6, "max_num_batched_tokens": 64, "max_num_seqs": 4},
    ):
        llm = make_hostile(engine(folder, dtype_map, **settings))
        assert outputs(llm) == expected, settings
        assert outputs(llm) == expected, f"{settings}, from the prefix cache"
    assert llm.stats().scheduler.num_preemptions, "the last pool is too small for all"


def test_forks_of_one_prompt_share_and_copy_blocks(folder: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    many = make_hostile(engine(folder)).generate(prompt(21), params)[0].outputs
    again = make_hostile(engine(folder, block_size=1)).generate(prompt(21), params)[0].outputs  # nothing to copy
    assert [o.token_ids for o in many] == [o.token_ids for o in again]
    assert len({tuple(o.token_ids) for o in many}) == 3


def test_each_format_gets_its_own_backend(folder: Path) -> None:
    plugins = installed(attention_backends=(ReferenceAttention, NativeFp8))
    dtype_map = "0=toy_fp8,1=toy_int8,*=auto"
    llm = engine(folder, dtype_map, plugins=plugins)
    backend = llm.engine.executor.runner.backend  # type: ignore[attr-defined]
    assert isinstance(backend, MixedBackend)
    assert [type(one) for one in backend.by_layer] == [
        NativeFp8,
        DecodingBackend,
        ReferenceAttention,
        ReferenceAttention,
    ]
    attention = llm.engine.model_info.attention
    assert attention == "native_fp8 for toy_fp8, reference over decoded blocks for toy_int8, reference for auto"
    assert outputs(make_hostile(llm)) == outputs(engine(folder, dtype_map)), "raw or decoded, the numbers are the same"


def test_adapters_are_never_chosen_by_themselves() -> None:
    assert "adapter" in str(MixedBackend.why_not(None))


def test_a_hostile_pool_poisons_what_can_hold_nan() -> None:
    kv = PagedKV(KVLayout.of([Fp8KV, ByteKV], replace(GEOMETRY, num_layers=2)), [None, None], 3, "cpu")  # type: ignore[list-item]
    hostile(kv, [2])
    assert kv.layers[0].key.float().isnan().flatten(1).all(1).tolist() == [False, False, True]


# --- what is shown


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy formats, as if a plugin had brought them."""
    found = installed()
    for module in ("commands", "doctor"):
        monkeypatch.setattr(f"octavo.front.{module}.registry_for", lambda config, **_: found)


@pytest.mark.usefixtures("plugins")
@pytest.mark.usefixtures("core_kernels")
def test_inspect_plans_the_bytes_that_loading_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(folder), "--kv-cache-dtype-map", MIXED, "--num-blocks-override", "64"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    llm = engine(folder)
    taken = sum(t.untyped_storage().nbytes() for layer in memory(llm).layers for t in layer.tensors)
    assert shown["kv"]["bytes_per_block"] * 64 == taken
    assert shown["kv"]["format"] == "auto (layers 0,2), toy_int8 (layers 1,3)"
    assert shown["attention"]["kernel"] == "reference for auto, reference over decoded blocks for toy_int8"
    assert main(arguments) == 0
    assert "MiB as auto (layers 0,2), toy_int8 (layers 1,3)" in capsys.readouterr().out


@pytest.mark.usefixtures("plugins")
def test_doctor_reports_a_map_that_does_not_fit(folder: Path) -> None:
    found = examine(EngineConfig(model=str(folder), kv_cache_dtype_map="9=toy_int8")).findings.found
    assert [(f.kind, f.severity) for f in found if f.kind == "kv_format"] == [("kv_format", "error")]
    diagnosis = examine(EngineConfig(model=str(folder), kv_cache_dtype_map=MIXED))
    assert diagnosis.loads
    assert diagnosis.kv_plan is not None
    assert diagnosis.kv_plan.format == "auto (layers 0,2), toy_int8 (layers 1,3)"
