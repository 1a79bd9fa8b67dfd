"""The machine as kernels see it. Plugins get a `Platform` when they are asked for kernels; nothing else probes hardware."""

from __future__ import annotations

import os
import platform as _platform
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device, described without touching it.

    `isa` holds instruction set flags in the spelling of /proc/cpuinfo (`avx2`, `avx512_vnni`, `asimddp`); empty when unknown.
    """

    device: str  # "cpu" or "cuda"
    machine: str  # "x86_64", "aarch64", ...
    isa: frozenset[str]
    num_threads: int
    capability: tuple[int, int] | None = None  # CUDA compute capability
    supposed_bytes: int | None = None  # of memory, where the device is not here

    @classmethod
    def detect(cls, device: str = "auto") -> Platform:
        """Describes `device`: "cpu", "cuda", or "auto" (CUDA where torch sees one)."""
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if device != "cpu":
            import torch

            if torch.cuda.is_available():
                capability = torch.cuda.get_device_capability()
                return cls("cuda", _platform.machine(), _cpu_flags(), threads, capability)
            if device == "cuda":
                from octavo.errors import ConfigError

                raise ConfigError("--device cuda was given, but torch sees no CUDA device here")
        return cls("cpu", _platform.machine(), _cpu_flags(), threads)

    @classmethod
    def supposed(cls) -> Platform:
        """A GPU that is not here, as plans for one suppose it: compute capability 9.0 and 80 GiB, as an H100 has."""
        here = cls.detect("cpu")
        return cls("cuda", here.machine, here.isa, here.num_threads, (9, 0), 80 * 2**30)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _meminfo() -> dict[str, int]:
    """Bytes by name, of which only some systems tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def total_memory_bytes() -> int:
    """All RAM and swap of the host."""
    info = _meminfo()
    ram = info.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ram + info.get("SwapTotal", 0)


def available_memory_bytes() -> int:
    """Bytes that this process may still allocate on the host: the least of free RAM and what its cgroup leaves."""
    candidates = [_meminfo().get("MemAvailable") or total_memory_bytes()]
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = (_CGROUP / limit_file).read_text(), (_CGROUP / usage_file).read_text()
            stat = (_CGROUP / limit_file).with_name("memory.stat").read_text()
        except OSError:
            continue
        if limit.strip().isdigit() and int(limit) < 1 << 60:
            # usage counts pages of files read before, which the kernel takes back when memory runs short
            cached = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{cache} "))
            candidates.append(max(int(limit) - int(usage) + cached, 0))
    return min(candidates)
