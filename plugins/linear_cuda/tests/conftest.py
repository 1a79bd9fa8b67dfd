"""Kernels on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the CPU's tensors. Infinities and NaN are silent, as on a GPU; functions are called, not set up anew."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted")

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return self.rewrite()(*args, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    with np.errstate(all="ignore"):
        yield
