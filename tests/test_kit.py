"""The conformance kit on core's own classes, and its fixtures: tokenizer, tiny models, scripted model, running from code."""

from __future__ import annotations

import builtins
import importlib
import json
import sys

import pytest
import torch
from kit_subjects import ByteKV, Fp8KV, NibbleConfig
from safetensors import safe_open

from octavo.attention.backend import AttentionBatch, AttentionRequest
from octavo.attention.kv_format import (
    AttentionStep,
    BFloat16KV,
    DecodingBackend,
    Float16KV,
    Float32KV,
    KVGeometry,
    PagedKV,
    PlainKV,
)
from octavo.attention.reference import ReferenceAttention
from octavo.errors import PluginError
from octavo.platforms import Platform
from octavo.plugins import PluginInfo, Registry
from octavo.quant.config import QuantSource
from octavo.quant.linear import DenseMethod, DequantizedMethod, ReferenceMethod
from octavo.quant.weight import LinearLayer, WeightSpec
from octavo.testing import (
    AttentionBackendSuite,
    KVFormatSuite,
    LinearMethodSuite,
    QuantConfigSuite,
    ScriptedModel,
    failures_of,
    hostile,
    run_suites,
    suites_for,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

# --- the suites, on what core ships


class TestV10Dense(LinearMethodSuite):
    method = DenseMethod


class TestV10Reference(LinearMethodSuite):
    method = ReferenceMethod


class TestV10Dequantized(LinearMethodSuite):
    method = DequantizedMethod


class TestReferenceAttention(AttentionBackendSuite):
    backend = ReferenceAttention


class DecodingPlain(DecodingBackend):
    """Core's adapter, as the engine puts it together for a backend that does not load the storage type."""

    loads = frozenset({torch.float32, torch.bfloat16, torch.float16})

    @classmethod
    def why_not(cls, request):
        return None if request.kv_dtype == request.dtype else "decodes blocks of the compute type in this test"

    def __init__(self, request):
        layer = request.layers[0]
        geometry = KVGeometry(1, layer.kv_heads, layer.head_dim, request.block_size, request.dtype)
        super().__init__(ReferenceAttention(request), PlainKV(geometry))


class TestDecodingBackend(AttentionBackendSuite):
    backend = DecodingPlain


class TestPlainKV(KVFormatSuite):
    format = PlainKV


class TestFloat32KV(KVFormatSuite):
    format = Float32KV


class TestBFloat16KV(KVFormatSuite):
    format = BFloat16KV


class TestFloat16KV(KVFormatSuite):
    format = Float16KV


# --- collecting and running


def test_bases_are_not_collected():
    for base in (LinearMethodSuite, AttentionBackendSuite, KVFormatSuite, QuantConfigSuite):
        assert not base.__test__
        assert not type("Abstract", (base,), {}).__test__
    assert TestV10Dense.__test__


def test_a_missing_pytest_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("octavo.testing")]:
        monkeypatch.delitem(sys.modules, name)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pytest" else real(name, *rest)
    )
    with pytest.raises(ImportError, match=r"octavo\[testing\]"):
        builtins.__import__("octavo.testing")


def test_suites_of_a_plugin_run_from_code(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conftest.py").write_text("raise RuntimeError('must not be read')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    contributions = {"mine": {"octavo_kv_formats": [PlainKV], "octavo_quant_configs": [NibbleConfig]}}
    registry = Registry(Platform.detect("cpu"), (PluginInfo("mine", "mine", "1"),), _contributions=contributions)
    suites = suites_for(registry, "mine")
    assert list(suites) == ["TestNibbleConfig", "TestPlainKV"]
    assert run_suites(suites) == 0
    summary = capsys.readouterr().out.splitlines()[-2:]
    assert all("passed" in line and " 0 failed" in line for line in summary)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "pytest.ini"]
    assert run_suites({}) == 5
    assert "nothing to check" in capsys.readouterr().out
    with pytest.raises(PluginError, match="no plugin 'other'"):
        suites_for(registry, "other")


def test_a_failing_suite_gives_an_exit_code_and_the_reason(capsys):
    class Short(PlainKV):
        def bytes_per_block(self):
            return super().bytes_per_block() - 1

    suite = type("TestShort", (KVFormatSuite,), {"format": Short})
    assert run_suites({"TestShort": suite}) == 1
    out = capsys.readouterr().out
    assert "blocks take" in out
    assert "TestShort  FAILED" in out
    assert failures_of(suite) == ["test_bytes_per_block_is_what_allocate_takes"]


# --- tokenizer


@pytest.mark.parametrize("character", ["😀", "🌶", "👍", "🦀"])
def test_every_emoji_is_four_tokens(character):
    assert len(tiny_tokenizer().encode(character).ids) == 4


def test_token_ids_are_bytes_and_specials_follow():
    tokenizer = tiny_tokenizer(words=("DEF", " é"))
    text = "naïve\t\x00 日本 🌶\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>").ids == [256, 97, 257, 258]
    assert tokenizer.decode([259, 260]) == "DEF é"
    assert tokenizer.encode("DEF").ids == [68, 69, 70]


def test_transformers_loads_the_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tiny_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 257
    messages = [{"role": "user", "content": "hé"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids[:2] == [256, ord("u")]


# --- tiny models


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_transformers_loads_tiny_models(tmp_path, architecture, tie):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    tiny_model(tmp_path, architecture, tie=tie, shards=2 if tie else 1)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    prompt = torch.tensor([list(b"The quick brown fox")])
    with torch.no_grad():
        assert bool(torch.isfinite(model(prompt).logits).all())
    output = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=258)
    assert len(set(output[0, prompt.shape[1] :].tolist())) > 10, "greedy output is monotonous"


def test_tiny_models_are_the_same_for_the_same_seed(tmp_path):
    files = [
        tiny_model(tmp_path / name, seed=seed) / "model.safetensors" for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()


def test_tiny_models_can_be_quantised(tmp_path):
    settings = {"quant_method": "nibble", "group_size": 16}
    config, spec = NibbleConfig.parse(QuantSource(settings, "test")), WeightSpec("uint4", (1, 16), has_zeros=True)
    options = {"quantize": (config, spec), "settings": settings, "skip": ("*.down_proj",), "dtype": torch.float16}
    tiny_model(tmp_path, "Qwen2ForCausalLM", **options)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == settings
    plain = tiny_model(tmp_path / "plain", "Qwen2ForCausalLM", dtype=torch.float16)
    with (
        safe_open(tmp_path / "model.safetensors", "pt") as file,
        safe_open(plain / "model.safetensors", "pt") as floats,
    ):
        names = set(file.keys())
        module = "model.layers.1.self_attn.q_proj"
        assert {n.rpartition(".")[2] for n in names if n.startswith(module)} == {"packed", "scales", "zeros", "bias"}
        assert "model.layers.1.mlp.down_proj.weight" in names
        stored = {suffix: file.get_tensor(f"{module}.{suffix}") for suffix in ("packed", "scales", "zeros", "bias")}
        weight = config.canonicalise(LinearLayer(module, 64, 64), stored).dequantize()
        assert float((weight - floats.get_tensor(f"{module}.weight").float()).abs().max()) < 0.1
        assert torch.equal(stored["bias"], floats.get_tensor(f"{module}.bias"))


def test_tiny_config_takes_overrides():
    config = tiny_config("MistralForCausalLM", num_hidden_layers=1, sliding_window=8)
    assert (config["num_hidden_layers"], config["sliding_window"]) == (1, 8)


# --- scripted model


class Paged:
    """A scripted model on a small pool, stepped by hand."""

    def __init__(self, scripts, kv_format=PlainKV, block_size=4, num_blocks=8):
        self.model = ScriptedModel(scripts)
        geometry = KVGeometry(1, 1, self.model.attention_layers[0].head_dim, block_size, torch.float32)
        self.kv = PagedKV(kv_format(geometry), self.model.attention_layers, num_blocks, "cpu")
        self.block_size = block_size

    def step(self, *rows):
        """Rows of (tokens so far, how many are computed now, blocks, prompt length) -> next token of each row's last one."""
        size = self.block_size
        spans = [range(len(tokens) - now, len(tokens)) for tokens, now, _, _ in rows]
        width = max(len(blocks) for _, _, blocks, _ in rows)
        tables = [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks, _ in rows]
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, *(len(span) for span in spans)], dtype=torch.int32).cumsum(0),
            seq_lens=torch.tensor([len(tokens) for tokens, *_ in rows], dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(
                [b[p // size] * size + p % size for (_, _, b, _), span in zip(rows, spans, strict=True) for p in span]
            ),
            prompt_lens=torch.tensor([prompt_len for *_, prompt_len in rows]),
            query_lens_list=[len(span) for span in spans],
            seq_lens_list=[len(tokens) for tokens, *_ in rows],
            block_size=size,
        )
        ids = torch.tensor([tokens[p] for (tokens, *_), span in zip(rows, spans, strict=True) for p in span])
        positions = torch.tensor([p for span in spans for p in span])
        backend = ReferenceAttention(
            AttentionRequest(self.model.attention_layers, torch.float32, size, torch.float32, Platform.detect("cpu"))
        )
        hidden = self.model.forward(ids, positions, AttentionStep(batch, backend, None, self.kv))
        logits = self.model.logits(hidden)
        assert logits.shape == (len(ids), 288)
        assert logits.dtype == torch.float32
        ends = torch.tensor([len(span) for span in spans]).cumsum(0) - 1
        return logits[ends].argmax(-1).tolist()


@pytest.mark.parametrize("kv_format", [PlainKV, BFloat16KV, Fp8KV, ByteKV])
def test_scripted_model_follows_its_scripts(kv_format):
    paged = Paged({(1, 2, 3): (270, 5), (1, 2): (9,)}, kv_format)
    hostile(paged.kv, range(8))
    assert paged.step(([1, 2, 3], 3, [6], 3), ([1, 2], 2, [1], 2)) == [270, 9]
    assert paged.step(([1, 2, 3, 270], 1, [6], 3), ([1, 2, 9], 1, [1], 2)) == [5, 257]
    assert paged.step(([1, 2, 3, 270, 5], 1, [6, 3], 3)) == [257]
    assert paged.step(([1, 2, 3, 270, 5, 257], 1, [6, 3], 3)) == [257]  # whoever ignores the end


def test_scripted_model_predicts_the_prompt_itself():
    paged = Paged({(1, 2, 3, 4, 5): (6,)})
    assert paged.step(([1, 2, 3], 3, [2], 5)) == [4]
    assert paged.step(([1, 2, 3, 4, 5], 2, [2, 7], 5)) == [6]


def test_scripted_model_sees_a_block_nobody_wrote():
    paged = Paged({(1, 2, 3, 4, 5): (6,)})
    hostile(paged.kv, range(8))
    paged.step(([1, 2, 3, 4], 4, [2], 5))
    with pytest.raises(AssertionError, match="position 0 of 5 was never written"):
        paged.step(([1, 2, 3, 4, 5], 1, [3, 7], 5))


def test_scripted_model_sees_another_requests_block():
    paged = Paged({(1, 2, 3, 4, 5): (6,), (1, 2, 3, 9, 8): (7,)})
    paged.step(([1, 2, 3, 9], 4, [2], 5))
    with pytest.raises(AssertionError, match="no script has a prompt of 5 tokens"):
        paged.step(([1, 2, 3, 4, 5], 1, [2, 7], 5))


def test_hostile_leaves_other_blocks_alone():
    kv = PagedKV(ByteKV(KVGeometry(2, 1, 16, 4, torch.float32)), [None, None], 4, "cpu")
    hostile(kv, [1, 3])
    hostile(kv, [])
    for layer in kv.layers:
        assert layer.key_scale.isnan().flatten(1).all(1).tolist() == [False, True, False, True]
        assert not layer.key.any()
