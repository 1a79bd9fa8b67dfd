"""The check at start: each kind of prepared layer against the oracle, on a few of its own outputs, before it serves anyone."""

from __future__ import annotations

import torch

from octavo.errors import NoKernelError
from octavo.quant.linear import LinearMethod, LinearRequest
from octavo.quant.oracle import expected_product
from octavo.quant.weight import QuantizedWeight

_ROWS = (1, 17)
"""Kernels have one path for single rows and another for many, in tiles of 8 or 16 and a rest."""
_OUTPUTS = 32
"""Outputs compared at each end of the layer, where kernels go wrong first, and in its middle."""


def self_test(method: LinearMethod, weight: QuantizedWeight, request: LinearRequest) -> None:
    """Raises NoKernelError that names layer, kernel and error unless the method computes the layer's product.

    All inputs count, but only some rows and outputs are compared, so that even a large layer takes milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_ROWS), request.in_features, generator=generator)
    x[1] = 0
    x = x.to(weight.codes.device, request.dtype)
    size = min(_OUTPUTS, request.out_features)
    starts = sorted({0, (request.out_features - size) // 2, request.out_features - size})
    columns = [column for start in starts for column in range(start, start + size)]
    first, *others = [weight.slice_out(start, start + size) for start in starts]
    expected, tolerance = expected_product(
        x, first.concat(others), weight.bias is not None, request.dtype, method.inputs_as(request)
    )
    for rows in _ROWS:
        result = method(x[:rows])
        problem, shape = None, (rows, request.out_features)
        if tuple(result.shape) != shape or result.dtype != request.dtype:
            problem = f"it returned {tuple(result.shape)} of {result.dtype} instead of {shape} of {request.dtype}"
        else:
            found = result[:, columns].double()
            error = (found - expected[:rows]).abs()
            if not bool((error <= tolerance[:rows]).all()):
                excess = (error - tolerance[:rows]).nan_to_num(nan=torch.inf)
                row, place = divmod(int(excess.argmax()), len(columns))
                problem = (
                    f"of {rows} row(s), output {columns[place]} of row {row} is {float(found[row, place]):.6g} instead of "
                    f"{float(expected[row, place]):.6g} (allowed error {float(tolerance[row, place]):.2g})"
                )
        if problem is not None:
            raise NoKernelError(
                f"kernel '{method.name}' failed its self-test on {request.layer} ({request.spec}, {request.dtype}): "
                f"{problem}. Choose another with --linear-kernels '*=reference', or start without the test by --no-self-test"
            )
