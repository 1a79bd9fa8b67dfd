"""Every model family against Hugging Face: tiny random models, over paged KV, however the tokens are cut into steps."""

import inspect
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from octavo.attention.backend import AttentionBatch, AttentionRequest
from octavo.attention.kv_format import AttentionStep, KVGeometry, PagedKV, PlainKV
from octavo.attention.reference import ReferenceAttention
from octavo.errors import CheckpointError, ConfigError
from octavo.model.architectures import ARCHITECTURES, RopeConfig, declared_dtype, decoder_config
from octavo.model.decoder import Decoder, DecoderLayer, SeparateLinears, attention_layers
from octavo.model.embedding import Embedding
from octavo.model.ops import TorchOps
from octavo.model.rope import RotaryEmbedding
from octavo.platforms import Platform
from octavo.quant.linear import DenseMethod, LinearRequest
from octavo.quant.weight import QuantizedWeight

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT_LENS, LENGTHS = (37, 18, 8), (45, 26, 9)


def llama(**settings):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**SIZES, **settings})


def rope(kind, max_positions=64, **parameters):
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **parameters}
    return llama(head_dim=32, max_position_embeddings=max_positions, rope_parameters=parameters)


def mistral(**settings):
    return transformers.MistralForCausalLM, transformers.MistralConfig(**{**SIZES, **settings})


def qwen2(**settings):
    return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**{**SIZES, **settings})


def qwen3(**settings):
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**{**SIZES, "head_dim": 24, **settings})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
CASES = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-head-dim": lambda: llama(head_dim=24),
    "llama-no-gqa": lambda: llama(num_key_value_heads=None),
    "llama-attention-bias": lambda: llama(attention_bias=True),
    "llama-mlp-bias": lambda: llama(mlp_bias=True),
    "llama-gelu": lambda: llama(hidden_act="gelu"),
    "llama-gelu-tanh": lambda: llama(hidden_act="gelu_pytorch_tanh"),
    "llama-eps": lambda: llama(rms_norm_eps=0.05),
    "llama-theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "rope-linear": lambda: rope("linear", factor=4.0),
    "rope-dynamic-under": lambda: rope("dynamic", factor=4.0),
    "rope-dynamic-over": lambda: rope("dynamic", 16, factor=2.5),
    "rope-dynamic-crossing": lambda: rope("dynamic", 40, factor=2.0),
    "rope-llama3": lambda: rope("llama3", **LLAMA3),
    "rope-yarn": lambda: rope("yarn", **YARN),
    "rope-yarn-ramp": lambda: rope("yarn", **YARN, beta_fast=4.0, beta_slow=0.5, truncate=False),
    "rope-yarn-attention-factor": lambda: rope("yarn", **YARN, attention_factor=0.7),
    "rope-yarn-mscale": lambda: rope("yarn", **YARN, mscale=1.5, mscale_all_dim=0.5),
    "rope-yarn-no-factor": lambda: rope("yarn", **{**YARN, "factor": None}),
    "mistral": lambda: mistral(sliding_window=None),
    "mistral-window": lambda: mistral(sliding_window=8, head_dim=24),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-windows": lambda: qwen2(**WINDOWS, max_window_layers=1),
    "qwen2-layer-types": lambda: qwen2(
        **WINDOWS, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3": lambda: qwen3(),
    "qwen3-windows-bias": lambda: qwen3(**WINDOWS, max_window_layers=0, attention_bias=True, tie_word_embeddings=True),
}


@cache
def hugging_face(case):
    """A model with random weights of which every one matters, biases and norms too; its config.json as it is saved."""
    kind, config = CASES[case]()
    config.architectures, config._attn_implementation, config.dtype = [kind.__name__], "eager", torch.float32
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3 if weight.dim() == 1 else 0.2, generator=generator)
    return model, json.loads(config.to_json_string())


@cache
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]


@cache
@torch.inference_mode()
def expected_logits(case):
    """Hugging Face's: the prompt in one step, then token by token over its cache."""
    results = []
    for tokens, prompt_len in zip(sequences(), PROMPT_LENS, strict=True):
        hugging_face.cache_clear()  # dynamic rotary embedding remembers the longest length seen
        model, _ = hugging_face(case)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        kv = transformers.DynamicCache(config=model.config)
        pieces = [tokens[:prompt_len], *tokens[prompt_len:].split(1)]
        results.append(torch.cat([model(piece[None], use_cache=True, **{name: kv}).logits[0] for piece in pieces]))
    return results


def linears(state, names, separate=False):
    """The linears of these names, fused into one method or side by side."""
    weights = [QuantizedWeight.from_float(state[f"{n}.weight"], state.get(f"{n}.bias")) for n in names]
    if not separate:
        weights = [weights[0].concat(weights[1:])]
    methods = []
    for w in weights:
        about = (w.spec, w.in_features, w.out_features, w.bias is not None, torch.float32, Platform.detect("cpu"))
        methods.append(DenseMethod(w, LinearRequest("|".join(names), *about)))
    return SeparateLinears(methods) if separate else methods[0]


def build(state, config, separate=False):
    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        module = DecoderLayer(
            config,
            index,
            TorchOps(),
            input_norm=state[f"{layer}input_layernorm.weight"],
            post_attention_norm=state[f"{layer}post_attention_layernorm.weight"],
            qkv=linears(state, [f"{attention}{p}_proj" for p in "qkv"], separate),
            o=linears(state, [f"{attention}o_proj"]),
            gate_up=linears(state, [f"{mlp}gate_proj", f"{mlp}up_proj"], separate),
            down=linears(state, [f"{mlp}down_proj"]),
            q_norm=state[f"{attention}q_norm.weight"] if config.qk_norm else None,
            k_norm=state[f"{attention}k_norm.weight"] if config.qk_norm else None,
            activation_scale=state.get(f"{mlp}act_fn.scales"),
        )
        layers.append(module)
    embedding = Embedding(QuantizedWeight.from_float(state["model.embed_tokens.weight"]), torch.float32)
    head = linears(state, ["model.embed_tokens" if config.tie_word_embeddings else "lm_head"])
    rotary = RotaryEmbedding(config.rope, max(LENGTHS))
    return Decoder(config, embedding, layers, state["model.norm.weight"], head, TorchOps(), rotary)


@torch.inference_mode()
def paged_logits(decoder, chunk, block_size):
    """Logits of all sequences, served together: prompts in steps of `chunk` tokens, then one token a step.

    Blocks are dealt at random, and what a step must not read is NaN.
    """
    config, tokens, shuffle = decoder.config, sequences(), torch.Generator().manual_seed(3)
    layers, platform = decoder.attention_layers, Platform.detect("cpu")
    needs = [-(-length // block_size) for length in LENGTHS]
    num_blocks = sum(needs) + 2
    geometry = KVGeometry(config.num_layers, config.kv_heads, config.head_dim, block_size, torch.float32)
    kv = PagedKV(PlainKV(geometry), layers, num_blocks, "cpu")
    for layer in kv.layers:
        for tensor in layer.tensors:
            tensor.fill_(float("nan"))
    blocks = torch.randperm(num_blocks, generator=shuffle, dtype=torch.int32).split([*needs, 2])
    tables = torch.randint(num_blocks, (len(needs), max(needs) + 1), generator=shuffle, dtype=torch.int32)
    for row, own in zip(tables, blocks, strict=False):
        row[: len(own)] = own
    backend = ReferenceAttention(AttentionRequest(layers, torch.float32, block_size, torch.float32, platform))
    done, results = [0] * len(tokens), [[] for _ in tokens]
    while active := [i for i, n in enumerate(done) if n < LENGTHS[i]]:
        counts = [min(chunk, PROMPT_LENS[i] - done[i]) if done[i] < PROMPT_LENS[i] else 1 for i in active]
        positions = [torch.arange(done[i], done[i] + count) for i, count in zip(active, counts, strict=True)]
        placed = zip(active, positions, strict=True)
        slots = [tables[i][p // block_size] * block_size + p % block_size for i, p in placed]
        seq_lens = [done[i] + count for i, count in zip(active, counts, strict=True)]
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=tables[active],
            slot_mapping=torch.cat(slots),
            prompt_lens=torch.tensor([PROMPT_LENS[i] for i in active], dtype=torch.int32),
            query_lens_list=counts,
            seq_lens_list=seq_lens,
            block_size=block_size,
        )
        step = AttentionStep(batch, backend, backend.plan(batch), kv)
        ids = torch.cat([tokens[i][p] for i, p in zip(active, positions, strict=True)])
        logits = decoder.logits(decoder(ids, torch.cat(positions), step))
        for i, part, seq_len in zip(active, logits.split(counts), seq_lens, strict=True):
            results[i].append(part)
            done[i] = seq_len
    return [torch.cat(parts) for parts in results]


def error(found, expected):
    """Largest difference, relative to the largest logit if that is above 1."""
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True)]
    return max(float((f - e).abs().max() / max(1.0, float(e.abs().max()))) for f, e in pairs)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk", [64, 7, 1])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face(case, chunk, block_size):
    expected = expected_logits(case)
    model, settings = hugging_face(case)
    config = decoder_config(settings, ARCHITECTURES)
    found = paged_logits(build(model.state_dict(), config), chunk, block_size)
    assert [f.dtype for f in found] == [torch.float32] * 3
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("llama-eps", {"rms_norm_eps": 1e-6}),
        ("llama-gelu-tanh", {"activation": "gelu"}),
        ("llama-theta", {"rope": RopeConfig(16)}),
        ("rope-dynamic-over", {"rope": RopeConfig(32, 5000.0, "dynamic", 64, {"factor": 2.5})}),
        ("rope-dynamic-crossing", {"rope": RopeConfig(32, 5000.0)}),
        *((f"rope-{kind}", {"rope": RopeConfig(32, 5000.0)}) for kind in ("linear", "llama3", "yarn", "yarn-ramp")),
        *((f"rope-yarn-{kind}", {"rope": RopeConfig(32, 5000.0, "yarn", 16, {"factor": 4.0})})
          for kind in ("ramp", "mscale", "attention-factor")),
        ("mistral-window", {"sliding_windows": (9, 9, 9)}),
        ("qwen2-windows", {"sliding_windows": (8, 8, 8)}),
    ],
)  # fmt: skip
def test_the_comparison_notices_a_wrong_setting(case, changed):
    model, settings = hugging_face(case)
    config = replace(decoder_config(settings, ARCHITECTURES), **changed)
    assert error(paged_logits(build(model.state_dict(), config), 64, 16), expected_logits(case)) > 1e-4


def old_spelling(settings, type_key):
    """config.json as transformers 4.x writes it."""
    old = {key: value for key, value in settings.items() if key not in ("rope_parameters", "dtype")}
    rope = {**settings["rope_parameters"]}
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": settings["dtype"], "rope_scaling": None}
    if (kind := rope.pop("rope_type")) != "default":
        old["rope_scaling"] = {type_key: kind, **rope}
    return old


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_mean_the_same(case):
    model, settings = hugging_face(case)
    config = decoder_config(settings, ARCHITECTURES)
    for type_key in ("type", "rope_type"):
        old = old_spelling(settings, type_key)
        assert "rope_parameters" not in old
        assert decoder_config(old, ARCHITECTURES) == config
        assert decoder_config({**settings, **old}, ARCHITECTURES) == config
        assert declared_dtype(old) == declared_dtype(settings) == "float32"
    names = {name.split(".")[-2] for name in model.state_dict() if name.endswith(".bias")}
    assert config.biases == names


def test_members_that_were_not_fused_compute_the_same():
    model, settings = hugging_face("qwen2")
    decoder = build(model.state_dict(), decoder_config(settings, ARCHITECTURES), separate=True)
    assert error(paged_logits(decoder, 64, 16), expected_logits("qwen2")) < 1e-5


def test_activation_scale_divides_the_input_of_down():
    model, settings = hugging_face("llama-gelu")
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith("down_proj.weight")]:
        scale = torch.rand(SIZES["intermediate_size"], generator=torch.Generator().manual_seed(4)) + 0.5
        state[name] = state[name] * scale
        state[name.replace("down_proj.weight", "act_fn.scales")] = scale
    decoder = build(state, decoder_config(settings, ARCHITECTURES))
    assert error(paged_logits(decoder, 64, 16), expected_logits("llama-gelu")) < 1e-5


def test_attention_layers_are_known_from_the_configuration():
    config = decoder_config(hugging_face("qwen2-layer-types")[1], ARCHITECTURES)
    layers = attention_layers(config)
    assert [(layer.index, layer.sliding_window) for layer in layers] == [(0, 8), (1, None), (2, 8)]
    assert {(layer.heads, layer.kv_heads, layer.head_dim, layer.scale) for layer in layers} == {(4, 2, 16, 0.25)}


# --- config.json

PLAIN = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **SIZES}
QWEN = {**PLAIN, "architectures": ["Qwen2ForCausalLM"]}


def read(settings):
    return decoder_config(settings, ARCHITECTURES)


def test_absent_keys_mean_what_they_mean_to_hugging_face():
    minimal = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = read({"model_type": "llama", **minimal})
    assert (config.kv_heads, config.head_dim, config.rms_norm_eps, config.activation) == (4, 16, 1e-6, "silu")
    assert (config.rope.theta, config.rope.kind, config.rope.rotary_dim) == (10000.0, "default", 16)
    assert not config.tie_word_embeddings
    assert read({"model_type": "mistral", **minimal}).sliding_windows == (4096,) * 3
    assert read({"model_type": "qwen2", **minimal, "use_sliding_window": True}).sliding_windows == (None,) * 3
    assert read({"model_type": "qwen3", **minimal}).head_dim == 128
    assert declared_dtype(minimal) is None
    assert declared_dtype({"torch_dtype": "torch.bfloat16"}) == "bfloat16"


def test_values_of_a_text_config_count():
    outer = {"architectures": ["LlamaForCausalLM"], "text_config": {**SIZES, "dtype": "float16"}}
    assert read(outer) == read({"architectures": ["LlamaForCausalLM"], **SIZES})
    assert declared_dtype(outer) == "float16"


def test_the_length_a_model_was_made_for_includes_stretching():
    assert read(PLAIN).max_positions == 64
    for kind, length in {"linear": 256, "dynamic": 256, "yarn": 64, "llama3": 64}.items():
        assert read({**PLAIN, "rope_scaling": {**LLAMA3, **YARN, "type": kind}}).max_positions == length


def test_only_dynamic_rotation_depends_on_the_prompt():
    needs = {case: read(hugging_face(case)[1]).rope.needs_prompt_lens for case in CASES if case.startswith("rope")}
    assert {case for case, needed in needs.items() if needed} == {case for case in needs if "dynamic" in case}


@pytest.mark.parametrize("key", [*(k for k in SIZES if k != "num_key_value_heads")])
def test_a_missing_size_is_named(key):
    with pytest.raises(CheckpointError, match=f"config.json lacks '{key}'"):
        read({k: v for k, v in PLAIN.items() if k != key})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**PLAIN, "num_key_value_heads": 3}, "num_key_value_heads.*\n.*\n.*divisor of the 4"),
        ({**PLAIN, "hidden_size": 66}, "hidden_size.*\n.*\n.*multiple of the 4"),
        ({**PLAIN, "head_dim": 15}, "head_dim.*\n.*\n.*even"),
        ({**PLAIN, "vocab_size": "128"}, "vocab_size.*\n.*\n.*whole number.*\n.*'128'"),
        ({**PLAIN, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**PLAIN, "rms_norm_eps": 0}, "rms_norm_eps.*\n.*\n.*above 0"),
        ({**PLAIN, "rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({**PLAIN, "tie_word_embeddings": "yes"}, "tie_word_embeddings.*\n.*\n.*true or false"),
        ({**PLAIN, "hidden_act": "relu"}, "hidden_act.*\n.*\n.*silu, .*\n.*'relu'"),
        ({**PLAIN, "partial_rotary_factor": 0.5}, "partial_rotary_factor.*\n.*\n.*whole"),
        ({**PLAIN, "rope_theta": -1}, "rope_theta"),
        ({**PLAIN, "rope_scaling": {"type": "longrope"}}, "rope_type.*\n.*\n.*yarn.*\n.*'longrope'"),
        ({**PLAIN, "rope_scaling": {"type": "linear"}}, "lacks 'factor' .*'linear'"),
        ({**PLAIN, "rope_scaling": {"type": "linear", "factor": 0}}, "'factor'"),
        ({**PLAIN, "rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_scaling.type is linear, but rope_s"),
        ({**PLAIN, "rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "more than low_freq_factor"),
        ({**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "original_max_position_embeddings": 0}}, "original_max"),
        ({**PLAIN, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of parameters for all"),
        ({**PLAIN, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta is 1000000"),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types.*\n.*\n.*each of 3"),
        ({**QWEN, "layer_types": ["sliding_attention"] * 3}, "layer_types.*\n.*\n.*windows are off"),
        ({**PLAIN, "architectures": []}, "does not say which architecture"),
        ({**PLAIN, "architectures": None, "model_type": "gpt2"}, "does not say which architecture.*\n.*\n.*LlamaForC"),
        (
            {**PLAIN, "architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*\n.*\n.*Qwen3ForCausalLM\n.*plugin.*octavo_architectures",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        read(settings)


def test_contradicting_types_are_reported_and_unknown_ones_refused(caplog):
    assert declared_dtype({"torch_dtype": "float16", "dtype": "bfloat16"}) == "bfloat16"
    assert "dtype is bfloat16, but torch_dtype is float16" in caplog.text
    with pytest.raises(CheckpointError, match="float64"):
        declared_dtype({"dtype": "float64"})


def test_rotary_parameters_that_a_kind_does_not_use_are_reported(caplog):
    read({**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "finetuned": True}})
    assert "'yarn' does not use finetuned" in caplog.text


def test_an_unknown_kind_of_rotary_embedding_is_refused():
    with pytest.raises(ConfigError, match="'spiral'; there are: default, linear, llama3, yarn, dynamic"):
        RotaryEmbedding(RopeConfig(16, kind="spiral"), 8)
