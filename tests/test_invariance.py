"""What a request gets depends on nothing but itself: not a bit of a logit on how the work is cut up, shared or interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support import VOCAB_SIZE, make_hostile, registry

from octavo import LLM, SamplingParams
from octavo.engine.request import Request
from octavo.engine.sampler import SampledRows
from octavo.model.ops import TorchOps
from octavo.model.rope import _power
from octavo.product import row_product
from octavo.testing import tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPANS = ((0, 1), (5, 6), (1, 3), (3, 10), (7, 71), (0, 128), (1, 300))
PROMPTS = [
    [(7 * i + 31 * n + i * i * (n + 1)) % 250 for i in range(length)] for n, length in enumerate((70, 3, 40, 1, 17))
]
PROMPTS.append([*PROMPTS[0][:48], 9, 8, 7])  # begins as the first
MODELS = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "biases": ("Qwen2ForCausalLM", {}, {}),
    "norms of heads": ("Qwen3ForCausalLM", {}, {}),
    "odd sizes": ("LlamaForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}, {}),
    "window": ("MistralForCausalLM", {"sliding_window": 20}, {}),
    "gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}, {}),
    "stretched": (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
        {"enable_prefix_caching": False},
    ),
    "int4": ("LlamaForCausalLM", {}, {"quantize_weights": "int4"}),
    "int8": ("Qwen2ForCausalLM", {}, {"quantize_weights": "int8,lm_head=int8"}),
    "bf16": ("Qwen2ForCausalLM", {}, {"dtype": "bfloat16"}),
}


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# --- the operations


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 96), (97, 33), (264, 7), (320, 48), (1536, 96), (2, 5), (1, 1), (33, 130)]
)
def test_product(threads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x, weight, bias = (
        torch.randn(s, generator=generator).to(dtype) for s in ((300, inputs), (outputs, inputs), (outputs,))
    )
    for form in (weight.t(), weight.t().contiguous()):
        for shift in (None, bias):
            whole = row_product(x, form, shift)
            torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, shift), atol=1e-3, rtol=2e-2)
            for first, end in SPANS:
                assert torch.equal(row_product(x[first:end], form, shift), whole[first:end])


def test_product_of_several_matrices(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((3, 300, 64), (3, 64, 128)))
    whole = row_product(x, weight)
    torch.testing.assert_close(whole, x @ weight)
    for first, end in SPANS:
        assert torch.equal(row_product(x[:, first:end], weight), whole[:, first:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 97, 576, 4097])
def test_elementwise_operations(threads: int, size: int, dtype: torch.dtype) -> None:
    ops, generator = TorchOps(), torch.Generator().manual_seed(size)
    x, gates = (3 * torch.randn(300, n * size, generator=generator).to(dtype) for n in (1, 2))
    weight = torch.randn(size, generator=generator).to(dtype)
    functions = {name: lambda part, name=name: ops.gated(gates[part], name) for name in ("silu", "gelu", "gelu_tanh")}
    functions["rms_norm"] = lambda part: ops.rms_norm(x[part], weight, 1e-6)
    functions["power"] = lambda part: _power(x[part].float().abs() + 1, torch.tensor(1.03))
    functions["log_softmax"] = lambda part: torch.log_softmax(x[part].float(), -1)
    for name, function in functions.items():
        whole = function(slice(None))
        for first, end in SPANS:
            assert torch.equal(function(slice(first, end)), whole[first:end]), name


@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gates_are_torchs_own(name: str, approximate: str) -> None:
    x = torch.linspace(-12, 12, 10_001)
    gates = torch.cat([x, torch.ones_like(x)]).view(1, -1)
    expected = torch.nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(TorchOps().gated(gates, name)[0], expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(TorchOps().gated(gates, "silu")[0], torch.nn.functional.silu(x), atol=1e-6, rtol=1e-6)


# --- the engine


class Watched:
    """An engine that keeps, for each prompt, the logits of every token that was sampled after it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        defaults = {"num_blocks_override": 64, "max_num_seqs": 8, "disable_progress": True}
        self.llm = make_hostile(LLM(str(folder), registry=registry(), **{**defaults, **settings}))
        self.logits: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        sampler = self.llm.engine.executor.runner.sampler
        sample = sampler.sample

        def watched(logits: torch.Tensor, requests: Sequence[Request]) -> SampledRows:
            for row, request in zip(logits, requests, strict=True):
                key = (tuple(request.token_ids), 0)
                known = self.logits.setdefault(key, row.clone())
                assert torch.equal(known, row), "the same tokens gave other logits in the same engine"
            return sample(logits, requests)

        sampler.sample = watched

    def run(
        self, prompts: Sequence[Sequence[int]], **params: object
    ) -> dict[tuple[tuple[int, ...], int], torch.Tensor]:
        asked = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params})
        self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)
        return self.logits


def same(found: dict, expected: dict) -> bool:
    """Whether all logits are there and equal to the bit."""
    assert found.keys() == expected.keys()
    return all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_how_the_work_is_cut(name: str, tmp_path: Path) -> None:
    architecture, config, settings = MODELS[name]
    folder = tiny_model(tmp_path, architecture, **config)
    prompts = [prompt[:25] for prompt in PROMPTS] if name == "stretched" else PROMPTS
    alone = Watched(folder, **{**settings, "enable_prefix_caching": False})
    for prompt in prompts:
        alone.run([prompt])
    expected = alone.logits
    assert len(expected) > 100
    assert next(iter(expected.values())).shape == (VOCAB_SIZE,)
    assert same(Watched(folder, **settings).run(prompts), expected), "in a batch"
    for chunk in (1, 3, 7, 64):
        chunked = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 6)}
        assert same(Watched(folder, **settings, **chunked).run(prompts), expected), f"in chunks of {chunk}"
    for size in (1, 5, 32):
        blocks = {"block_size": size, "num_blocks_override": 640 // size}
        assert same(Watched(folder, **settings, **blocks).run(prompts), expected), f"in blocks of {size}"
    again = Watched(folder, **settings)
    again.run(prompts)
    assert same(again.run(prompts), expected), "with prefix hits"
    assert again.llm.stats().scheduler.prefix_hits > 0 or name == "stretched"
    for mode in ("recompute", "swap"):
        most = max(map(len, prompts)) + 24
        tight = {"block_size": 4, "num_blocks_override": most // 4 + 1, "preemption_mode": mode, "swap_space": "2MiB"}
        watched = Watched(folder, **settings, **tight)
        assert same(watched.run(prompts), expected), f"after preemption ({mode})"
        assert watched.llm.stats().scheduler.num_preemptions > 0
        assert (watched.llm.stats().scheduler.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("blocks", [64, 9])
def test_forks_do_not_depend_on_one_another(blocks: int, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
    forked = Watched(folder, num_blocks_override=blocks).run(PROMPTS[:3], n=4, **params)
    alone = Watched(folder, enable_prefix_caching=False)
    for tokens, _ in forked:  # each history as a prompt of its own, one token on
        alone.run([tokens], max_tokens=1)
    assert len(forked) > 150
    assert same(forked, alone.logits)


def test_threads_do_not_break_it(threads: int, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, intermediate_size=1536)
    alone = Watched(folder, enable_prefix_caching=False)
    for prompt in PROMPTS:
        alone.run([prompt])
    assert same(Watched(folder, max_num_batched_tokens=50).run(PROMPTS), alone.logits)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"quantize_weights": "int8"}], ids=["float", "int8"])
def test_smollm2(settings: dict[str, object], demo_model: Path) -> None:
    settings = {**settings, "max_model_len": 256, "dtype": "float32"}
    short = {"max_tokens": 8}
    alone = Watched(demo_model, **settings, enable_prefix_caching=False)
    for prompt in PROMPTS:
        alone.run([prompt], **short)
    assert same(Watched(demo_model, **settings).run(PROMPTS, **short), alone.logits), "in a batch"
    chunked = Watched(demo_model, **settings, max_num_batched_tokens=7, max_num_seqs=5, block_size=4)
    assert same(chunked.run(PROMPTS, **short), alone.logits), "in chunks"
    tight = Watched(demo_model, **settings, num_blocks_override=6, preemption_mode="swap", swap_space="64MiB")
    assert same(tight.run(PROMPTS, **short), alone.logits), "after preemption"
