"""Kernels are interpreted where there is no GPU: Triton looks at this when it is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
