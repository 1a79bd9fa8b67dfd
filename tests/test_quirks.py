"""The 67 quirks of checkpoints in the wild: each has a test of its number, or a reason why there is none; and those of core.

A quirk's number is part of a test's name, q07 say, wherever that test is. Quirks that no installed part can meet are named in
`UNMET`, and a README of a plugin says why, as "Q58: ...".
"""

from __future__ import annotations

import ast
import json
import logging
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_support import tensors_of
from formats_support import (
    FORMATS,
    PROMPT,
    WEIGHT_ONLY,
    as_floats,
    edit_config,
    edit_settings,
    edit_tensors,
    kernels,
    load,
    logits,
    model,
    plan,
)
from safetensors.torch import save_file
from support import all_logits

from octavo import CheckpointError, QuantizedWeight, WeightSpec, round_to_nearest
from octavo.model.loader import stored_weight
from octavo.testing import random_weight, tiny_model

ROOT = Path(__file__).parents[1]
UNMET = {56}
"""Norms that add 1: models that have them are refused."""
SHORT = {"num_hidden_layers": 1}


# --- the map


def numbers_in(source: str) -> set[int]:
    """Numbers of the quirks in names of test functions and of test classes."""
    names = [n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {
        int(n) for name in names if name.startswith(("test_", "Test")) for n in re.findall(r"_q(\d\d)(?=_|$)", name)
    }


def reasons_in(readme: str) -> set[int]:
    """Numbers of quirks that a list item of a README is about: "- Q58, Q59: why", "- Q60 to Q66: why"."""
    found: set[int] = set()
    for item in re.findall(r"^- (Q\d\d?[^:]*):", readme, re.MULTILINE):
        for first, last in re.findall(r"Q(\d+)(?: to Q(\d+))?", item):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_every_quirk_has_a_test_or_a_reason() -> None:
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]
    tested = set().union(*(numbers_in(file.read_text()) for file in files))
    reasons = set().union(*(reasons_in(file.read_text()) for file in ROOT.glob("plugins/*/README.md")))
    assert tested <= set(range(1, 68))
    missing = sorted(set(range(1, 68)) - tested - UNMET)
    assert not missing, f"quirks without a test of their number: {missing}"
    assert not UNMET & tested, "these are met now: take them out of UNMET"
    assert reasons >= UNMET, "a README of a plugin must say why nothing can meet them"


def test_how_numbers_are_found() -> None:
    assert numbers_in("def test_v01_q07_q51_x(): ...\nclass TestThat_q09: ...\ndef q10(): ...\nq = 'test_q11'") == {
        7,
        51,
        9,
    }
    assert reasons_in("- Q06, Q07: why\n- Q60 to Q62, Q1: why\nQ13: no list\n| Q14 | Q15: a table") == {
        6,
        7,
        60,
        61,
        62,
        1,
    }


# --- where settings are, and what names mean


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
@pytest.mark.parametrize("name", FORMATS)
def test_q02_q46_settings_in_other_places_of_config_json(tmp_path: Path, name: str, place: str) -> None:
    folder = model(tmp_path, name, **SHORT)
    expected = logits(folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(
        folder,
        **{"quantization_config": None, place: {"quantization_config": settings} if "text" in place else settings},
    )
    assert torch.equal(logits(folder), expected)


def nested(folder: Path, prefix: str) -> Path:
    """The same tensors under the names of a model that is part of another one."""
    tensors = {f"{prefix}{n}" if n.startswith("model.") else n: t for n, t in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
@pytest.mark.parametrize("name", FORMATS)
def test_q25_nested_prefixes(tmp_path: Path, name: str, prefix: str) -> None:
    folder = model(tmp_path, name, ["*q_proj"], **SHORT)
    expected = logits(folder)
    assert torch.equal(logits(nested(folder, prefix)), expected)
    assert all(layer.startswith(prefix) or layer == "lm_head" for layer in kernels(load(folder)))


@pytest.mark.parametrize(
    "listed", [["lm_head"], [], ["qkv_proj"], ["mlp"], ["model.layers.0.self_attn.q_proj"]], ids=str
)
@pytest.mark.parametrize("name", FORMATS)
def test_q46_q47_q48_lists_of_modules_decide_nothing(tmp_path: Path, name: str, listed: list[str]) -> None:
    """Lists may be empty, name fused or quantised modules: what the tensors are counts. In settings of their own words."""
    folder = model(tmp_path, name, ["*self_attn*"], **SHORT)
    expected = logits(folder)
    key = {"awq": "modules_to_not_convert", "gptq": "modules_in_block_to_quantize"}.get(
        FORMATS[name][0].removesuffix("_v2")
    )
    key = key or ("ignore" if name.startswith("ct") else "ignored_layers")
    edit_settings(folder, **{key: listed})
    assert torch.equal(logits(folder), expected)


# --- files


def test_q26_safetensors_count_before_pickles(tmp_path: Path) -> None:
    folder = model(tmp_path, "gptq", **SHORT)
    expected = logits(folder)
    torch.save({name: torch.zeros_like(t) for name, t in tensors_of(folder).items()}, folder / "pytorch_model.bin")
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("file", ["gptq_model-4bit-32g.safetensors", "model.pt", "pytorch_model.bin", "4bit-32g.pth"])
def test_q26_other_names_of_files(tmp_path: Path, file: str) -> None:
    folder = model(tmp_path, "gptq", **SHORT)
    expected, tensors = logits(folder), tensors_of(folder)
    (folder / "model.safetensors").unlink()
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_q26_each_shard_must_be_there(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path, name, shards=3, **SHORT)
    expected = logits(folder)
    lost = folder / "model-00002-of-00003.safetensors"
    lost.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"1 of 3 files(.|\n)*model-00002-of-00003"):
        load(folder)
    (tmp_path / "away").rename(lost)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_q51_tensors_that_old_tools_leave_pass_in_silence(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model(tmp_path, name, **SHORT)
    expected = logits(folder)
    caplog.clear()
    left = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "q_proj.workspace", "q_proj.wf", "q_proj.max_q")
    left = (*left, "rotary_emb.cos_cached")
    edit_tensors(folder, add={f"model.layers.0.self_attn.{tail}": torch.ones(4) for tail in left})
    assert torch.equal(logits(folder), expected)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "not used" in r.getMessage()]


@pytest.mark.parametrize("name", FORMATS)
def test_q53_heads_beside_a_tied_embedding(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Absent: the embedding. A copy: the embedding. A different one: it is used, whatever config.json says."""
    folder = model(tmp_path, name, tie=True, **SHORT)
    expected = logits(folder)
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    edit_tensors(folder, add={"lm_head.weight": embedding.clone()})
    assert torch.equal(logits(folder), expected)
    assert "differs" not in caplog.text
    edit_tensors(folder, add={"lm_head.weight": 2 * embedding})
    assert torch.allclose(logits(folder), 2 * expected, rtol=1e-5)
    assert "differs from the embedding" in caplog.text


# --- numbers


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_q28_symmetric_rounding_covers_groups_of_one_sign(bits: int, sign: float) -> None:
    """Other quantisers keep a range from 0 for groups without a negative: the largest weight comes out as 7/15 of itself."""
    weight = sign * torch.tensor([[0.1, 0.2, 0.5, 1.0]])
    rounded = round_to_nearest(weight, WeightSpec(f"uint{bits}", (1, 4)))
    assert rounded.zeros is not None
    assert torch.equal(rounded.zeros, torch.full((1, 1), 2.0 ** (bits - 1)))
    assert rounded.dequantize()[0, 3] == pytest.approx(sign, rel=1e-6)
    assert rounded.scales is not None
    assert (rounded.dequantize() - weight).abs().max() <= rounded.scales[0, 0] / 2 + 1e-6


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_q29_asymmetric_rounding_includes_zero(sign: float) -> None:
    """A range from 1 to 2 with zeros clamped to 0 would turn the whole group into one number."""
    weight = sign * torch.tensor([[1.0, 1.2, 1.6, 2.0]])
    rounded = round_to_nearest(weight, WeightSpec("uint4", (1, 4), has_zeros=True))
    assert rounded.scales is not None
    assert (rounded.dequantize() - weight).abs().max() <= rounded.scales[0, 0] / 2 + 1e-6
    assert len(set(rounded.dequantize()[0].tolist())) == 4
    assert rounded.zeros is not None
    assert rounded.zeros[0, 0] in (0.0, 15.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_q30_scales_keep_the_type_that_is_stored(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """bf16 reaches further than fp16: a scale of 2^17 and one of 2^-40 must survive, whatever the model computes in."""
    folder = model(tmp_path, name, **SHORT)
    tail = next(
        t.rpartition(".")[2] for t in tensors_of(folder) if t.endswith(("down_proj.scales", "down_proj.weight_scale"))
    )
    part = f"model.layers.0.mlp.down_proj.{tail}"
    scales = tensors_of(folder)[part].to(dtype)
    odd = torch.tensor([2.0**17, 2.0**-40] if dtype != torch.float16 else [2.0**15, 2.0**-14], dtype=dtype)
    scales.view(-1)[: min(2, scales.numel())] = odd[: min(2, scales.numel())]
    made = plan(edit_tensors(folder, add={part: scales}), dtype="float16")
    weight = stored_weight(made, next(x for g in made.groups for x in g.layers if x.name.endswith("down_proj")))
    assert weight.scales is not None
    assert weight.scales.dtype == dtype
    assert torch.equal(weight.scales.flatten().sort().values, scales.flatten().sort().values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_q31_every_compute_type_is_finite_and_near(tmp_path: Path, name: str, dtype: str) -> None:
    folder = model(tmp_path, name, dtype=torch.bfloat16, **SHORT)
    expected, found = logits(folder), logits(folder, dtype=dtype)
    assert found.isfinite().all()
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.99


def test_q31_bfloat16_computes_where_float16_overflows(tmp_path: Path) -> None:
    """Activations beyond 65504, as some models have: bf16 holds them."""
    folder = model(tmp_path, "awq", **SHORT)
    name = "model.layers.0.mlp.up_proj.scales"
    edit_tensors(folder, add={name: tensors_of(folder)[name].float() * 3e5})
    exact = logits(folder)
    assert exact.isfinite().all()
    wide = logits(folder, dtype="bfloat16")
    assert torch.corrcoef(torch.stack([wide.flatten(), exact.flatten()]))[0, 1] > 0.98
    assert not logits(folder, dtype="float16").isfinite().all(), "this model was to overflow in float16"


# --- shapes


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("group", [16, 32, 48, -1])
@pytest.mark.parametrize("code", ["uint4", "uint3", "int8"])
def test_q40_slices_across_groups_sum_to_the_whole(code: str, group: int, parts: int) -> None:
    """Shards of inputs need not end where groups do: both sides then share a group."""
    spec = WeightSpec(code, (1, group), has_zeros=code != "int8")
    weight = random_weight(spec, 24, 96, torch.Generator().manual_seed(parts))
    bounds = [round(96 * i / parts) for i in range(parts + 1)]
    inputs = [weight.slice_in(*pair) for pair in pairwise(bounds)]
    assert torch.equal(torch.cat([part.dequantize() for part in inputs], dim=1), weight.dequantize())
    outputs = [weight.slice_out(24 * i // parts, 24 * (i + 1) // parts) for i in range(parts)]
    assert torch.equal(torch.cat([part.dequantize() for part in outputs]), weight.dequantize())


def test_q40_slices_through_blocks_of_outputs() -> None:
    weight = random_weight(WeightSpec("int8", (16, 32)), 48, 96, torch.Generator().manual_seed(0))
    for bounds in ((0, 16, 48), (0, 5, 48), (0, 17, 30, 48)):
        parts = [weight.slice_out(*pair) for pair in pairwise(bounds)]
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), weight.dequantize())


@pytest.mark.parametrize("sizes", [(32, 40), (96, 136), (160, 8)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_q41_sizes_that_no_tile_divides_get_some_kernel(tmp_path: Path, name: str, sizes: tuple[int, int]) -> None:
    """Kernels that need multiples of 128 refuse by shape, and another one serves. GPTQ cannot store 40 inputs of 3 bits."""
    hidden, inner = sizes
    skip = ["*down_proj"] if inner % 32 else []
    if name.startswith("gptq") and inner % 32:
        skip = ["*.mlp.*"]
    folder = model(tmp_path / "q", name, skip, hidden_size=hidden, intermediate_size=inner, **SHORT)
    found, expected = logits(folder), logits(as_floats(folder, tmp_path / "f"))
    if name in WEIGHT_ONLY:
        assert torch.allclose(found, expected, atol=2e-4)
    else:
        assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.85
    assert all(kernels(load(folder)).values())


def test_q45_pre_fused_scales_of_one_tensor_are_shared() -> None:
    """One scale over a whole weight, cut anywhere or stacked with others, stays the same numbers."""
    spec = WeightSpec("int8", (-1, -1))
    chosen = torch.Generator().manual_seed(0)
    members: list[QuantizedWeight] = [random_weight(spec, rows, 32, chosen) for rows in (16, 8, 8)]
    fused = members[0].concat(members[1:])
    assert torch.equal(fused.dequantize(), torch.cat([m.dequantize() for m in members]))
    assert torch.equal(fused.slice_out(16, 24).dequantize(), members[1].dequantize())


def test_q52_a_quantised_head_and_a_quantised_embedding_of_one_model(tmp_path: Path) -> None:
    """The tensors decide: the head of one format's model, stored quantised, is used as such."""
    folder = model(tmp_path / "q", "ct_int8", **SHORT)
    tensors: dict[str, Any] = tensors_of(folder)
    head = round_to_nearest(tensors.pop("lm_head.weight"), WeightSpec("int8", (1, -1)))
    tensors |= {"lm_head.weight": head.codes, "lm_head.weight_scale": head.scales}
    save_file(tensors, folder / "model.safetensors")
    llm = load(folder)
    assert kernels(llm)["lm_head"] != "dense"
    expected = logits(as_floats(folder, tmp_path / "f"))
    assert torch.allclose(all_logits(llm, PROMPT), expected, atol=2e-4)


def test_a_float_model_meets_no_quirk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tiny_model(tmp_path))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
