"""The machine as kernels see it. Plugins get a `Platform` when they are asked for kernels; nothing else probes hardware."""

from __future__ import annotations

import os
import platform as _platform
from dataclasses import dataclass
from pathlib import Path


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


def available_memory_bytes() -> int:
    """Bytes that this process may still allocate on the host: the least of free RAM and what its cgroup leaves."""
    candidates = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            candidates.append(max(int(limit) - int(usage), 0))
    if candidates:
        return min(candidates)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
