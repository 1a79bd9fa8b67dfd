"""The check at start: each kind of prepared layer against the oracle, on a few of its own rows, before it serves anyone."""

from __future__ import annotations

import torch

from octavo.errors import NoKernelError
from octavo.quant.linear import LinearMethod, LinearRequest
from octavo.quant.oracle import expected_product
from octavo.quant.weight import QuantizedWeight

_ROWS = 3
_OUTPUTS = 32
"""Outputs compared at each end of the layer: kernels go wrong at tails first."""


def self_test(method: LinearMethod, weight: QuantizedWeight, request: LinearRequest) -> None:
    """Raises NoKernelError that names layer, kernel and error unless the method computes the layer's product.

    The first and last outputs of a few rows are compared, so that even a large layer takes milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, request.in_features, generator=generator)
    x = x.to(weight.codes.device, request.dtype)
    result = method(x)
    shape = (_ROWS, request.out_features)
    problem = None
    if tuple(result.shape) != shape or result.dtype != request.dtype:
        problem = f"it returned {tuple(result.shape)} of {result.dtype} instead of {shape} of {request.dtype}"
    else:
        for start in sorted({0, max(request.out_features - _OUTPUTS, 0)}):
            stop = min(start + _OUTPUTS, request.out_features)
            part = weight.slice_out(start, stop)
            expected, tolerance = expected_product(x, part, part.bias is not None, request.dtype)
            error = (result[:, start:stop].double() - expected).abs()
            if not bool((error <= tolerance).all()):
                row, column = divmod(int((error - tolerance).nan_to_num(nan=torch.inf).argmax()), stop - start)
                problem = (
                    f"output {start + column} is {float(result[row, start + column]):.6g} "
                    f"instead of {float(expected[row, column]):.6g} (allowed error {float(tolerance[row, column]):.2g})"
                )
                break
    if problem is not None:
        raise NoKernelError(
            f"kernel '{method.name}' failed its self-test on {request.layer} ({request.spec}, {request.dtype}): {problem}. "
            f"Choose another with --linear-kernels '*=reference', or start without the test by --no-self-test"
        )
