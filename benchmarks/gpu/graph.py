"""What replaying a recorded step saves: seconds of a decode step of a 1B model, recorded and eager, and on the GPU alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import models
import torch
from frame import Context

from octavo import LLM


def run(context: Context) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(Path(folder) / "1B", "1B")
        sizes = (1, 16) if context.quick else (1, 4, 16, 64)
        with LLM(str(path), device="cuda", max_num_seqs=max(sizes), max_model_len=2048, disable_progress=True) as llm:
            runner = llm.engine.executor.runner  # type: ignore[attr-defined]
            for size in sizes:
                rows.append(_compare(context, runner, size))
    return rows


@torch.inference_mode()
def _compare(context: Context, runner: Any, size: int) -> dict[str, Any]:
    """Steps of `size` first tokens. The time between launches is what an eager step takes beyond the sum of its kernels."""
    arguments = runner._first_tokens(size)
    eager, replayed = runner.model.forward, runner.forward
    same = torch.equal(eager(*arguments), replayed(*arguments))
    seconds = {
        "eager": context.measure(lambda: eager(*arguments)),
        "replayed": context.measure(lambda: replayed(*arguments)),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        eager(*arguments)
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    gaps = {name: taken - kernels for name, taken in seconds.items()}
    return {
        "what": f"1B, {size} requests",
        "right": same,
        "recorded": getattr(replayed, "reason", "no graphs here") is None,
        **{f"{name} ms": taken * 1e3 for name, taken in seconds.items()},
        "kernels ms": kernels * 1e3,
        "gaps removed": 1 - gaps["replayed"] / gaps["eager"],
    }
