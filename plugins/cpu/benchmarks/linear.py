"""Speed of linear layers on int8 inputs: all layers of a model's shape on one tape, beside what the machine can do at most.

    python plugins/cpu/benchmarks/linear.py --shape L --bits 4 --group 128 --rows 1 4 12 512 --threads 2

Weights are random bits. Prints milliseconds of the fastest step, bytes of weights read and int8 operations in a second, each
with its share of what a plain read and a plain chain of dot products reach in the same run (needs g++).
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from peaks import Peaks

from octavo_cpu import _native

_F16 = 6  # as csrc/kernels.h numbers codes
SHAPES = {  # (layers, outputs and inputs of each linear layer)
    "S": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536))),
    "M": (24, ((1152, 896), (896, 896), (9728, 896), (896, 4864))),
    "L": (22, ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))),
}


def aligned(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size].view(dtype).reshape(shape)


class Model:
    def __init__(self, shape: str, bits: int, group: int, zeros: bool, layers: int) -> None:
        rng = np.random.default_rng(0)
        self.kept: list[object] = []
        self.weights: list[tuple[object, int, int]] = []
        self.bytes = self.operations = 0
        noise = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
        for _ in range(layers):
            for out_features, in_features in SHAPES[shape][1]:
                size = in_features if group < 0 else group
                segments = -(-in_features // size)
                codes = aligned((in_features * out_features * bits // 8,), "uint8")
                codes[:] = np.resize(noise, codes.shape)
                scales = aligned((segments * out_features,), "float16")
                scales[:] = 1e-3
                zero = aligned((segments * out_features if zeros else 0,), "uint8")
                zero[:] = 7
                starts = np.minimum(np.arange(segments + 1) * size, in_features).astype(np.int32)
                code, middle = {2: 0, 4: 1, 8: 2}[bits], 1 << (bits - 1)
                weight = _native.Weight(
                    code, in_features, out_features, in_features, segments, starts.ctypes.data, 0, codes.ctypes.data,
                    _F16, scales.ctypes.data, zero.ctypes.data if zeros else 0, 0, 0, not zeros, 0 if zeros else middle,
                )  # fmt: skip
                self.kept += [codes, scales, zero, starts]
                self.weights.append((weight, in_features, out_features))
                self.bytes += codes.nbytes + scales.nbytes + zero.nbytes
                self.operations += 2 * in_features * out_features

    def step(self, rows: int, kind: int) -> Callable[[], None]:
        widest = max(max(w[1:]) for w in self.weights)
        x = np.random.default_rng(1).standard_normal((rows, widest), dtype=np.float32)
        out = np.empty((rows, widest), np.float32)
        ids = np.zeros(rows, np.int64)
        batch = _native.Batch(0, rows, 1, 0, 0, 0, 0, 0)
        program = _native.Program(rows)
        inputs = _native.Inputs(kind, True, 1.0, 0.0)
        given = (rows, ids.ctypes.data, ids.ctypes.data, batch)
        _native.begin(program, *given)
        for weight, _, _ in self.weights:
            _native.linear(weight, inputs, x.ctypes.data, widest, rows, out.ctypes.data, widest)
        _native.end()
        self.kept += [x, out, ids]
        return lambda: _native.replay(program, *given)


def fastest(step: Callable[[], None], at_least: float) -> float:
    """Seconds of the fastest of many: what else runs on the machine can only add."""
    step()
    best, begin, count = float("inf"), time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begin < at_least:
        start = time.perf_counter()
        step()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--bits", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument("--group", type=int, default=64, help="-1: one scale for each output")
    parser.add_argument("--zeros", action="store_true", help="zero points for each group")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 12, 16, 512])
    parser.add_argument("--inputs", choices=("segment", "token", "static"), default="segment")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of rows, at least")
    args = parser.parse_args()
    if args.isa:
        _native.set_isa(args.isa)
    _native.set_threads(args.threads)
    layers = args.layers or SHAPES[args.shape][0]
    model = Model(args.shape, args.bits, args.group, args.zeros, layers)
    bandwidth = peak = 0.0
    with suppress(OSError, subprocess.CalledProcessError):  # without a compiler there are no shares
        peaks = Peaks(args.threads)
        memory = np.ones(model.bytes, np.uint8)
        bandwidth = max(peaks.reading(memory.ctypes.data, model.bytes) for _ in range(5))
        peak = max(peaks.int8_products() for _ in range(5))
        del memory
    print(
        f"{_native.isa()}, {args.threads} threads, shape {args.shape}, {layers} layers, {args.bits} bits, group {args.group}"
        f"{', zeros' if args.zeros else ''}, {model.bytes / 1e6:.0f} MB; "
        f"at most {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GOPS"
    )
    kind = ("segment", "token", "static").index(args.inputs)
    for rows in args.rows:
        taken = fastest(model.step(rows, kind), args.seconds)
        read, done = model.bytes / taken, model.operations * rows / taken
        shares = f"({read / bandwidth:4.0%})", f"({done / peak:4.0%})" if peak else ""
        print(
            f"rows {rows:4d}  {taken * 1e3:8.3f} ms  {read / 1e9:6.1f} GB/s {shares[0] if bandwidth else ''}"
            f"  {done / 1e9:7.0f} GOPS {shares[1]}  {rows / taken:8.0f} rows/s"
        )


if __name__ == "__main__":
    main()
