"""Where these kernels run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo import Platform

_LEAST = (8, 0)


def why_not(platform: Platform, least: tuple[int, int] = _LEAST) -> str | None:
    """Why these kernels cannot serve a device, or None. `least` is the compute capability that they need."""
    if platform.device != "cuda":
        return f"needs an NVIDIA GPU, this is a {platform.device} device"
    if find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install triton)"
    if platform.capability is not None and platform.capability < least:
        have, need = (".".join(map(str, c)) for c in (platform.capability, least))
        return f"needs compute capability {need} or newer, this GPU has {have}"
    return None
