"""The bits: streams of every width (Q15), both conventions of zeros (V04, Q10 - Q13), order of inputs (V05), round trips."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import CheckpointError, LinearLayer, QuantizedWeight, QuantSource, WeightSpec
from octavo.testing import random_weight
from octavo_gptq.config import GPTQConfig
from octavo_gptq.packing import BITS, WORDS, pack, stored_zeros, true_zeros, unpack

LAYER = LinearLayer("model.layers.0.mlp.up_proj", 64, 32)
MIDDLE = {bits: 2 ** (bits - 1) for bits in BITS}


def parse(**raw: Any) -> GPTQConfig:
    return GPTQConfig.parse(QuantSource({"quant_method": "gptq", **raw}, "config.json: quantization_config"))


def words(*values: int) -> list[int]:
    """Unsigned 32-bit words as the signed integers that tensors hold."""
    return [value - 2**32 if value >= 2**31 else value for value in values]


def make(
    bits: int = 4,
    group: int = 16,
    layer: LinearLayer = LAYER,
    seed: int = 0,
    act_order: bool = False,
    sym: bool = False,
) -> QuantizedWeight:
    spec = WeightSpec(f"uint{bits}", (1, group), has_zeros=True, act_order=act_order)
    generator = torch.Generator().manual_seed(seed)
    zeros = "midpoint" if sym else "integer"
    size = layer.out_features, layer.in_features
    return random_weight(spec, *size, generator, zeros=zeros, scale_dtype=torch.float16)


def field(stream: Sequence[int], size: int, bits: int, index: int) -> int:
    """Value `index` of words, joined to one number."""
    number = sum((int(word) % 2**size) << size * at for at, word in enumerate(stream))
    return number >> bits * index & (2**bits - 1)


def decode(tensors: dict[str, Tensor], bits: int, group: int, shifted: bool, size: int = 32) -> Tensor:
    """Weights (N, K) by formats written down as plain arithmetic on single values; g_idx is followed where it is there."""
    qweight, qzeros, scales = (tensors[name].tolist() for name in ("qweight", "qzeros", "scales"))
    outputs, inputs = len(qweight[0]), len(qweight) * size // bits
    order = (
        tensors["g_idx"].tolist()
        if "g_idx" in tensors
        else [k // (group if group > 0 else inputs) for k in range(inputs)]
    )
    order = [g + len(scales) if g < 0 else g for g in order]
    rows = []
    for n in range(outputs):
        column = [row[n] for row in qweight]
        zeros = [(field(row, size, bits, n) + shifted) % 2**bits for row in qzeros]
        rows.append([(field(column, size, bits, k) - zeros[g]) * scales[g][n] for k, g in enumerate(order)])
    return torch.tensor(rows)


# --- one stream for all widths


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (4, list(range(8)), [0x76543210]),
        (2, [i % 4 for i in range(16)], [0xE4E4E4E4]),
        (8, [0, 7, 14, 21], [0x150E0700]),
        (3, [i % 8 for i in range(32)], [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
        (4, [7] * 8, [0x77777777]),
        (4, [8] * 8, [0x88888888]),
        (2, [1] * 16, [0x55555555]),
        (8, [127] * 4, [0x7F7F7F7F]),
        (3, [3] * 32, [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]),
    ],
)
def test_q15_known_words_of_every_width(bits: int, codes: list[int], expected: list[int]) -> None:
    stored = torch.tensor([words(*expected)], dtype=torch.int32)
    assert unpack(stored, bits).tolist() == [codes]
    assert torch.equal(pack(torch.tensor([codes], dtype=torch.uint8), bits, torch.int32), stored)


@given(st.sampled_from([1, *BITS]), st.sampled_from(sorted(WORDS)), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_q15_streams_agree_with_arithmetic_on_one_number(bits: int, word: str, rows: int, seed: int) -> None:
    size = 8 * WORDS[word].itemsize
    codes = torch.randint(0, 2**bits, (rows, 64), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    stored = pack(codes, bits, WORDS[word])
    assert stored.shape == (rows, 64 * bits // size)
    for row, stream in zip(codes.tolist(), stored.tolist(), strict=True):
        assert [field(stream, size, bits, index) for index in range(64)] == row
    assert torch.equal(unpack(stored, bits), codes)


def test_words_are_bit_patterns_whatever_their_sign_and_stride() -> None:
    stored = torch.tensor([[-1, 0, -(2**31)], [2**31 - 1, 0x76543210, -0x01234568]], dtype=torch.int32)
    for bits in (1, *BITS):
        assert torch.equal(pack(unpack(stored, bits), bits, torch.int32), stored)
        for column in (stored[:, :1], stored.T[:, :1], stored.T):
            whole = column[:, :1].expand(-1, 3).contiguous()
            assert torch.equal(pack(unpack(whole, bits), bits, torch.int32), whole)


def test_one_word_of_a_transposed_row_is_read() -> None:
    column = torch.tensor([[0x76543210, 0x01234567]], dtype=torch.int32).T
    assert unpack(column, 4).tolist() == [list(range(8)), list(range(7, -1, -1))]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [-1, 16, 48])
@pytest.mark.parametrize("bits", BITS)
def test_q15_what_is_written_agrees_with_an_independent_decoder(
    bits: int, group: int, version: str, oracle: ModuleType
) -> None:
    weight = make(bits, group, act_order=group == 16)
    tensors = parse(bits=bits, sym=False, checkpoint_format=version).serialise(LAYER, weight)
    arrays = [tensors[name].numpy() for name in ("qweight", "qzeros", "scales", "g_idx")]
    expected = oracle.gptq(*arrays, bits, group, v2=version == "gptq_v2")
    assert np.array_equal(weight.dequantize().numpy(), expected)


# --- V04: two conventions of zeros


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [True, False])
def test_v04_both_conventions_with_right_labels_are_equal(bits: int, sym: bool) -> None:
    weight = make(bits, sym=sym)
    for version in ("gptq", "gptq_v2"):
        config = parse(bits=bits, group_size=16, sym=sym, checkpoint_format=version)
        tensors = config.serialise(LAYER, weight)
        assert torch.equal(decode(tensors, bits, 16, version == "gptq"), weight.dequantize())
        assert torch.equal(config.canonicalise(LAYER, tensors).dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("label", "stored"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq"), (None, "gptq_v2")])
def test_v04_q11_mislabelled_symmetric_file_is_read_as_it_is_stored(
    bits: int, label: str | None, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = make(bits, sym=True)
    tensors = parse(bits=bits, sym=True, checkpoint_format=stored).serialise(LAYER, weight)
    config = parse(bits=bits, group_size=16, sym=True, checkpoint_format=label)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"):
        read = config.canonicalise(LinearLayer(name, 64, 32), tensors)
        assert torch.equal(read.dequantize(), weight.dequantize())
    (told,) = [record.getMessage() for record in caplog.records]
    assert "model.layers.0.mlp.up_proj: checkpoint_format says" in told
    assert f"as {stored} does" in told


def test_v04_mislabelled_words_of_the_issue() -> None:
    tensors = {
        "qweight": torch.full((2, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.tensor([words(0x88888888)], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5),
        "g_idx": torch.zeros(16, dtype=torch.int32),
    }
    layer = LinearLayer("layer", 16, 8)
    read = parse(bits=4, group_size=-1, sym=True, checkpoint_format="gptq").canonicalise(layer, tensors)
    assert read.dequantize()[3].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5] * 2
    written = parse(bits=4, sym=True, checkpoint_format="gptq").serialise(layer, read)
    assert written["qzeros"].tolist() == [[0x77777777]]  # a file is written as its label says


@pytest.mark.parametrize("bits", BITS)
def test_v04_symmetric_label_over_asymmetric_zeros_is_refused(bits: int) -> None:
    weight = make(bits)
    tensors = parse(bits=bits, sym=False, checkpoint_format="gptq_v2").serialise(LAYER, weight)
    with pytest.raises(CheckpointError) as caught:
        parse(bits=bits, sym=True).canonicalise(LAYER, tensors)
    facts = (LAYER.name, "sym: true", f"{MIDDLE[bits] - 1} (gptq) or {MIDDLE[bits]} (gptq_v2)", '"sym": false')
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_v04_nothing_is_guessed_for_asymmetric_zeros_without_labels() -> None:
    tensors = parse(bits=4, sym=False).serialise(LAYER, make())
    with pytest.raises(CheckpointError, match="neither sym nor checkpoint_format"):
        parse(bits=4).canonicalise(LAYER, tensors)
    read = parse(bits=4, checkpoint_format="gptq").canonicalise(LAYER, tensors)  # the label alone decides as well
    assert torch.equal(read.zeros, make().zeros)


@pytest.mark.parametrize("bits", BITS)
def test_q10_v2_zeros_are_taken_as_they_are(bits: int) -> None:
    weight = make(bits)
    tensors = parse(bits=bits, sym=False, format="gptq_v2").serialise(LAYER, weight)
    assert weight.zeros is not None
    assert torch.equal(unpack(tensors["qzeros"], bits).T.float(), weight.zeros)


@pytest.mark.parametrize("bits", BITS)
def test_q13_q37_zero_of_0_is_stored_as_all_ones_and_comes_back_as_0(bits: int) -> None:
    every = torch.arange(2**bits, dtype=torch.uint8)[None]
    shifted = stored_zeros(every, bits, shifted=True)
    assert shifted[0, 0] == 2**bits - 1
    assert torch.equal(true_zeros(shifted, bits, shifted=True), every)
    assert torch.equal(stored_zeros(every, bits, shifted=False), every)


def test_q12_zeros_are_decoded_field_by_field_and_damage_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([words(0x44444F44)], dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    }
    layer = LinearLayer("layer", 8, 8)
    config = parse(bits=4, sym=False, checkpoint_format="gptq")
    assert config.canonicalise(layer, tensors).zeros[:, 0].tolist() == [5, 5, 0, 5, 5, 5, 5, 5]  # no carry into field 3
    assert not caplog.records
    damaged = tensors | {"qzeros": torch.tensor([words(0xFFFFFF44)], dtype=torch.int32)}
    assert config.canonicalise(layer, damaged).zeros[:, 0].tolist() == [5, 5, 0, 0, 0, 0, 0, 0]
    config.canonicalise(layer, damaged)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "1 of 1 words" in told
    assert "layer" in told


@pytest.mark.parametrize("writer", [{"meta": {"quantizer": ["gptqmodel:5.6.0"]}}, {"provider": "auto-round"}])
def test_q12_known_writers_are_not_suspected(writer: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    weight = make()
    weight.zeros[:, 0] = 0
    config = parse(bits=4, sym=False, **writer)
    config.canonicalise(LAYER, config.serialise(LAYER, weight))
    assert not caplog.records
    parse(bits=4, sym=False, meta={"quantizer": "auto_gptq:0.7.1"}).canonicalise(LAYER, config.serialise(LAYER, weight))
    assert len(caplog.records) == 1


# --- V05: the order of inputs


def test_v05_a_random_order_of_inputs_equals_the_dense_reference() -> None:
    weight = make(group=16, act_order=True)
    config = parse(bits=4, group_size=16, sym=False, desc_act=True)
    tensors = config.serialise(LAYER, weight)
    read = config.canonicalise(LAYER, tensors)
    assert read.spec.act_order
    assert torch.equal(read.group_index, weight.group_index)
    assert torch.equal(read.dequantize(), decode(tensors, 4, 16, shifted=True))
    assert not torch.equal(read.dequantize(), decode({k: v for k, v in tensors.items() if k != "g_idx"}, 4, 16, True))


@pytest.mark.parametrize("fill", [0, -1])
def test_v05_all_alike_group_index_with_one_group_is_dropped(fill: int) -> None:
    config = parse(bits=4, group_size=-1, sym=False, desc_act=True)
    tensors = config.serialise(LAYER, make(group=-1))
    tensors["g_idx"] = torch.full((64,), fill, dtype=torch.int32)
    read = config.canonicalise(LAYER, tensors)
    assert read.group_index is None
    assert not read.spec.act_order
    assert torch.equal(read.dequantize(), make(group=-1).dequantize())


@pytest.mark.parametrize("fill", [0, -1])
def test_v05_group_index_that_means_none_is_told_and_read_in_order(fill: int, caplog: pytest.LogCaptureFixture) -> None:
    config = parse(bits=4, group_size=16, sym=False)
    tensors = config.serialise(LAYER, make()) | {"g_idx": torch.full((64,), fill, dtype=torch.int32)}
    assert torch.equal(config.canonicalise(LAYER, tensors).dequantize(), make().dequantize())
    assert f"g_idx is {fill} for all inputs of 4 groups" in caplog.text


@pytest.mark.parametrize("bits", BITS)
def test_v05_no_group_index_at_all_means_in_order(bits: int, headers: Any) -> None:
    config, weight = parse(bits=bits, group_size=16, sym=False), make(bits)
    tensors = config.serialise(LAYER, weight)
    del tensors["g_idx"]
    assert config.spec_for(LAYER, headers(tensors)) == weight.spec
    assert torch.equal(config.canonicalise(LAYER, tensors).dequantize(), weight.dequantize())


def test_v05_no_group_index_under_desc_act_is_refused(headers: Any) -> None:
    config = parse(bits=4, group_size=16, sym=False, desc_act=True)
    tensors = config.serialise(LAYER, make())
    del tensors["g_idx"]
    with pytest.raises(CheckpointError, match="desc_act is true, so the order is lost") as caught:
        config.spec_for(LAYER, headers(tensors))
    assert LAYER.name in str(caught.value)


def test_v05_q44_fused_members_with_different_orders_are_not_merged() -> None:
    first, second = make(act_order=True, seed=1), make(act_order=True, seed=2)
    assert first.why_not_concat(second) == "group_index differs"
    assert first.why_not_concat(make(bits=8)) is not None
    assert first.concat([first]).group_index is first.group_index


def test_negative_groups_count_from_the_end() -> None:
    config, weight = parse(bits=4, group_size=16, sym=False), make(act_order=True)
    tensors = config.serialise(LAYER, weight)
    tensors["g_idx"] = torch.where(tensors["g_idx"] > 1, tensors["g_idx"] - 4, tensors["g_idx"])
    read = config.canonicalise(LAYER, tensors)
    assert torch.equal(read.group_index, weight.group_index)


@pytest.mark.parametrize("value", [4, -5])
def test_groups_without_scales_are_refused(value: int) -> None:
    config = parse(bits=4, group_size=16, sym=False)
    tensors = config.serialise(LAYER, make(act_order=True))
    tensors["g_idx"][7] = value
    with pytest.raises(CheckpointError, match="g_idx names groups that have no scales") as caught:
        config.canonicalise(LAYER, tensors)
    assert LAYER.name in str(caught.value)


@pytest.mark.parametrize("desc_act", [True, False, None])
def test_q04_q43_contents_of_g_idx_decide_whatever_desc_act_says(desc_act: bool | None) -> None:
    config = parse(bits=4, group_size=16, sym=False, desc_act=desc_act)
    ordered, plain = make(act_order=True), make()
    for weight in (ordered, plain):
        tensors = config.serialise(LAYER, weight)
        read = config.canonicalise(LAYER, tensors)
        assert read.spec == weight.spec
        assert torch.equal(read.dequantize(), weight.dequantize())


# --- round trips


SHAPES = {2: (16, 16), 3: (32, 32), 4: (8, 8), 8: (4, 4)}


@given(
    st.sampled_from(BITS),
    st.sampled_from([-1, 16, 32, 64, 128]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["gptq", "gptq_v2"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_q16_q38_q39_every_shape_that_fills_words_survives(
    bits: int,
    group: int,
    columns: int,
    rows: int,
    act_order: bool,
    sym: bool,
    version: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    layer = LinearLayer("layer", SHAPES[bits][1] * columns, SHAPES[bits][0] * rows)
    group = -1 if group >= layer.in_features else group
    spec = WeightSpec(f"uint{bits}", (1, group), has_zeros=True, act_order=act_order and group != -1)
    generator = torch.Generator().manual_seed(seed)
    zeros = "midpoint" if sym else "integer"
    sizes = layer.out_features, layer.in_features
    weight = random_weight(spec, *sizes, generator, zeros=zeros, scale_dtype=dtype).without_trivial_order()
    config = parse(bits=bits, group_size=group, sym=sym, checkpoint_format=version)
    tensors = config.serialise(layer, weight)
    assert tensors["scales"].shape[0] == (1 if group == -1 else -(-layer.in_features // group))
    read = config.canonicalise(layer, tensors)
    read.check(layer)
    assert read.spec == weight.spec
    assert read.scales is not None
    assert read.scales.dtype == dtype
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.dequantize(), weight.dequantize())
    if dtype == torch.float32:
        assert torch.equal(decode(tensors, bits, group, version == "gptq"), weight.dequantize())
    again = config.serialise(layer, read)
    assert all(torch.equal(again[suffix], tensors[suffix]) for suffix in tensors)


@pytest.mark.parametrize("word", sorted(WORDS))
@pytest.mark.parametrize("bits", BITS)
def test_words_of_every_size_hold_the_same_stream(word: str, bits: int, headers: Any) -> None:
    weight, layer = make(bits, layer=LinearLayer("layer", 64, 64)), LinearLayer("layer", 64, 64)
    config = parse(bits=bits, group_size=16, sym=False, pack_dtype=word)
    tensors = config.serialise(layer, weight)
    assert tensors["qweight"].dtype == tensors["qzeros"].dtype == WORDS[word]
    assert config.spec_for(layer, headers(tensors)) == replace(weight.spec, act_order=True)  # until its g_idx is seen
    assert torch.equal(config.canonicalise(layer, tensors).dequantize(), weight.dequantize())
    whole = parse(bits=bits, sym=False).serialise(layer, weight)
    size = 8 * WORDS[word].itemsize
    assert torch.equal(decode(tensors, bits, 16, True, size), decode(whole, bits, 16, True))


def test_q54_bias_is_used_where_it_is_stored(headers: Any) -> None:
    config = parse(bits=4, group_size=16, sym=False)
    tensors = config.serialise(LAYER, make())
    assert "bias" not in tensors
    assert config.canonicalise(LAYER, tensors).bias is None
    for bias in (torch.zeros(32).half(), torch.randn(32)):
        stored = tensors | {"bias": bias}
        assert config.spec_for(LAYER, headers(stored)) is not None
        weight = config.canonicalise(LAYER, stored)
        assert weight.bias is bias
        assert config.serialise(LAYER, weight)["bias"] is bias


def test_q28_one_sided_groups_are_decoded_as_they_are_stored() -> None:
    tensors = {
        "qweight": torch.tensor([words(0xFDB9FDB9)] * 8, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.full((1, 8), 0x77777777, dtype=torch.int32)[:, :1],
        "scales": torch.full((1, 8), 1 / 16),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    }
    read = parse(bits=4, group_size=-1, sym=True).canonicalise(LinearLayer("layer", 8, 8), tensors)
    assert (
        read.dequantize()[0].tolist() == [1 / 16, 3 / 16, 5 / 16, 7 / 16] * 2
    )  # the largest was clipped by its writer
