"""The demo model, end to end: greedy text equals Hugging Face's, however the work is cut up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "List three animals:\n1.",
    "In 1969, the first humans",
    "The quick brown fox",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which",
    "A short poem about rain:\n",
]


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[list[int]]:
    """Hugging Face's greedy tokens, one prompt at a time, end token included."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = LlamaForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
        outputs.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


def _engine(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), dtype="float32", **{"kv_cache_memory_bytes": "256MiB", "max_model_len": 256, **settings})


PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def test_one_by_one(demo_model: Path, expected: list[list[int]]) -> None:
    llm = _engine(demo_model)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        (output,) = llm.generate(prompt, PARAMS)
        assert output.outputs[0].token_ids == tokens
        assert output.prompt == prompt
        assert output.finished


def test_all_at_once(demo_model: Path, expected: list[list[int]]) -> None:
    outputs = _engine(demo_model).generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_in_chunks_of_seven_with_prefix_hits(demo_model: Path, expected: list[list[int]]) -> None:
    llm = _engine(demo_model, max_num_batched_tokens=7, max_num_seqs=4, block_size=4)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert any(o.num_cached_tokens > 0 for o in outputs)
    assert all(o.num_cached_tokens < len(o.prompt_token_ids) for o in outputs)


def test_in_a_pool_that_forces_preemption(demo_model: Path, expected: list[list[int]]) -> None:
    llm = _engine(demo_model, num_blocks_override=12, block_size=8)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    preemptions = llm.stats().scheduler.num_preemptions
    print(f"{preemptions} preemptions")
    assert preemptions > 0
    assert llm.stats().num_free_blocks == 12


def test_chat_answer(demo_model: Path) -> None:
    llm = _engine(demo_model)
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], PARAMS)
    assert output.outputs[0].text.startswith("The capital of France is Paris.")
    assert output.outputs[0].finish_reason == "stop"
