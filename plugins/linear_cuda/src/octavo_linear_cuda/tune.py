"""`octavo tune`: finds the fastest tiles for a model's layers on the GPU that is here, and keeps them for later starts."""

from __future__ import annotations

import argparse

from octavo import Command

# Outputs and inputs of the four products of a decoder layer, as octavo fuses them.
SHAPES = {
    "7b": "12288x4096,4096x4096,22016x4096,4096x11008",
    "8b": "6144x4096,4096x4096,28672x4096,4096x14336",
}


class Tune(Command):
    """Measures tiles of the kernels of octavo-linear-cuda."""

    name = "tune"
    help = "Find the fastest tiles of quantised linear layers on this GPU, and keep them for later starts."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        named = ", ".join(SHAPES)
        for flag, default, text in (
            ("--shapes", "8b", f"Outputs x inputs of layers, with commas between them, or {named}."),
            ("--kernels", "w4a16:128", "Kernels, with the group after a colon: w2a16, w3a16, w4a16, w8a16, w8a8, fp8."),
            ("--rows", "8,16,32,64,128,256,512,1024,2048,4096", "Numbers of rows."),
            ("--dtype", "bfloat16", "Type of inputs and outputs: bfloat16 or float16."),
        ):
            parser.add_argument(flag, default=default, metavar=flag[2:].upper(), help=f"{text} Default: {default}.")
        parser.add_argument("--output", metavar="FILE", help="Write here instead of into the cache folder.")

    def run(self, options: argparse.Namespace) -> int:
        from octavo_linear_cuda.tuner import run

        return run(options)
