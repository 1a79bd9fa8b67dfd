"""Settings that hold for all tests of the workspace."""

from __future__ import annotations

import os

import torch

# Tests compare logits with exact ones: kernels leave inputs as they are unless a test says otherwise.
os.environ["OCTAVO_CPU_ACTIVATIONS"] = "float"

# Without a GPU its kernels are interpreted. Triton looks at this when it is imported, which other libraries do as well.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
