"""Perplexity of a model over a text, computed by the engine itself: paged memory, chunked prefill, the kernels that serve.

The text is tokenised once, without special tokens, and cut into windows of 1024 tokens that do not overlap; each gives the
negative log likelihood of its last 1023 tokens. Printed is exp(mean) over the first n windows: compare equal n only. K and V
are written to blocks before any token reads them, so what `--kv-cache-dtype` loses is lost here too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from octavo import LLM, OctavoError, SamplingParams


def perplexity(llm: LLM, text: str, num_windows: int, window: int = 1024) -> tuple[float, float]:
    """(perplexity, seconds) over the first `num_windows` windows of the text."""
    from rich.progress import track

    tokens = llm.tokenizer.encode_plain(text)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    total, count, start = 0.0, 0, time.monotonic()
    for i in track(range(num_windows), description="windows", disable=not sys.stderr.isatty()):
        part = tokens[i * window : (i + 1) * window]
        if len(part) < window:
            sys.exit(f"the text has only {len(tokens) // window} windows of {window} tokens")
        (output,) = llm.generate({"prompt_token_ids": part}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, found in zip(part[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            total -= found[token].logprob
            count += 1
    return math.exp(total / count), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("text", type=Path, help="file with the text, such as wikitext2-test.txt")
    parser.add_argument("-n", "--windows", type=int, default=12, help="windows to measure (12)")
    parser.add_argument("--quantization", help="format that the checkpoint must have")
    parser.add_argument("--linear-kernels", default="", help="kernels by layer pattern, as for octavo")
    parser.add_argument("--kv-cache-dtype", default="auto", help="how K and V are stored (auto)")
    parser.add_argument("--kv-cache-dtype-map", default="", help="how K and V of single layers are stored")
    parser.add_argument("--kv-scales", help="file of calibrated scales of K and V, or 'unit'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        llm = LLM(
            options.model,
            quantization=options.quantization,
            dtype="float32",
            linear_kernels=options.linear_kernels,
            kv_cache_dtype=options.kv_cache_dtype,
            kv_cache_dtype_map=options.kv_cache_dtype_map,
            kv_scales=options.kv_scales,
            max_model_len=2048,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
        )
        value, seconds = perplexity(llm, options.text.read_text(), options.windows)
    except OctavoError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return error.exit_code
    kernels = sorted({f"{r.kernel} ({r.spec})" for r in llm.engine.model_info.linears})
    plan = llm.engine.executor.runner.kv_plan
    kv = f"{plan.format}, {plan.bytes_per_token:,.0f} bytes a token"
    if options.json:
        print(
            json.dumps(
                {"perplexity": value, "windows": options.windows, "seconds": seconds, "kernels": kernels, "kv": kv}
            )
        )
    else:
        print(
            f"perplexity {value:.4f} over {options.windows} windows in {seconds:.0f} s; KV: {kv}; "
            f"kernels: {', '.join(kernels)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
