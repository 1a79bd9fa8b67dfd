"""`octavo bench`: load for servers and engines, with the flags, the printed block and the JSON keys of `vllm bench`.

`serve` sends requests to any server with OpenAI's API and needs neither torch nor the model; `throughput`, `latency` and
`startup` run an engine in this process. `metrics` holds the arithmetic, `recorder` what is noted of one streamed answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import Command

octavo_api = (1, 0)


@hookimpl
def octavo_commands() -> Sequence[type[Command]]:
    from octavo_bench.command import Bench

    return [Bench]
