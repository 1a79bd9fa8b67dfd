"""`octavo bench latency`: how long one batch takes from prompts to last tokens."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from octavo import ConfigError, SamplingParams, add_engine_settings, engine_config
from octavo_bench.metrics import mean, percentile
from octavo_bench.progress import Bar

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `vllm bench latency`, and the engine's."""
    add_engine_settings(parser)
    for flag, default, text in (
        ("--input-len", 32, "Prompt tokens."),
        ("--output-len", 128, "Output tokens."),
        ("--batch-size", 8, "Prompts at once."),
        ("--n", 1, "Outputs for each prompt."),
        ("--num-iters-warmup", 10, "Rounds before the clock."),
        ("--num-iters", 30, "Rounds that are timed."),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the figures.")


def run(options: argparse.Namespace) -> int:
    """Measures and prints the average and percentiles, as vLLM does."""
    from octavo import LLM

    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    config = engine_config(options, enable_prefix_caching=False)  # rounds must not find each other's prompts
    random = Random(config.seed)
    temperature = 1.0 if options.n > 1 else 0.0
    params = SamplingParams(n=options.n, temperature=temperature, max_tokens=options.output_len, ignore_eos=True)
    seconds: list[float] = []
    with LLM(config) as llm:
        size = min(llm.engine.model_info.vocab_size, 10_000)
        ids = [
            {"prompt_token_ids": random.choices(range(size), k=options.input_len)} for _ in range(options.batch_size)
        ]
        rounds = max(options.num_iters_warmup, 0) + options.num_iters
        with Bar("rounds", rounds, not config.disable_progress and sys.stderr.isatty()) as bar:
            for _ in range(rounds):
                start = time.perf_counter()
                answers = llm.generate(ids, params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
                if failed := [o for a in answers for o in a.outputs if o.finish_reason == "error"]:
                    raise ConfigError(f"an output failed: {failed[0].stop_reason}")
                bar.advance(options.batch_size * options.n * options.output_len)
    print_seconds(seconds[-options.num_iters :], "latency")
    if options.output_json:
        found = seconds[-options.num_iters :]
        figures = {"avg_latency": mean(found), "latencies": found, "percentiles": percentiles(found)}
        Path(options.output_json).write_text(json.dumps(figures, indent=4), encoding="utf-8")
    return 0


def percentiles(seconds: Sequence[float]) -> Mapping[str, float]:
    """By percentage, as JSON wants its keys."""
    return {str(p): percentile(seconds, p) for p in PERCENTAGES}


def print_seconds(seconds: Sequence[float], name: str) -> None:
    """The lines that vLLM prints."""
    print(f"Avg {name}: {mean(seconds)} seconds")
    for percent, value in percentiles(seconds).items():
        print(f"{percent}% percentile {name}: {value} seconds")
