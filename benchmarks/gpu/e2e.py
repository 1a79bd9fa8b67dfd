"""Tokens a second of a whole engine: a model of 7B's shape with random weights in 4 bits."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import models
from frame import Context

from octavo import LLM, SamplingParams


def run(context: Context) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(Path(folder) / "7B", "7B", quantised=True)
        settings = {"max_num_seqs": 64, "max_model_len": 4096, "max_num_batched_tokens": 4096, "disable_progress": True}
        with LLM(str(path), device="cuda", dtype="bfloat16", **settings) as llm:
            kernels = ", ".join(sorted({report.kernel for report in llm.engine.model_info.linears}))
            _serve(llm, 1, 16, 8)  # compiles
            for requests, prompt, output in ((1, 512, 128), (64, 512, 128))[context.quick :]:
                seconds = _serve(llm, requests, prompt, output)
                rows.append(
                    {
                        "what": f"7B int4, {requests} x ({prompt} + {output})",
                        "kernels": f"{kernels}; {llm.engine.model_info.attention}",
                        "output tokens/s": requests * output / seconds,
                        "all tokens/s": requests * (prompt + output) / seconds,
                    }
                )
    return rows


def _serve(llm: LLM, requests: int, prompt: int, output: int) -> float:
    """Seconds for so many prompts at once, all different."""
    prompts = [[(7 * i + j) % 250 for j in range(prompt)] for i in range(requests)]
    start = time.monotonic()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), use_tqdm=False)
    return time.monotonic() - start
