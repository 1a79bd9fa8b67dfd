"""Every hook that a plugin may fill, in the order in which the engine needs them.

A plugin is a module (or object) that an entry point of the group `octavo` names, that declares `octavo_api = (1, 0)`, and
whose functions marked with `@octavo.hookimpl` carry these names. Each hook is called once, before any model is loaded, and
returns classes; core ranks and chooses. Import heavy modules inside the functions: every command loads every plugin.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from octavo.attention.backend import AttentionBackend
    from octavo.attention.kv_format import KVFormat
    from octavo.command import Command
    from octavo.engine.executor import Executor
    from octavo.engine.grammar import GrammarCompiler
    from octavo.engine.step_graph import StepGraph
    from octavo.model.architectures import DecoderConfig
    from octavo.model.checkpoint import CheckpointReader
    from octavo.model.ops import FusedOps
    from octavo.platforms import Platform
    from octavo.quant.config import QuantConfig
    from octavo.quant.linear import LinearMethod, LinearRequest
    from octavo.quant.quantizer import Quantizer
    from octavo.server.tools.parser import ToolParser

hookspec = pluggy.HookspecMarker("octavo")
hookimpl = pluggy.HookimplMarker("octavo")

API_VERSION = (1, 0)
"""What this core offers. A plugin's `octavo_api` must have this major number, or the one before, and no larger minor one."""


# --- reading a model folder


@hookspec
def octavo_checkpoint_readers() -> Sequence[type[CheckpointReader]]:
    """Containers of tensors besides safetensors and .bin. The first reader that claims a path opens it."""


@hookspec
def octavo_architectures() -> Mapping[str, Callable[[dict[str, Any]], DecoderConfig]]:
    """From a name in config.json's `architectures` to a function that turns config.json into a DecoderConfig."""


@hookspec
def octavo_quant_configs() -> Sequence[type[QuantConfig]]:
    """Checkpoint formats. A name has one owner; a clash is an error that names both distributions."""


# --- computing


@hookspec
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    """Kernels for linear layers. Core asks each `why_not` for each layer and takes the willing one of the highest rank."""


@hookspec(firstresult=True)
def octavo_select_linear(request: LinearRequest, candidates: Sequence[type[LinearMethod]]) -> type[LinearMethod] | None:
    """Picks one of the willing kernels for a layer instead of the highest rank (an autotuner, say). None: no opinion."""


@hookspec
def octavo_attention_backends(platform: Platform) -> Sequence[type[AttentionBackend]]:
    """Attention kernels, chosen like linear ones but once for a model."""


@hookspec
def octavo_kv_formats(platform: Platform) -> Sequence[type[KVFormat]]:
    """Ways to store K and V, chosen by `--kv-cache-dtype`. A name has one owner."""


@hookspec
def octavo_fused_ops(platform: Platform) -> Sequence[type[FusedOps]]:
    """Elementwise kernels (normalisation, rotary embedding, gating), one set for a model."""


@hookspec
def octavo_step_graphs(platform: Platform) -> Sequence[type[StepGraph]]:
    """Ways to capture and replay a whole forward."""


# --- placing and making


@hookspec
def octavo_grammar_compilers() -> Sequence[type[GrammarCompiler]]:
    """What holds outputs to a schema, regex or grammar, chosen by `--structured-outputs-backend`. A name has one owner."""


@hookspec
def octavo_tool_parsers() -> Sequence[type[ToolParser]]:
    """Formats in which models write tool calls, chosen by `--tool-call-parser`. A name has one owner."""


@hookspec
def octavo_executors() -> Sequence[type[Executor]]:
    """Ways to place workers, chosen by `--distributed-executor-backend`. A name has one owner."""


@hookspec
def octavo_quantizers() -> Sequence[type[Quantizer]]:
    """Algorithms that turn float weights into quantised ones. A name has one owner."""


# --- the command line


@hookspec
def octavo_commands() -> Sequence[type[Command]]:
    """Commands of `octavo`, listed in its help without importing anything heavy. A name has one owner, core's included."""
