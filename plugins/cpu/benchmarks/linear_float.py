"""Speed of linear layers on float inputs, beside what this machine can do at all, measured in the same run.

    python plugins/cpu/benchmarks/linear_float.py --codes u4 bf16 --shapes 576x3072 2048x2048 --rows 1 16 512

A tape of layers of one shape, together as large as `--megabytes`, is replayed; each layer waits for the one before, as in a
model. GB/s counts packed codes, scales and zeros; peaks are those of a plain program on as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from peaks import Peaks

from octavo_cpu import _native

_F16 = 6  # as csrc/kernels.h numbers codes
CODES = {"u2": 2, "u4": 4, "u8": 8, "e4m3": 8, "e5m2": 8, "bf16": 16, "f16": 16, "f32": 32}


class Layers:
    """Copies of a random layer one after another in memory, on a tape."""

    def __init__(self, code: str, in_features: int, out_features: int, group: int, zeros: bool, bytes_: int) -> None:
        index, bits = list(CODES).index(code), CODES[code]
        integer = bits < 16 and code[0] == "u"
        groups = in_features // group if integer else 1
        self.starts = torch.arange(groups + 1, dtype=torch.int32) * (in_features // groups)
        size = _native.packed_bytes(index, in_features, out_features)
        numbers = groups * (out_features + 15 & ~15) if integer else 0
        tables = numbers * (3 if zeros else 2)  # fp16 scales, zeros of one byte
        self.bytes = (size + tables + 63) & ~63
        count = max(1, bytes_ // self.bytes)
        self.memory = torch.empty((count * self.bytes + 4096) // 4, dtype=torch.int32)
        if code == "f32":
            self.memory.view(torch.float32).normal_()
        elif code in ("bf16", "f16"):
            self.memory.view(torch.bfloat16 if code == "bf16" else torch.float16).fill_(0.5)
        else:
            self.memory.random_()
            self.memory.bitwise_and_(0x3F3F3F3F if not integer else -1)
        base = self.memory.data_ptr() + 63 & ~63
        self.weights = []
        halves = self.memory.view(torch.float16)
        for i in range(count):
            at = base + i * self.bytes
            if tables:
                begin = (at + size - self.memory.data_ptr()) // 2
                halves[begin : begin + numbers] = 0.01
            more = at + size + 2 * numbers if zeros and integer else 0
            weight = _native.Weight(
                index, in_features, out_features, in_features, groups, self.starts.data_ptr(), 0, at,
                _F16, at + size if tables else 0, more, 0, 0, False, 0,
            )  # fmt: skip
            self.weights.append(weight)
        self.in_features, self.out_features = in_features, out_features
        self.none = torch.zeros(4, dtype=torch.int64)

    def seconds(self, rows: int, limit_s: float) -> float:
        """Of one layer: the median over replays of the tape."""
        x = torch.randn(rows, self.in_features)
        out = torch.empty(rows, self.out_features)
        batch = _native.Batch(0, 0, 16, 0, 0, 0, 0, 0)
        weights = self.weights[: max(2, int(len(self.weights) * min(1.0, 32 / rows)))]
        program = _native.Program(rows)
        none = self.none.data_ptr()
        _native.begin(program, rows, none, none, batch)
        for weight in weights:
            _native.linear(weight, None, x.data_ptr(), self.in_features, rows, out.data_ptr(), self.out_features)
        _native.end()
        spent = []
        start = time.perf_counter()
        while len(spent) < 3 or time.perf_counter() - start < limit_s:
            before = time.perf_counter()
            _native.replay(program, rows, none, none, batch)
            spent.append((time.perf_counter() - before) / len(program))
        return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codes", nargs="+", default=["u4", "u8", "bf16"], choices=list(CODES))
    parser.add_argument("--shapes", nargs="+", default=["576x3072", "2048x2048"], help="in x out")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--group", type=int, default=0, help="inputs of one scale; 0: 128, or 64 where that does not divide"
    )
    parser.add_argument("--no-zeros", action="store_true", help="one zero for all")
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each number")
    parser.add_argument("--isa", default=_native.isa(), choices=_native.isas())
    options = parser.parse_args()
    _native.set_isa(options.isa)
    _native.set_threads(options.threads)
    peaks = Peaks(options.threads)
    print(f"{options.isa}, {options.threads} threads")
    print("codes in    out    rows      us   GB/s  of peak   GFLOPS  of peak")
    for code in options.codes:
        for shape in options.shapes:
            in_features, out_features = map(int, shape.split("x"))
            group = options.group or (128 if in_features % 128 == 0 else 64)
            layers = Layers(code, in_features, out_features, group, not options.no_zeros, options.megabytes << 20)
            for rows in options.rows:
                bandwidth, flops = peaks.reading(layers.memory.data_ptr(), layers.memory.nbytes), peaks.multiply_adds()
                seconds = layers.seconds(rows, options.seconds)
                bandwidth = statistics.mean([bandwidth, peaks.reading(layers.memory.data_ptr(), layers.memory.nbytes)])
                flops = statistics.mean([flops, peaks.multiply_adds()])
                read, done = layers.bytes / seconds, 2 * rows * in_features * out_features / seconds
                print(
                    f"{code:5} {in_features:5} {out_features:6} {rows:5} {seconds * 1e6:8.1f} {read / 1e9:6.1f} "
                    f"{read / bandwidth:7.0%} {done / 1e9:9.1f} {done / flops:7.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
