"""How kernels are chosen: ranks, wishes, refusals as sentences, and what an exception in a plugin becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import registry

from octavo import (
    LLM,
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionRequest,
    ConfigError,
    KVFormat,
    KVGeometry,
    LayerKV,
    LinearMethod,
    LinearRequest,
    NoKernelError,
    PlainKV,
    Platform,
    PluginError,
    QuantizedWeight,
    WeightSpec,
    round_to_nearest,
    zeroed,
)
from octavo.attention.kv_format import AttentionStep, DecodingBackend, PagedKV
from octavo.attention.reference import ReferenceAttention
from octavo.attention.selection import select_attention
from octavo.quant.linear import DenseMethod, DequantizedMethod, ReferenceMethod, select_linear
from octavo.testing import tiny_model

CPU = Platform("cpu", "x86_64", frozenset(), 1)
INT4 = WeightSpec("uint4", (1, 32), has_zeros=True)
REQUEST = LinearRequest("model.layers.3.self_attn.q_proj|k_proj", INT4, 64, 32, False, torch.float32, CPU)
CORE = [DenseMethod, ReferenceMethod, DequantizedMethod]


def method(name: str, rank: int, reason: str | Exception | None = None) -> type[LinearMethod]:
    def why_not(cls: type[LinearMethod], request: LinearRequest) -> str | None:
        if isinstance(reason, Exception):
            raise reason
        return reason

    return type(name, (ReferenceMethod,), {"name": name, "rank": rank, "why_not": classmethod(why_not)})


def test_the_highest_willing_rank_wins_and_the_others_say_why() -> None:
    choice = select_linear(REQUEST, [*CORE, method("tuned", 30, "needs avx9"), method("vendor", 20)])
    assert choice.method.name == "vendor"
    assert choice.refusals == (("tuned", "needs avx9"),)


def test_negative_ranks_run_only_by_name() -> None:
    assert select_linear(REQUEST, CORE).method is ReferenceMethod
    assert select_linear(REQUEST, CORE, {"*": "dequantized"}).method is DequantizedMethod


@pytest.mark.parametrize("pattern", ["*", "*.q_proj", "*.k_proj", "model.layers.3.*", "*q_proj|k_proj"])
def test_patterns_match_fused_layers_and_their_members(pattern: str) -> None:
    assert select_linear(REQUEST, CORE, {"*o_proj": "dense", pattern: "dequantized"}).method is DequantizedMethod


def test_a_demand_that_cannot_be_met_and_a_wish() -> None:
    with pytest.raises(ConfigError, match="plain weights") as caught:
        select_linear(REQUEST, CORE, {"*": "dense"})
    assert "dense?" in str(caught.value)
    choice = select_linear(REQUEST, CORE, {"*": "dense?"})
    assert choice.method is ReferenceMethod
    assert choice.refusals[0][0] == "dense"
    with pytest.raises(ConfigError, match="installed: dense"):
        select_linear(REQUEST, CORE, {"*": "nothing"})


def test_a_why_not_that_raises_is_a_refusal() -> None:
    choice = select_linear(REQUEST, [*CORE, method("broken", 30, RuntimeError("no libfoo"))])
    assert choice.method is ReferenceMethod
    assert choice.refusals[0] == ("broken", "its why_not failed: RuntimeError: no libfoo")


def test_no_kernel_lists_every_reason_and_the_notes() -> None:
    request = replace(REQUEST, spec=WeightSpec("codebook8"))
    with pytest.raises(NoKernelError) as caught:
        select_linear(request, CORE, notes=["plugin codebook (x 1) failed to load: ImportError: y"])
    text = str(caught.value)
    assert all(part in text for part in ("dense:", "reference:", "codebook8", "plugin codebook", REQUEST.layer))


def test_the_hook_may_choose_among_willing_candidates() -> None:
    slow, fast = method("slow", 20), method("fast", 10)
    assert select_linear(REQUEST, [slow, fast], hook=lambda request, candidates: fast).method is fast
    assert select_linear(REQUEST, [slow, fast], hook=lambda request, candidates: None).method is slow


# --- attention

LAYER = AttentionLayer(0, heads=4, kv_heads=2, head_dim=16, scale=0.25)
ATTENTION = AttentionRequest([LAYER], torch.float32, 16, torch.float32, CPU)


def backend(name: str, rank: int, loads: set[torch.dtype], reason: str | None = None) -> type[AttentionBackend]:
    def why_not(cls: type[AttentionBackend], request: AttentionRequest) -> str | None:
        return reason if request.kv_dtype in loads else f"cannot read {request.kv_dtype}"

    fields = {"name": name, "rank": rank, "loads": frozenset(loads), "why_not": classmethod(why_not)}
    return type(name, (ReferenceAttention,), fields)


def test_native_reading_counts_more_than_ten_ranks() -> None:
    request = replace(ATTENTION, kv_dtype=torch.float8_e4m3fn)
    native = backend("native", 20, {torch.float8_e4m3fn})
    fast = backend("fast", 30, {torch.float32})
    assert select_attention(request, [ReferenceAttention, native, fast]).method is native
    choice = select_attention(request, [ReferenceAttention, fast])
    assert choice.method is fast
    assert choice.decodes
    assert choice.request.kv_dtype is torch.float32, "a backend that gets decoded blocks is asked about those"
    assert str(choice) == "fast over decoded blocks"


def test_wanted_attention_backend() -> None:
    refusing = backend("refusing", 30, {torch.float32}, "needs a GPU")
    choice = select_attention(ATTENTION, [ReferenceAttention, refusing])
    assert (choice.method, choice.refusals) == (ReferenceAttention, (("refusing", "needs a GPU"),))
    with pytest.raises(ConfigError, match="needs a GPU"):
        select_attention(ATTENTION, [ReferenceAttention, refusing], "refusing")
    with pytest.raises(ConfigError, match="installed: reference"):
        select_attention(ATTENTION, [ReferenceAttention], "nothing")
    with pytest.raises(NoKernelError, match="needs a GPU"):
        select_attention(ATTENTION, [refusing])


class ScaledKV(PlainKV):
    """fp16 with a scale per token and head, as core's own formats never have it."""

    name = "scaled"
    has_scales = True  # type: ignore[assignment]

    @property
    def storage(self) -> torch.dtype:
        return torch.float16

    def allocate(self, num_blocks: int, device: str) -> LayerKV:
        g = self.geometry
        shape = (num_blocks, g.kv_heads, g.block_size)
        plain = [zeroed((*shape, g.head_dim), self.storage, device) for _ in range(2)]
        return LayerKV(*plain, *(zeroed(shape, torch.float32, device) for _ in range(2)))

    def write(
        self, layer: AttentionLayer, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block, offset = slots // self.geometry.block_size, slots % self.geometry.block_size
        for values, codes, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
            assert scales is not None
            scale = values.abs().amax(-1) / 3
            scales[block, :, offset] = scale
            codes[block, :, offset] = (values / scale[..., None]).half()

    def decode(self, layer: AttentionLayer, kv: LayerKV, block_ids: torch.Tensor) -> LayerKV:
        assert kv.key_scale is not None
        assert kv.value_scale is not None
        key = kv.key[block_ids].float() * kv.key_scale[block_ids][..., None]
        return LayerKV(key, kv.value[block_ids].float() * kv.value_scale[block_ids][..., None])


def test_blocks_with_scales_are_never_read_raw() -> None:
    geometry = KVGeometry(1, 2, 16, 16, torch.float32)
    kv_format: KVFormat = ScaledKV(geometry)
    request = AttentionRequest([LAYER], torch.float32, 16, kv_format.storage, CPU, kv_format.has_scales)
    choice = select_attention(request, [ReferenceAttention])
    assert choice.decodes
    scaled = choice.build(kv_format)
    assert isinstance(scaled, DecodingBackend)
    plain_format = PlainKV(geometry)
    plain = select_attention(ATTENTION, [ReferenceAttention]).build(plain_format)
    outs = []
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(20, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(20, 4, 16, generator=generator)
    ints = torch.tensor
    batch = AttentionBatch(
        ints([0, 20], dtype=torch.int32),
        ints([20], dtype=torch.int32),
        ints([[3, 1]], dtype=torch.int32),
        ints([3 * 16 + i if i < 16 else 16 + i - 16 for i in range(20)]),
        ints([20], dtype=torch.int32),
        [20],
        [20],
        16,
    )
    for kind, chosen in ((kv_format, scaled), (plain_format, plain)):
        memory = PagedKV(kind, [LAYER], 4, "cpu")
        outs.append(AttentionStep(batch, chosen, chosen.plan(batch), memory).attend(LAYER, query, key, value))
    assert torch.allclose(outs[0], outs[1], atol=1e-2)
    assert not torch.allclose(outs[0], torch.zeros_like(outs[0]), atol=1e-2)


def test_quantized_weight_slices_and_concat_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 70, generator=generator)
    for spec in (
        WeightSpec("uint4", (1, 32), True),
        WeightSpec("int8", (1, -1)),
        WeightSpec("int8", (-1, -1)),
        WeightSpec("fp8_e4m3", (16, 32)),
    ):
        whole: QuantizedWeight = round_to_nearest(weight, spec)
        full = whole.dequantize()
        assert torch.equal(
            torch.cat([whole.slice_in(0, 33).dequantize(), whole.slice_in(33, 70).dequantize()], 1), full
        )
        top, rest = whole.slice_out(0, 21), whole.slice_out(21, 48)
        assert torch.equal(torch.cat([top.dequantize(), rest.dequantize()]), full)
        assert torch.equal(whole.concat([whole]).dequantize(), torch.cat([full, full]))
        assert torch.equal(top.concat([rest]).dequantize(), full)


def test_a_kernel_that_fails_to_prepare_is_named(tmp_path: Path) -> None:
    def broken(self: LinearMethod, weight: QuantizedWeight, request: LinearRequest) -> None:
        raise RuntimeError("out of tiles")

    kernel = type("Broken", (DenseMethod,), {"name": "broken", "rank": 99, "__init__": broken})
    installed = replace(registry(), linear_methods=(*CORE, kernel))
    with pytest.raises(PluginError, match=r"'broken'.*layers\.0\.self_attn\.q_proj.*out of tiles"):
        LLM(str(tiny_model(tmp_path)), registry=installed, num_blocks_override=8)


@pytest.mark.usefixtures("core_kernels")
def test_slow_layers_are_told_once_and_not_where_they_were_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(tiny_model(tmp_path))
    for wish, told in (({}, 1), ({"*": "reference"}, 0)):
        caplog.clear()
        LLM(model, quantize_weights={"*.layers.*": "int4"}, linear_kernels=wish, num_blocks_override=8).shutdown()
        assert sum("exact and slow; octavo-cpu" in record.message for record in caplog.records) == told
    caplog.clear()
    LLM(model, num_blocks_override=8).shutdown()
    assert "reference kernel" not in caplog.text
