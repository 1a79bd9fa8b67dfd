"""The door to the native module: whether it is there, on which threads it runs, and the memory that it computes in."""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo import Platform

logger = logging.getLogger(__name__)

STORAGE = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
"""Types as csrc/kernels.h numbers them."""
_HUGE_PAGE = 2 << 20


@cache
def _load() -> tuple[Any, str | None]:
    try:
        module = import_module("octavo_cpu._native")
        module.set_threads(*_threads())
        module.isa()
    except (ImportError, ValueError) as error:
        reason = f"the native module of octavo-cpu cannot be used: {error}"
        logger.warning("%s. Slower kernels take its place", reason)
        return None, reason
    return module, None


def native() -> Any:
    """The native module, on the threads that this process may use."""
    return _load()[0]


def why_not(platform: Platform, dtype: torch.dtype = torch.float32) -> str | None:
    """Why these kernels cannot serve a device and compute type, or None."""
    if platform.device != "cpu":
        return "is for CPUs"
    if dtype != torch.float32:
        return f"computes in float32, not in {str(dtype).removeprefix('torch.')}"
    return _load()[1]


def _threads() -> tuple[int, list[int]]:
    """How many threads, and their processors, one a core: OCTAVO_CPU_THREADS, OMP_NUM_THREADS, or what is there."""
    cores = _physical_cores()
    for variable in ("OCTAVO_CPU_THREADS", "OMP_NUM_THREADS"):
        if value := os.environ.get(variable):
            try:
                count = int(value.split(",")[0])
            except ValueError:
                count = 0
            if count < 1:
                raise ValueError(f"{variable} is '{value}', expected a number of threads")
            return count, cores[:count] if count <= len(cores) else []
    count = min(len(cores), _quota())
    return count, cores[:count]


def _physical_cores() -> list[int]:
    """The processors that this process may run on, one of each core's hardware threads."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            found.setdefault(path.read_text(), cpu)
        except OSError:
            found[str(cpu)] = cpu
    return list(found.values())


def _quota() -> int:
    """Whole processors' worth of time that the cgroup grants; many if it says nothing."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError):
        return 1 << 16


def lasting(num_bytes: int) -> Tensor:
    """Bytes for weights: zeros, aligned to pages, large ones on huge pages where the system has them to spare."""
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(max(num_bytes, 1), dtype=torch.uint8)
    memory = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


_here = local()


@contextmanager
def recording(allocate: Callable[[int], Tensor]) -> Iterator[None]:
    """While inside, results of this thread's kernels lie in what `allocate(columns)` returns: (most rows, columns)."""
    _here.allocate = allocate
    try:
        yield
    finally:
        del _here.allocate


def result(rows: int, *shape: int) -> Tensor:
    """Uninitialised fp32 memory (rows, *shape) for what a kernel computes."""
    allocate = getattr(_here, "allocate", None)
    if allocate is None:
        return torch.empty(rows, *shape)
    whole: Tensor = allocate(math.prod(shape))[:rows]
    return whole if len(shape) == 1 else whole.view(rows, *shape)


def rows_of(x: Tensor) -> Tensor:
    """x itself where each row lies in one piece, else a copy."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            return x.contiguous()
        inner *= size
    return x
