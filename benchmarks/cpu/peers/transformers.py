"""transformers on torch, in this environment. Its best on a CPU without bf16 arithmetic is fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cpu import checkpoints
from benchmarks.cpu.peers.driven import DrivenPeer
from benchmarks.cpu.work import Case


class Transformers(DrivenPeer):
    driver = "run_transformers"
    module = "transformers"
    option = "--transformers-python"

    def __init__(self, dtype: str, python: str | None) -> None:
        super().__init__(python)
        self.name, self.dtype = f"transformers {dtype}", dtype

    def refuses(self, case: Case, job: str) -> str | None:
        if case.kind.name != "float16":
            return "computes float weights only"
        return "keeps no prefixes: a long context would be computed each time" if job.startswith("context") else None

    def prepare(self, case: Case) -> None:
        checkpoints.make(case.cache, case.shape, "float16")

    def model(self, case: Case) -> Path:
        return checkpoints.folder(case.cache, case.shape, "float16")

    def settings(self, case: Case, job: str) -> dict[str, Any]:
        return {"dtype": self.dtype}
