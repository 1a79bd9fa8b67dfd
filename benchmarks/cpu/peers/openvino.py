"""OpenVINO GenAI, over models that optimum exports from the float checkpoint into the same cache."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.cpu import checkpoints
from benchmarks.cpu.peers.driven import DrivenPeer
from benchmarks.cpu.work import Case

WEIGHTS = {"int4": "int4", "int8": "int8", "float16": "fp16"}


class OpenVino(DrivenPeer):
    name = "openvino"
    driver = "run_openvino"
    module = "openvino-genai"
    option = "--openvino-python"

    def refuses(self, case: Case, job: str) -> str | None:
        if case.kind.name not in WEIGHTS:
            return "quantises activations itself" if case.kind.name == "int4-float" else "not compared with GGUF"
        return None

    def prepare(self, case: Case) -> None:
        place = self.model(case)
        if not place.exists():
            checkpoints.make(case.cache, case.shape, "float16")
            checkpoints.written(place, lambda partial: self._export(case, partial))

    def model(self, case: Case) -> Path:
        return checkpoints.folder(case.cache, case.shape, f"openvino-{WEIGHTS[case.kind.name]}")

    def settings(self, case: Case, job: str) -> dict[str, Any]:
        return {"KV_CACHE_PRECISION": "f16"} if job == "context kv16" else {}

    def _export(self, case: Case, place: Path) -> None:
        assert self.python is not None
        source = checkpoints.folder(case.cache, case.shape, "float16")
        weights = WEIGHTS[case.kind.name]
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        if weights == "int4":
            options += ["--group-size", str(case.shape.group_size), "--ratio", "1.0", "--sym"]
        tool = str(Path(self.python).with_name("optimum-cli"))
        subprocess.run([tool, "export", "openvino", "--model", str(source), *options, str(place)], check=True)
