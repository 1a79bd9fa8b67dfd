"""What all suites share: being collected only when they have a subject, refusals as sentences, and how failures are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.quant.linear import LinearMethod

SHOWN_FAILURES = 8
"""Wrong cells that a failing test lists; it counts the others."""


class Suite:
    """Base of the suites. A test class derives from one of them and sets its one attribute; the bases are never collected.

    `device` may be overridden with "cuda": such a class is skipped on a machine without CUDA.
    """

    __test__ = False
    device: ClassVar[str] = "cpu"
    _subject: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__test__ = hasattr(cls, cls._subject)

    @classmethod
    def setup_class(cls) -> None:
        if cls.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def refusal(subject: type[LinearMethod] | type[AttentionBackend], request: Any) -> str | None:
    """The subject's answer to a request; fails unless it is None or a sentence, and where it raises."""
    try:
        answer = subject.why_not(request)
    except Exception as error:
        raise AssertionError(f"{subject.__name__}.why_not raised {error!r} instead of answering {request}") from error
    sentence = isinstance(answer, str) and len(answer.split()) > 1
    assert answer is None or sentence, f"{subject.__name__}.why_not answered {answer!r} to {request}, not a sentence"
    return answer


def expect_none_wrong(failures: Sequence[str], tried: int) -> None:
    """Fails with the first of the wrong cells, each one line."""
    if failures:
        more = len(failures) - SHOWN_FAILURES
        lines = [*failures[:SHOWN_FAILURES], *([f"... and {more} more"] if more > 0 else [])]
        raise AssertionError("\n  ".join([f"{len(failures)} of {tried} cells are wrong:", *lines]))


def deviation(found: Tensor, expected: Tensor, tolerance: Tensor | float) -> str | None:
    """Where `found` is farther from `expected` than `tolerance`, or not finite: the worst element, or None if nowhere."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    excess = (found.double() - expected.double()).abs() - tolerance
    wrong = ~(excess <= 0)  # true for NaN as well
    if not bool(wrong.any()):
        return None
    worst = int(excess.nan_to_num(nan=torch.inf).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), found.shape))
    values = f"{float(found.flatten()[worst]):.6g} instead of {float(expected.flatten()[worst]):.6g}"
    return f"{int(wrong.sum())} of {found.numel()} elements off, worst at {place}: {values}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes, NaNs included."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(as_bytes(left), as_bytes(right))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, as uint8 with one more dimension."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)
