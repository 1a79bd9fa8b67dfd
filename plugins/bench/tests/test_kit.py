"""The command passes the kit: cheap to list, every flag of every benchmark explained."""

from octavo.testing import CommandSuite
from octavo_bench.command import Bench


class TestBench(CommandSuite):
    command = Bench
