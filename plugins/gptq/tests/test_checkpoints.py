"""Files that other people's tools wrote, against those tools' own numbers and against independent decoders."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo import LayerFacts, LinearLayer, QuantSource, TensorInfo, WeightSpec
from octavo_gptq.config import GPTQConfig

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
REAL = "smollm2-gptq-4bit-g64-actorder"
NAMES = [
    "tiny-gptq-2bit-g32",
    "tiny-gptq-4bit-channel",
    "tiny-gptq-4bit-g32",
    "tiny-gptq-4bit-g32-actorder",
    "tiny-gptq-4bit-g32-asym",
    "tiny-gptq-4bit-gar",
    "tiny-gptq-8bit-g32",
    REAL,
]
ORDERED = {"tiny-gptq-2bit-g32", "tiny-gptq-4bit-g32-actorder", "tiny-gptq-8bit-g32", REAL}


class Folder:
    """A checkpoint folder: its settings, tensors and headers, and the weights as its writer dequantised them."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.raw: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
        self.side: dict[str, Any] = json.loads((path / "quantize_config.json").read_text())
        self.config = GPTQConfig.parse(QuantSource(self.raw, "config.json: quantization_config"))
        self.tensors = {n: t for file in path.glob("model*.safetensors") for n, t in load_file(file).items()}
        self.headers = {n: TensorInfo(n, t.dtype, tuple(t.shape), path.name) for n, t in self.tensors.items()}
        reference = path / "reference_dequant_fp16.safetensors"
        self.reference = load_file(reference) if reference.is_file() else {}

    def layers(self, every: bool = False) -> Iterator[tuple[LinearLayer, dict[str, Tensor]]]:
        """Quantised layers with their tensors by suffix: all of a tiny model, one in nine of the real one unless `every`."""
        modules = [name.removesuffix(".qweight") for name in self.tensors if name.endswith(".qweight")]
        for module in modules if every or self.name != REAL else modules[::9]:
            stored = {s: self.tensors[f"{module}.{s}"] for s in SUFFIXES}
            yield LinearLayer(module, len(stored["g_idx"]), stored["scales"].shape[1]), stored

    def headers_of(self, module: str) -> dict[str, TensorInfo]:
        return {n.rpartition(".")[2]: info for n, info in self.headers.items() if n.rpartition(".")[0] == module}


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, shared: Path) -> Folder:
    return Folder(shared / "checkpoints" / request.param)


def test_settings_are_understood_to_the_last_key(folder: Folder) -> None:
    assert folder.config.unread_keys == ()
    assert GPTQConfig.parse(QuantSource(folder.side, "quantize_config.json")).unread_keys == ()


def test_settings_of_both_files_are_equal(folder: Folder) -> None:
    assert GPTQConfig.parse(QuantSource(folder.side, "quantize_config.json")) == folder.config


def test_q01_the_folder_is_recognised_by_its_tensors_alone(folder: Folder) -> None:
    assert GPTQConfig.detect(None, folder.headers)
    settings = GPTQConfig.infer(folder.headers)
    assert settings == {"bits": folder.raw["bits"]}
    config = GPTQConfig.parse(QuantSource(settings, "tensors"))
    for layer, stored in folder.layers():
        if folder.raw["sym"]:
            read = config.canonicalise(layer, stored)
            assert torch.equal(read.dequantize(), folder.config.canonicalise(layer, stored).dequantize())


def test_q01_side_file_without_quant_method_is_recognised(folder: Folder) -> None:
    side = {key: folder.raw[key] for key in ("bits", "group_size", "sym", "desc_act")}
    assert GPTQConfig.detect(QuantSource(side, "quantize_config.json"), folder.headers)


def test_weights_equal_the_independent_decoder_bit_for_bit(folder: Folder, oracle: ModuleType) -> None:
    for layer, stored in folder.layers():
        spec = folder.config.spec_for(layer, folder.headers_of(layer.name))
        assert spec is not None
        weight = folder.config.canonicalise(layer, stored)
        weight.check(layer)
        assert weight.spec == spec
        assert weight.spec.act_order == (folder.name in ORDERED)
        assert weight.scales is not None
        assert weight.scales.dtype == stored["scales"].dtype
        arrays = [stored[s].float().numpy() if s == "scales" else stored[s].numpy() for s in SUFFIXES]
        expected = oracle.gptq(*arrays, folder.raw["bits"], folder.raw["group_size"], sym=folder.raw["sym"])
        assert np.array_equal(weight.dequantize().numpy(), expected), layer.name


def test_weights_equal_what_the_writer_says(folder: Folder) -> None:
    if not folder.reference:
        assert folder.name == REAL  # its reference is the recorded perplexity
        return
    layers = list(folder.layers())
    assert {f"{layer.name}.weight" for layer, _ in layers} == folder.reference.keys()
    for layer, stored in layers:
        expected = folder.reference[f"{layer.name}.weight"]
        assert torch.equal(folder.config.canonicalise(layer, stored).dequantize(torch.float16), expected), layer.name


def test_files_are_written_again_byte_for_byte(folder: Folder) -> None:
    for layer, stored in folder.layers(every=True):
        again = folder.config.serialise(layer, folder.config.canonicalise(layer, stored))
        assert again.keys() == stored.keys()
        for suffix, tensor in again.items():
            assert tensor.dtype == stored[suffix].dtype
            as_integers = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
            assert torch.equal(tensor.view(as_integers), stored[suffix].view(as_integers)), (layer.name, suffix)


def test_conversion_between_v1_and_v2_changes_no_number(folder: Folder) -> None:
    other = folder.config.model_copy(update={"checkpoint_format": "gptq_v2"})
    for layer, stored in folder.layers():
        weight = folder.config.canonicalise(layer, stored)
        tensors = other.serialise(layer, weight)
        assert not torch.equal(tensors["qzeros"], stored["qzeros"])
        assert torch.equal(other.canonicalise(layer, tensors).dequantize(), weight.dequantize())


def test_q27_asymmetric_file_under_the_wrong_label_is_suspected(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(shared / "checkpoints" / "tiny-gptq-4bit-g32-asym")
    wrong = folder.config.model_copy(update={"checkpoint_format": "gptq_v2"})
    wrong = GPTQConfig.parse(QuantSource(wrong.settings(), "kit"))
    for layer, stored in folder.layers():
        assert not caplog.records
        folder.config.canonicalise(layer, stored)
    for layer, stored in folder.layers():
        wrong.canonicalise(layer, stored)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "checkpoint_format may be gptq instead" in told


def test_settings_made_for_a_real_file_read_it(folder: Folder) -> None:
    weights = {layer: folder.config.canonicalise(layer, stored) for layer, stored in folder.layers()}
    facts = {layer: LayerFacts(weight.spec, weight.is_symmetric, torch.float16) for layer, weight in weights.items()}
    for target in GPTQConfig.targets:
        config = GPTQConfig.for_weights(target, facts)
        assert config.dynamic == {}
        assert GPTQConfig.parse(QuantSource(config.settings(), "config.json")) == config
        assert config.desc_act == (folder.name in ORDERED)
        for layer, weight in weights.items():
            back = config.canonicalise(layer, config.serialise(layer, weight))
            assert torch.equal(back.dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", ["tiny-awq-gemm-gm", "tiny-awq-gemm-aa", "tiny-awq-gemv-aa", "tiny-ct-w4a16_gptq"])
def test_folders_of_other_formats_are_not_claimed(name: str, shared: Path) -> None:
    tensors = load_file(shared / "checkpoints" / name / "model.safetensors")
    headers = {n: TensorInfo(n, t.dtype, tuple(t.shape), name) for n, t in tensors.items()}
    assert not GPTQConfig.detect(None, headers)
    assert not GPTQConfig.detect(QuantSource({"bits": 4, "zero_point": True}, "quant_config.json"), headers)
    assert not GPTQConfig.detect(QuantSource({"bits": 4, "zero_point": True, "sym": True}, "config.json"), headers)


def test_a_float_layer_of_a_real_file_is_left_alone(shared: Path) -> None:
    folder = Folder(shared / "checkpoints" / "tiny-gptq-4bit-g32")
    head = folder.headers_of("lm_head")
    assert head.keys() == {"weight"}
    assert folder.config.spec_for(LinearLayer("lm_head", 128, 512), head) is None
    up = folder.headers_of("model.layers.0.mlp.up_proj")
    assert folder.config.spec_for(LinearLayer("model.layers.0.mlp.up_proj", 128, 256), up) == WeightSpec(
        "uint4", (1, 32), has_zeros=True
    )
