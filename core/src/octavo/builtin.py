"""What core itself contributes, through the same hooks as every plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.hookspecs import API_VERSION, hookimpl

if TYPE_CHECKING:
    from octavo.attention.backend import AttentionBackend
    from octavo.attention.kv_format import KVFormat
    from octavo.command import Command
    from octavo.engine.executor import Executor
    from octavo.engine.step_graph import StepGraph
    from octavo.model.architectures import DecoderConfig
    from octavo.model.checkpoint import CheckpointReader
    from octavo.model.ops import FusedOps
    from octavo.platforms import Platform
    from octavo.quant.linear import LinearMethod
    from octavo.quant.quantizer import Quantizer
    from octavo.server.tools.parser import ToolParser

octavo_api = API_VERSION


@hookimpl
def octavo_checkpoint_readers() -> Sequence[type[CheckpointReader]]:
    from octavo.model.checkpoint import SafetensorsReader, TorchBinReader

    return [SafetensorsReader, TorchBinReader]


@hookimpl
def octavo_architectures() -> Mapping[str, Callable[[dict[str, Any]], DecoderConfig]]:
    from octavo.model.architectures import ARCHITECTURES

    return ARCHITECTURES


@hookimpl
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    from octavo.quant.linear import DenseMethod, DequantizedMethod, ReferenceMethod

    return [DenseMethod, ReferenceMethod, DequantizedMethod]


@hookimpl
def octavo_attention_backends(platform: Platform) -> Sequence[type[AttentionBackend]]:
    from octavo.attention.reference import ReferenceAttention

    return [ReferenceAttention]


@hookimpl
def octavo_kv_formats(platform: Platform) -> Sequence[type[KVFormat]]:
    from octavo.attention.kv_format import BFloat16KV, Float16KV, Float32KV, PlainKV

    return [PlainKV, Float32KV, BFloat16KV, Float16KV]


@hookimpl
def octavo_fused_ops(platform: Platform) -> Sequence[type[FusedOps]]:
    from octavo.model.ops import TorchOps

    return [TorchOps]


@hookimpl
def octavo_step_graphs(platform: Platform) -> Sequence[type[StepGraph]]:
    from octavo.engine.step_graph import EagerStep

    return [EagerStep]


@hookimpl
def octavo_tool_parsers() -> Sequence[type[ToolParser]]:
    from octavo.server.tools.hermes import HermesParser
    from octavo.server.tools.llama import Llama3JSONParser

    return [HermesParser, Llama3JSONParser]


@hookimpl
def octavo_executors() -> Sequence[type[Executor]]:
    from octavo.engine.in_process import InProcessExecutor

    return [InProcessExecutor]


@hookimpl
def octavo_quantizers() -> Sequence[type[Quantizer]]:
    from octavo.quant.quantizer import RoundToNearest

    return [RoundToNearest]


@hookimpl
def octavo_commands() -> Sequence[type[Command]]:
    from octavo.cli.chat import Chat, Complete
    from octavo.cli.checkpoints import CheckPlugin, Convert, Doctor, Inspect, Plugins
    from octavo.cli.generate import Generate
    from octavo.cli.quantize import Eval, Quantize
    from octavo.cli.run_batch import RunBatch
    from octavo.cli.serve import Serve

    makers = [Convert, Quantize, Eval]
    return [Generate, Serve, Chat, Complete, RunBatch, Inspect, Doctor, *makers, Plugins, CheckPlugin]
