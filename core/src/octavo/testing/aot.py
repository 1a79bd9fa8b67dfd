"""Triton kernels compiled ahead of time for GPUs that are not here: what a plugin's host code would launch, and what it costs.

A file of cases (`aot_cases.py` beside a plugin's tests) has a function `cases()` that returns callables by name. Each gets the
`Platform` of a GPU and runs the plugin's own host code on CPU tensors. Kernels are compiled as on that GPU, checked against its
limits by Triton itself, and not launched: results are whatever lay in memory. So nothing may depend on them.

`compiled_kernels(file)` is for tests, `python -m octavo.testing.aot FILE...` prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from octavo.platforms import Platform

SHARED_MEMORY = {(7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448}
"""Bytes that a block may use, by compute capability. Source: CUDA C programming guide, technical specifications."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel as one case launches it. `stack_bytes` are those of a thread in local memory: registers spilt, mostly."""

    case: str
    name: str
    capability: tuple[int, int]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        """How often an instruction is in the PTX, by the start of its name: "mma.sync", "wgmma.mma_async", "cp.async"."""
        return len(re.findall(rf"^\s*(?:@!?%\w+\s+)?{re.escape(instruction)}\b", self.ptx, re.MULTILINE))

    @property
    def tensor_core_instructions(self) -> int:
        return self.count("mma.sync") + self.count("wgmma.mma_async")


def gpu(capability: tuple[int, int]) -> Platform:
    """A machine with such a GPU, as plugins see it."""
    return Platform("cuda", "x86_64", frozenset(), num_threads=1, capability=capability)


def why_no_compiler() -> str | None:
    """None if kernels can be compiled in this process's Python, else a sentence."""
    try:
        from triton.backends import backends
    except ImportError:
        return "needs Triton (pip install triton)"
    return None if "nvidia" in backends else "needs a Triton with the NVIDIA backend"


def compiled_kernels(
    path: Path, capabilities: Sequence[tuple[int, int]] = ((8, 0), (9, 0)), only: str = ""
) -> list[CompiledKernel]:
    """What the cases of a file launch, those whose names contain `only`. Works in a child: this process may interpret kernels.

    Raises RuntimeError with the child's last words where a kernel does not compile or exceeds a limit.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.json"
        targets = [f"--sm={major}{minor}" for major, minor in capabilities]
        command = [sys.executable, "-m", "octavo.testing.aot", str(path), *targets, f"--only={only}", f"--json={out}"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{path.name} does not compile:\n{run.stdout}\n{run.stderr}")
        rows: list[Any] = json.loads(out.read_text())
    return [CompiledKernel(**row | {name: tuple(row[name]) for name in ("capability", "grid")}) for row in rows]


@contextmanager
def compiling(capability: tuple[int, int], case: str = "") -> Iterator[list[CompiledKernel]]:
    """Makes this process compile kernels for a GPU where it would launch them, and fills the list that it gives.

    Not where TRITON_INTERPRET is set: kernels are interpreted then.
    """
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted here, not compiled; see compiled_kernels")
    found: list[CompiledKernel] = []
    before = driver._active
    knobs.runtime.kernel_load_end_hook.add(_keep_files)
    driver.set_active(_Driver(capability, case, found))
    try:
        yield found
    finally:
        driver._active = before
        knobs.runtime.kernel_load_end_hook.remove(_keep_files)


class _Loaded:
    """Stands for a kernel in a GPU's memory."""

    def __init__(self, cubin: bytes) -> None:
        self.cubin = cubin
        self.files: dict[str, Path] = {}

    def describe(self, case: str, capability: tuple[int, int], grid: tuple[int, ...]) -> CompiledKernel:
        metadata = json.loads(self.files["json"].read_text())
        registers, stack = _resources(self.cubin)
        warps, stages, shared = (int(metadata[name]) for name in ("num_warps", "num_stages", "shared"))
        name, ptx = metadata["name"], self.files["ptx"].read_text()
        return CompiledKernel(case, name, capability, grid, warps, stages, registers, stack, shared, ptx)


def _keep_files(module: Any, loaded: _Loaded, name: str, files: dict[str, str], hash: str) -> None:
    """What the compiler left behind, by suffix, as Triton tells it once a kernel is loaded."""
    loaded.files = {Path(file).suffix[1:]: Path(file) for file in files.values()}


class _Driver:
    """What Triton asks of a GPU's driver, answered from tables. Each chip is a device of its own number."""

    def __init__(self, capability: tuple[int, int], case: str, found: list[CompiledKernel]) -> None:
        from triton.backends.compiler import GPUTarget

        self._capability, self._case, self._found = capability, case, found
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        self.utils = SimpleNamespace(
            load_binary=lambda name, cubin, shared, device: (None, _Loaded(cubin), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return _launch

    def note(self, grid: tuple[int, ...], loaded: _Loaded) -> None:
        self._found.append(loaded.describe(self._case, self._capability, grid))


def _launch(x: int, y: int, z: int, stream: int, loaded: _Loaded, *rest: Any) -> None:
    """Called where a kernel would be launched."""
    from triton.runtime import driver

    driver.active.note((x, y, z), loaded)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as the assembler wrote them down."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _compile_file(path: Path, capabilities: Sequence[tuple[int, int]], only: str) -> list[CompiledKernel]:
    """Each kernel of each case once, though it is launched often."""
    cases = runpy.run_path(str(path))["cases"]()
    kernels: dict[tuple[str, tuple[int, int], str], CompiledKernel] = {}
    for capability in capabilities:
        for case, run in cases.items():
            if only in case:
                print(f"sm_{capability[0]}{capability[1]}: {case}", file=sys.stderr, flush=True)
                with compiling(capability, case) as found:
                    run(gpu(capability))
                kernels |= {(kernel.case, kernel.capability, kernel.ptx): kernel for kernel in found}
    return list(kernels.values())


def table(kernels: Sequence[CompiledKernel]) -> str:
    """A line for each kernel: warps, registers, local and shared memory, instructions of tensor cores, asynchronous copies."""
    head = ("case", "kernel", "chip", "warps", "stages", "regs", "stack", "shared", "mma", "wgmma", "copies")
    rows = [
        (
            k.case,
            k.name,
            f"sm_{k.capability[0]}{k.capability[1]}",
            *(k.num_warps, k.num_stages, k.registers, k.stack_bytes, k.shared_bytes),
            *(k.count("mma.sync"), k.count("wgmma.mma_async"), k.count("cp.async")),
        )
        for k in kernels
    ]
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = 3  # columns of text
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of the kernels that files of cases launch."""
    parser = argparse.ArgumentParser(prog="python -m octavo.testing.aot", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--sm", action="append", type=int, help="a chip: 80, 86, 89, 90; may be repeated (80 and 90)")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--json", type=Path, help="write what was found to this file, and print nothing")
    options = parser.parse_args(arguments)
    if (reason := why_no_compiler()) is not None:
        print(reason)
        return 0
    capabilities = [divmod(sm, 10) for sm in options.sm or (80, 90)]
    kernels = [kernel for file in options.files for kernel in _compile_file(file, capabilities, options.only)]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels]))
    else:
        print(table(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
