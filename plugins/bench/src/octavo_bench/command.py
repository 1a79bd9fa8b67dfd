"""`octavo bench` and the benchmarks below it. Each one's module declares its flags and runs it."""

from __future__ import annotations

import argparse

from octavo import Command
from octavo_bench import latency, serve, startup, throughput

_BELOW = {
    "serve": (serve, "Send requests to a running server and measure its answers."),
    "throughput": (throughput, "Run prompts through an engine in this process, as fast as it can."),
    "latency": (latency, "Time one batch from prompt to last token, several times over."),
    "startup": (startup, "Time how long an engine takes until its first token, in new processes."),
}


class Bench(Command):
    """Measures servers and engines."""

    name = "bench"
    help = "Measure a running server (serve), or an engine in this process (throughput, latency, startup)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        below = parser.add_subparsers(required=True, metavar="BENCHMARK")
        for name, (module, text) in _BELOW.items():
            sub = below.add_parser(name, help=text, description=text)
            sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="Log everything.")
            module.add_arguments(sub)
            sub.set_defaults(run_benchmark=module.run)

    def run(self, options: argparse.Namespace) -> int:
        return int(options.run_benchmark(options))
