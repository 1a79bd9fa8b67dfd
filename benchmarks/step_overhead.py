"""What a decode step costs besides the forward: scheduling, tensors, sampling, detokenising, in milliseconds.

The model is replaced by one that returns ready logits, so all that is left is octavo's own work. `--profile` shows where it
goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.kv_format import AttentionStep
from octavo.engine.runner import Runner


class ReadyModel:
    """Hidden states and logits that cost nothing: distributions as steep as a language model's, another in each step."""

    def __init__(self, vocab_size: int, batch: int) -> None:
        shares = -1.3 * torch.log(torch.arange(1, vocab_size + 1, dtype=torch.float32))
        generator = torch.Generator().manual_seed(0)
        orders = (torch.randperm(vocab_size, generator=generator) for _ in range(batch + 8))
        self.rows = torch.stack([shares[order] for order in orders])

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        return positions[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        start = int(hidden[0, 0]) % 8
        return self.rows[start : start + len(hidden)]


def measure(llm: LLM, batch: int, steps: int, params: SamplingParams, profile: bool) -> float:
    """Median milliseconds of a step with `batch` running requests."""
    prompts: list[Any] = [[1, 2, 3, 4, 5, 6, 7, 8 + i] for i in range(batch)]
    stream = llm.stream(prompts, params)
    times, profiler = [], cProfile.Profile()
    for step in range(steps):
        start = perf_counter()
        if profile and step > 10:
            profiler.enable()
        for _ in range(batch):
            next(stream)
        profiler.disable()
        times.append(perf_counter() - start)
    stream.close()  # type: ignore[attr-defined]
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    return median(times[10:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model; only its tokenizer and shapes matter")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    llm = LLM(options.model, num_blocks_override=4096, enable_prefix_caching=True, disable_progress=True)
    executor: Any = llm.engine.executor
    runner: Runner = executor.runner
    model: Any = ReadyModel(llm.engine.model_info.vocab_size, max(options.batch))
    runner.model, runner.forward = model, model.forward
    figures = {}
    for name, params in {
        "greedy": SamplingParams(temperature=0, max_tokens=options.steps + 1, ignore_eos=True),
        "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=options.steps + 1, ignore_eos=True),
    }.items():
        for batch in options.batch:
            figures[f"{name} {batch}"] = measure(llm, batch, options.steps, params, options.profile)
    if options.json:
        print(json.dumps(figures))
        return
    for label, milliseconds in figures.items():
        print(f"{label:>12}: {milliseconds:6.3f} ms a step")


if __name__ == "__main__":
    main()
