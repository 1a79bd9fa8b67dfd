"""Files that other people's tools wrote, against those tools' own numbers and against independent decoders."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo import CheckpointError, LinearLayer, QuantSource, TensorInfo
from octavo_awq.config import AWQConfig

NAMES = ["tiny-awq-gemm-gm", "tiny-awq-gemm-aa", "tiny-awq-gemv-aa"]  # GPTQModel, AutoAWQ, AutoAWQ


class Folder:
    """A checkpoint folder: its settings, tensors and headers, and the weights as its writer dequantised them."""

    def __init__(self, path):
        self.raw = json.loads((path / "config.json").read_text())["quantization_config"]
        self.config = AWQConfig.parse(QuantSource(self.raw, "config.json: quantization_config"))
        self.tensors = load_file(path / "model.safetensors")
        self.headers = {n: TensorInfo(n, t.dtype, tuple(t.shape), path.name) for n, t in self.tensors.items()}
        self.reference = load_file(path / "reference_dequant_fp16.safetensors")

    def layers(self):
        """(layer, its tensors by suffix, the writer's weight) of each quantised layer."""
        for name, reference in self.reference.items():
            module = name.removesuffix(".weight")
            stored = {s: self.tensors[f"{module}.{s}"] for s in ("qweight", "qzeros", "scales")}
            yield LinearLayer(module, reference.shape[1], reference.shape[0]), stored, reference

    def headers_of(self, module):
        return {n.rpartition(".")[2]: info for n, info in self.headers.items() if n.rpartition(".")[0] == module}


@pytest.fixture(scope="module", params=NAMES)
def folder(request, shared):
    return Folder(shared / "checkpoints" / request.param)


def test_settings_are_understood_to_the_last_key(folder):
    assert folder.config.unread_keys == ()
    assert folder.config.group_size == 32


def test_the_folder_is_recognised_by_its_tensors_alone(folder):
    assert AWQConfig.detect(None, folder.headers)
    assert AWQConfig.infer(folder.headers) == {"bits": 4, "version": folder.config.version, "zero_point": True}


def test_side_file_without_quant_method_is_recognised(folder):
    side = {key: folder.raw[key] for key in ("bits", "group_size", "zero_point", "version")}
    assert AWQConfig.detect(QuantSource(side, "quant_config.json"), folder.headers)


def test_weights_equal_the_independent_decoder_bit_for_bit(folder, oracle):
    decode = {"gemm": oracle.awq_gemm, "gemv": oracle.awq_gemv}[folder.config.version]
    for layer, stored, _ in folder.layers():
        weight = folder.config.canonicalise(layer, stored)
        weight.check(layer)
        assert weight.spec == folder.config.spec_for(layer, folder.headers_of(layer.name))
        assert weight.scales.dtype == stored["scales"].dtype
        scales = stored["scales"].float().numpy()
        expected = decode(stored["qweight"].numpy(), stored["qzeros"].numpy(), scales, 32)
        assert np.array_equal(weight.dequantize().numpy(), expected), layer.name


def test_weights_equal_what_the_writer_says(folder):
    for layer, stored, reference in folder.layers():
        assert torch.equal(folder.config.canonicalise(layer, stored).dequantize(torch.float16), reference), layer.name


def test_files_are_written_again_byte_for_byte(folder):
    for layer, stored, _ in folder.layers():
        again = folder.config.serialise(layer, folder.config.canonicalise(layer, stored))
        assert again.keys() == stored.keys()
        for suffix, tensor in again.items():
            as_integers = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
            assert tensor.dtype == stored[suffix].dtype
            assert torch.equal(tensor.view(as_integers), stored[suffix].view(as_integers)), (layer.name, suffix)


def test_one_version_is_not_read_as_another(folder):
    other = "gemv" if folder.config.version == "gemm" else "gemm"
    config = folder.config.model_copy(update={"version": other})
    for layer, _, _ in folder.layers():
        with pytest.raises(CheckpointError, match=f"say AWQ {other}, the tensors lie as AWQ {folder.config.version}"):
            config.spec_for(layer, folder.headers_of(layer.name))


def test_conversion_between_gemm_and_gemv_changes_no_number(folder):
    other = AWQConfig(group_size=32, version="gemv" if folder.config.version == "gemm" else "gemm")
    for layer, stored, _ in folder.layers():
        weight = folder.config.canonicalise(layer, stored)
        back = other.canonicalise(layer, other.serialise(layer, weight))
        assert torch.equal(back.dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", ["tiny-gptq-4bit-g32", "tiny-gptq-2bit-g32", "tiny-gptq-8bit-g32", "tiny-ct-awq_asym"])
def test_folders_of_other_formats_are_not_claimed(name, shared):
    tensors = load_file(shared / "checkpoints" / name / "model.safetensors")
    headers = {n: TensorInfo(n, t.dtype, tuple(t.shape), name) for n, t in tensors.items()}
    assert not AWQConfig.detect(None, headers)
    stripped = {n: info for n, info in headers.items() if not n.endswith("g_idx")}
    assert not AWQConfig.detect(QuantSource({"bits": 4, "zero_point": True}, "quantize_config.json"), stripped) or (
        "ct" in name  # no packed tensor to contradict the settings
    )
