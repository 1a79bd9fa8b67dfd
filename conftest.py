"""Settings that hold for all tests of the workspace."""

from __future__ import annotations

import os

# Tests compare logits with exact ones: kernels leave inputs as they are unless a test says otherwise.
os.environ["OCTAVO_CPU_ACTIVATIONS"] = "float"
