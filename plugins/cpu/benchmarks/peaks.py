"""What a machine can do at most, by plain programs on so many threads; needs g++."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Peaks:
    """Rates of plain reading and multiplying."""

    def __init__(self, threads: int) -> None:
        """Raises OSError or CalledProcessError where the programs cannot be built."""
        source = Path(__file__).with_suffix(".cpp")
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "peaks.so"
            flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
            self.peaks = ctypes.CDLL(str(built))
        for function in (self.peaks.multiply_add_rate, self.peaks.int8_rate, self.peaks.read_rate):
            function.restype = ctypes.c_double
        self.pool = ThreadPoolExecutor(threads)
        self.threads = threads

    def multiply_adds(self) -> float:
        """Floating-point operations a second."""
        rates = self.pool.map(lambda _: self.peaks.multiply_add_rate(ctypes.c_double(0.15)), range(self.threads))
        return sum(rates)

    def int8_products(self) -> float:
        """Multiplications and additions of int8 a second, by dot products; 0 where the processor has none."""
        return sum(self.pool.map(lambda _: self.peaks.int8_rate(ctypes.c_double(0.15)), range(self.threads)))

    def reading(self, address: int, num_bytes: int) -> float:
        """Bytes a second over this memory, each thread its part."""
        size = num_bytes // self.threads // 4096 * 4096

        def read(i: int) -> float:
            start = ctypes.c_void_p(address + i * size)
            rate: float = self.peaks.read_rate(start, ctypes.c_int64(size), ctypes.c_double(0.2))
            return rate

        return sum(self.pool.map(read, range(self.threads)))
