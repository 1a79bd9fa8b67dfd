"""`octavo bench throughput`: an engine in this process with all prompts at once; Hugging Face as the peer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from octavo import ConfigError, EngineConfig, SamplingParams, add_engine_settings, engine_config
from octavo_bench import datasets
from octavo_bench.datasets import Sample
from octavo_bench.progress import Bar
from octavo_bench.tokens import Tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `vllm bench throughput`, and the engine's."""
    add_engine_settings(parser)
    datasets.add_arguments(parser)
    parser.add_argument("--backend", choices=["octavo", "hf"], default="octavo", help="What runs. Default: octavo.")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="Outputs for each prompt. Default: 1.")
    parser.add_argument(
        "--hf-max-batch-size", type=int, default=8, metavar="N", help="hf: prompts in a batch. Default: 8."
    )
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures.")


def run(options: argparse.Namespace) -> int:
    """Measures and prints one line, as vLLM does."""
    config = engine_config(options)
    if options.n < 1 or options.hf_max_batch_size < 1:
        raise ConfigError("--n and --hf-max-batch-size: expected 1 or more")
    samples = datasets.samples(options, Tokens(config.tokenizer or config.model))
    measure = _octavo if options.backend == "octavo" else _hugging_face
    elapsed, inputs, outputs = measure(config, samples, options)
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_num_tokens": inputs + outputs,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "requests_per_second": len(samples) / elapsed,
        "tokens_per_second": (inputs + outputs) / elapsed,
    }
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{outputs / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {inputs}\nTotal num output tokens:  {outputs}")
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(figures, indent=4), encoding="utf-8")
    return 0


def _octavo(config: EngineConfig, samples: Sequence[Sample], options: argparse.Namespace) -> tuple[float, int, int]:
    from octavo import LLM

    temperature = 1.0 if options.n > 1 else 0.0
    with LLM(config) as llm:
        params = [
            SamplingParams(n=options.n, temperature=temperature, max_tokens=s.output_tokens, ignore_eos=True)
            for s in samples
        ]
        start = time.perf_counter()
        answers = llm.generate([s.prompt for s in samples], params)
        elapsed = time.perf_counter() - start
    if failed := [o for a in answers for o in a.outputs if o.finish_reason == "error"]:
        raise ConfigError(f"{len(failed)} outputs failed: {failed[0].stop_reason}")
    outputs = sum(len(o.token_ids) for a in answers for o in a.outputs)
    return elapsed, sum(len(a.prompt_token_ids) for a in answers), outputs


def _hugging_face(
    config: EngineConfig, samples: Sequence[Sample], options: argparse.Namespace
) -> tuple[float, int, int]:
    """Batches in order, padded to their longest prompt and run to their longest output, which is what generate() does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if options.n != 1:
        raise ConfigError("--backend hf gives one output a prompt: leave --n out")
    dtype = (
        "auto"
        if config.dtype == "auto"
        else getattr(torch, {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype))
    )
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(
        config.tokenizer or config.model, local_files_only=True, padding_side="left"
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs, size = 0, options.hf_max_batch_size
    start = time.perf_counter()
    with (
        Bar("generating", len(samples), not config.disable_progress and sys.stderr.isatty()) as bar,
        torch.inference_mode(),
    ):
        for first in range(0, len(samples), size):
            batch = samples[first : first + size]
            encoded = tokenizer([s.prompt for s in batch], return_tensors="pt", padding=True)
            longest = max(s.output_tokens for s in batch)
            settings = GenerationConfig(
                do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=tokenizer.pad_token_id
            )
            model.generate(**encoded, generation_config=settings)
            inputs += int(encoded["attention_mask"].sum())
            for sample in batch:
                bar.advance(sample.output_tokens)
    return time.perf_counter() - start, inputs, sum(s.output_tokens for s in samples)
