"""Files that llm-compressor wrote, against its own numbers and against independent decoders."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, ActivationSpec, LinearLayer, QuantSource, SamplingParams, TensorInfo, WeightSpec
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig

W4 = WeightSpec("uint4", (1, 32), has_zeros=True)
W8 = WeightSpec("int8", (1, -1), activation=ActivationSpec("int8"))
SPECS = {
    "tiny-ct-awq_asym": W4,
    "tiny-ct-w4a16_gptq": W4,
    "tiny-ct-w4a16_gptq_actweight": W4,
    "tiny-ct-w8a8-sq-gptq": W8,
    "tiny-ct-w8a8_rtn": W8,
    "tiny-ct-kvfp8": None,
    "tiny-ct-kvint8": None,
}


class Folder:
    """A checkpoint folder: its settings, tensors and headers, and the weights as its writer dequantised them."""

    def __init__(self, path):
        self.path, self.spec = path, SPECS[path.name]
        self.raw = json.loads((path / "config.json").read_text())["quantization_config"]
        self.config = CompressedTensorsConfig.parse(QuantSource(self.raw, "config.json: quantization_config"))
        self.tensors = load_file(path / "model.safetensors")
        self.headers = {n: TensorInfo(n, t.dtype, tuple(t.shape), path.name) for n, t in self.tensors.items()}
        self.reference = load_file(path / "reference_dequant_fp16.safetensors")

    def layers(self):
        """(layer, its tensors by suffix, the writer's weight) of each linear of the blocks."""
        for name, reference in self.reference.items():
            module = name.removesuffix(".weight")
            stored = {n.rpartition(".")[2]: t for n, t in self.tensors.items() if n.rpartition(".")[0] == module}
            yield LinearLayer(module, reference.shape[1], reference.shape[0]), stored, reference

    def headers_of(self, module):
        return {n.rpartition(".")[2]: info for n, info in self.headers.items() if n.rpartition(".")[0] == module}


@pytest.fixture(scope="module", params=SPECS)
def folder(request, shared):
    return Folder(shared / "checkpoints" / request.param)


@pytest.fixture(scope="module", params=[name for name, spec in SPECS.items() if spec is not None])
def quantised(request, shared):
    return Folder(shared / "checkpoints" / request.param)


def decoded(oracle, stored):
    """The weight in fp32 by the independent decoder, or by its formula where there is nothing to unpack."""
    scale = stored["weight_scale"].float().numpy()
    if "weight" in stored:
        return stored["weight"].numpy().astype(np.float32) * scale
    zeros = stored["weight_zero_point"].numpy() if "weight_zero_point" in stored else None
    return oracle.ct_pack(stored["weight_packed"].numpy(), scale, stored["weight_shape"].tolist(), 4, zeros)


def test_settings_are_understood_to_the_last_key(folder):
    assert folder.config.unread_keys == ()


def test_folder_without_quant_method_is_recognised(folder):
    raw = {key: value for key, value in folder.raw.items() if key != "quant_method"}
    assert CompressedTensorsConfig.detect(QuantSource(raw, "config.json"), folder.headers)


def test_settings_are_written_so_that_they_read_the_same(folder):
    written = folder.config.settings()
    assert json.loads(json.dumps(written)) == written
    again = CompressedTensorsConfig.parse(QuantSource(written, "again"))
    assert again == folder.config
    assert again.unread_keys == ()


def test_every_layer_is_what_its_writer_made(folder):
    for layer, _, _ in folder.layers():
        assert folder.config.spec_for(layer, folder.headers_of(layer.name)) == folder.spec
    head = LinearLayer("lm_head", 128, 512)
    assert folder.config.spec_for(head, folder.headers_of("lm_head")) is None


def test_weights_equal_the_independent_decoder_bit_for_bit(quantised, oracle):
    for layer, stored, _ in quantised.layers():
        weight = quantised.config.canonicalise(layer, stored)
        weight.check(layer)
        assert weight.scales.dtype == stored["weight_scale"].dtype
        assert np.array_equal(weight.dequantize().numpy(), decoded(oracle, stored)), layer.name


def test_weights_equal_what_the_writer_says(quantised):
    for layer, stored, reference in quantised.layers():
        found = quantised.config.canonicalise(layer, stored).dequantize(torch.float16)
        assert torch.equal(found, reference), layer.name


def test_files_are_written_again_byte_for_byte(quantised, same_bits):
    for layer, stored, _ in quantised.layers():
        again = quantised.config.serialise(layer, quantised.config.canonicalise(layer, stored))
        assert again.keys() == stored.keys()
        assert all(same_bits(again[suffix], tensor) for suffix, tensor in stored.items()), layer.name


def test_packed_folders_are_understood_without_settings(quantised):
    packed = quantised.spec.code == "uint4"
    assert CompressedTensorsConfig.detect(None, quantised.headers) is packed
    if packed:
        config = CompressedTensorsConfig.parse(QuantSource(CompressedTensorsConfig.infer(quantised.headers), "tensors"))
        for layer, stored, _ in quantised.layers():
            assert torch.equal(
                config.canonicalise(layer, stored).dequantize(),
                quantised.config.canonicalise(layer, stored).dequantize(),
            )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny-ct-kvfp8", "fp8_e4m3"),
        ("smollm2-ct-kvfp8", "fp8_e4m3"),
        ("tiny-ct-kvint8", "int8"),
        ("tiny-ct-w8a8_rtn", None),
    ],
)
def test_q19_kv_only_settings(name, kind, shared):
    raw = json.loads((shared / "checkpoints" / name / "config.json").read_text())["quantization_config"]
    config = CompressedTensorsConfig.parse(QuantSource(raw, "config.json"))
    assert config.kv_cache == kind


TOLERANCE = {"uint4": 0.02, "int8": 1.0}
"""Of single log-probabilities. Rounding of inputs flips between fp16 and fp32: there only the loss is comparable."""


def test_losses_equal_those_of_the_writer(quantised):
    reference = load_file(quantised.path / "reference_tool.safetensors")
    ids = reference["input_ids"][0].tolist()
    expected = torch.log_softmax(reference["logits_reload_fp32"][0].float(), -1)[range(len(ids) - 1), ids[1:]]
    llm = LLM(str(quantised.path), disable_progress=True)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    found = torch.tensor(
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    )
    assert abs(float(found.mean() - expected.mean())) < 0.01
    assert float((found - expected).abs().max()) < TOLERANCE[quantised.spec.code]
