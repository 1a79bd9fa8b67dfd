"""Where these kernels run: on a GPU of compute capability 8.0 or newer. Triton's interpreter is for tests alone."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from octavo import Platform

COMPUTE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """Whether Triton runs kernels in Python: TRITON_INTERPRET was set when it was imported."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def why_not(platform: Platform, dtype: torch.dtype) -> str | None:
    """None where the kernels run in this compute type, else a sentence."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install triton)"
    if dtype not in COMPUTE_TYPES:
        return f"computes in fp32, fp16 and bf16, not in {str(dtype).removeprefix('torch.')}"
    if platform.device != "cuda":
        return f"needs an NVIDIA GPU, this is a {platform.device} device"
    if platform.capability is not None and platform.capability < (8, 0):
        major, minor = platform.capability
        return f"needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
    return None


def multiprocessors(device: torch.device) -> int:
    """Of the GPU that tensors lie on; as many as an H100 has where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest that is not less than either: the sizes of Triton's tiles."""
    return max(least, 1 << (number - 1).bit_length())
