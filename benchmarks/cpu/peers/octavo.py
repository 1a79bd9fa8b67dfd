"""octavo itself: which checkpoint and settings each kind of weights means."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cpu import checkpoints, gguf_files
from benchmarks.cpu.peers.driven import DrivenPeer
from benchmarks.cpu.work import JOBS, Case

CHECKPOINTS = {"int4": "gptq", "int4-float": "gptq", "int8": "w8a8", "float16": "float16"}
HEAD = {"quantize_weights": {"lm_head": "int8"}}
"""These checkpoints leave the head in 16 bits, where the peers' files of the same kind have 8."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "int4": {**HEAD, "cpu_activations": "int8"},
    "int4-float": {**HEAD, "cpu_activations": "float"},
    "gguf": {"cpu_activations": "int8"},
    "int8": HEAD,
    "float16": {},
}
KV = {"context kv8": "fp8"}


class Octavo(DrivenPeer):
    name = "octavo"
    driver = "run_octavo"
    module = "octavo"
    option = "--octavo-python"

    def __init__(self, settings: Mapping[str, Any], four_bit: str, python: str | None = sys.executable) -> None:
        super().__init__(python)
        self._settings, self._four_bit = settings, four_bit

    def prepare(self, case: Case) -> None:
        if case.kind.name == "gguf":
            gguf_files.make(case.cache, case.shape, "Q4_0")
        else:
            checkpoints.make(case.cache, case.shape, self._checkpoint(case))

    def model(self, case: Case) -> Path:
        if case.kind.name == "gguf":
            return gguf_files.path(case.cache, case.shape, "Q4_0")
        return checkpoints.folder(case.cache, case.shape, self._checkpoint(case))

    def settings(self, case: Case, job: str) -> dict[str, Any]:
        sizes = case.sizes
        longest = {"single": max(sizes.prefill, sizes.prompt + sizes.decode), "batch": sizes.prompt + sizes.decode}
        tokens = longest.get(job, sizes.context + sizes.context_decode) + 1
        sequences = int(JOBS[job][-1].rpartition(" ")[2]) if job == "batch" else 1
        return {
            "max_model_len": tokens,
            "max_num_seqs": max(sequences, 1),
            "num_blocks_override": sequences * (-(-tokens // 16) + 1) + 1,
            "kv_cache_dtype": KV.get(job, "float16"),
            "enable_prefix_caching": job.startswith("context"),
            **SETTINGS[case.kind.name],
            **self._settings,
        }

    def _checkpoint(self, case: Case) -> str:
        name = CHECKPOINTS[case.kind.name]
        return self._four_bit if name == "gptq" else name
