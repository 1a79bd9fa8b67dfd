"""Paged attention alone: decode as a share of the bandwidth of reading as many bytes, prefill as a share of the fp32 peak.

python benchmarks/attention.py [--threads N] [--isa NAME]. Both ceilings are measured in the same run, beside the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo_cpu import _native as native

STORED = {
    "f32": (0, torch.float32),
    "f16": (1, torch.float16),
    "bf16": (2, torch.bfloat16),
    "e4m3": (3, torch.uint8),
    "e5m2": (4, torch.uint8),
    "i8": (5, torch.int8),
}
BLOCK = 16
GIGA = 1e9


@dataclass
class Case:
    """Requests that are alike, over layers that each have their own blocks, as in a model's step."""

    heads: int
    kv_heads: int
    head_dim: int
    storage: str
    requests: int
    before: int  # tokens in the cache
    computed: int  # tokens of this step
    layers: int
    scaled: bool = False

    def prepare(self) -> Callable[[], None]:
        """What computes all layers once."""
        code, dtype = STORED[self.storage]
        length = self.before + self.computed
        blocks = -(-length // BLOCK)
        shape = (blocks * self.requests, self.kv_heads, BLOCK)
        layers, keep = [], []
        for _ in range(self.layers):
            pair = [torch.randint(0, 100, (*shape, self.head_dim)).to(dtype) for _ in range(2)]
            scales = [torch.rand(shape) for _ in range(2)]
            addresses = [s.data_ptr() if self.scaled else 0 for s in scales]
            keep += [*pair, *scales]
            layers.append(native.KVBlocks(code, pair[0].data_ptr(), pair[1].data_ptr(), 0, *addresses, 0, 0))
        tokens = self.requests * self.computed
        starts = torch.arange(0, tokens + 1, self.computed, dtype=torch.int32)
        lens = torch.full((self.requests,), length, dtype=torch.int32)
        tables = torch.randperm(blocks * self.requests).view(self.requests, blocks).int()
        query = torch.randn(tokens, self.heads * self.head_dim) * 0.01
        out = torch.empty_like(query)
        attention = native.Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, 0, 0.0)
        batch = native.Batch(
            *(self.requests, tokens, BLOCK, starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), blocks, 0),
        )
        batch.plan(attention)
        keep += [starts, lens, tables, query, out]

        def run() -> None:
            assert keep
            for kv in layers:
                native.attend(attention, kv, batch, query.data_ptr(), query.stride(0), out.data_ptr())

        return run

    @property
    def bytes(self) -> float:
        """Of K, V and scales that all layers read."""
        size = STORED[self.storage][1].itemsize * self.head_dim + (4 if self.scaled else 0)
        return 2.0 * self.layers * self.requests * self.kv_heads * (self.before + self.computed) * size

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products."""
        seen = self.computed * self.before + self.computed * (self.computed + 1) / 2
        return 4.0 * self.layers * self.requests * self.heads * seen * self.head_dim


def seconds(run: Callable[[], object], times: int) -> float:
    """The median of some runs, after one."""
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def bandwidth(size: float) -> float:
    """Bytes a second of reading so many by torch, on its own threads."""
    memory = torch.zeros(max(int(size) // 8, 1), dtype=torch.int64)
    return float(memory.nbytes) / seconds(memory.sum, 7)


def peak() -> float:
    """fp32 operations a second of a large product by torch."""
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    return 2.0 * 1536**3 / seconds(lambda: a @ b, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=native.isa())
    parser.add_argument("--only", default="", help="decode or prefill")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native.set_threads(options.threads)
    native.set_isa(options.isa)
    smol, tiny = (9, 3, 64), (32, 4, 64)
    decode = [Case(*smol, storage, 1, 4095, 1, 30, scaled) for storage, scaled in STORAGES]
    decode += [
        Case(*smol, "f16", 1, 255, 1, 30),
        Case(*smol, "f16", 16, 500, 1, 30),
        Case(*tiny, "f16", 1, 4095, 1, 22),
    ]
    decode += [Case(32, 8, 128, "f16", 1, 4095, 1, 8)]
    prefill = [
        Case(*smol, "f16", 1, 0, 512, 30),
        Case(*smol, "f16", 1, 0, 4096, 2),
        Case(*smol, "f16", 1, 3584, 512, 4),
    ]
    prefill += [Case(*tiny, "e4m3", 1, 0, 512, 8), Case(32, 8, 128, "f16", 1, 0, 512, 4)]
    if options.only != "prefill":
        for case in decode:
            taken = seconds(case.prepare(), 9)
            read = case.bytes / taken
            most = bandwidth(case.bytes)
            print(
                f"{describe(case)}: {taken * 1e3:8.2f} ms {read / GIGA:6.1f} GB/s, {read / most:5.1%} of {most / GIGA:.1f}"
            )
    if options.only != "decode":
        for case in prefill:
            taken = seconds(case.prepare(), 5)
            done = case.operations / taken
            most = peak()
            print(
                f"{describe(case)}: {taken * 1e3:8.2f} ms {done / GIGA:6.1f} GFLOPS, {done / most:5.1%} of {most / GIGA:.1f}"
            )


STORAGES = [
    ("f32", False),
    ("f16", False),
    ("bf16", False),
    ("e4m3", False),
    ("e4m3", True),
    ("e5m2", False),
    ("i8", True),
]


def describe(case: Case) -> str:
    """One line."""
    kind = case.storage + (" scaled" if case.scaled else "")
    shape = f"{case.heads}/{case.kv_heads}x{case.head_dim} {case.layers} layers"
    return f"{kind:12} {shape:22} {case.requests:2} x {case.computed:4} after {case.before:4}"


if __name__ == "__main__":
    main()
