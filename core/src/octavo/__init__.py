"""octavo serves large language models from paged KV memory, with every quantization scheme and kernel a plugin.

The names below are all that users and plugins import (with `octavo.testing` for tests). They load on first use, so that
`import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octavo.attention.backend import (
        AttentionBackend as AttentionBackend,
    )
    from octavo.attention.backend import (
        AttentionBatch as AttentionBatch,
    )
    from octavo.attention.backend import (
        AttentionLayer as AttentionLayer,
    )
    from octavo.attention.backend import (
        AttentionRequest as AttentionRequest,
    )
    from octavo.attention.backend import (
        KVEncoding as KVEncoding,
    )
    from octavo.attention.backend import (
        LayerKV as LayerKV,
    )
    from octavo.attention.kv_format import KVFormat as KVFormat
    from octavo.attention.kv_format import KVGeometry as KVGeometry
    from octavo.attention.kv_format import PlainKV as PlainKV
    from octavo.attention.kv_format import zeroed as zeroed
    from octavo.command import Command as Command
    from octavo.command import add_engine_settings as add_engine_settings
    from octavo.command import engine_config as engine_config
    from octavo.config import EngineConfig as EngineConfig
    from octavo.engine.executor import Executor as Executor
    from octavo.engine.executor import ModelInfo as ModelInfo
    from octavo.engine.grammar import GrammarCompiler as GrammarCompiler
    from octavo.engine.grammar import GrammarMatcher as GrammarMatcher
    from octavo.engine.grammar import GrammarSpec as GrammarSpec
    from octavo.engine.grammar import StructuredOutputsParams as StructuredOutputsParams
    from octavo.engine.sampling_params import SamplingParams as SamplingParams
    from octavo.engine.step import Step as Step
    from octavo.engine.step import StepOutput as StepOutput
    from octavo.engine.step import TokenLogprobs as TokenLogprobs
    from octavo.engine.step_graph import StepGraph as StepGraph
    from octavo.errors import (
        CheckpointError as CheckpointError,
    )
    from octavo.errors import (
        ConfigError as ConfigError,
    )
    from octavo.errors import (
        NoKernelError as NoKernelError,
    )
    from octavo.errors import (
        OctavoError as OctavoError,
    )
    from octavo.errors import (
        PluginError as PluginError,
    )
    from octavo.errors import (
        RequestError as RequestError,
    )
    from octavo.front.llm import LLM as LLM
    from octavo.front.output_processor import TextDelta as TextDelta
    from octavo.front.outputs import (
        CompletionOutput as CompletionOutput,
    )
    from octavo.front.outputs import (
        Logprob as Logprob,
    )
    from octavo.front.outputs import (
        RequestOutput as RequestOutput,
    )
    from octavo.hookspecs import API_VERSION as API_VERSION
    from octavo.hookspecs import hookimpl as hookimpl
    from octavo.model.architectures import DecoderConfig as DecoderConfig
    from octavo.model.architectures import RopeConfig as RopeConfig
    from octavo.model.checkpoint import Checkpoint as Checkpoint
    from octavo.model.checkpoint import CheckpointReader as CheckpointReader
    from octavo.model.embedding import Embedding as Embedding
    from octavo.model.ops import FusedOps as FusedOps
    from octavo.model.plan import LinearReport as LinearReport
    from octavo.platforms import Platform as Platform
    from octavo.plugins import PluginInfo as PluginInfo
    from octavo.plugins import Registry as Registry
    from octavo.plugins import discover as discover
    from octavo.product import row_product as row_product
    from octavo.quant.activation import quantize_inputs as quantize_inputs
    from octavo.quant.calibration import InputStatistics as InputStatistics
    from octavo.quant.calibration import gram_loss as gram_loss
    from octavo.quant.calibration import parallel_map as parallel_map
    from octavo.quant.compensation import (
        Rounded as Rounded,
    )
    from octavo.quant.compensation import (
        Rounding as Rounding,
    )
    from octavo.quant.compensation import (
        compensated_rounding as compensated_rounding,
    )
    from octavo.quant.config import Golden as Golden
    from octavo.quant.config import LayerFacts as LayerFacts
    from octavo.quant.config import QuantConfig as QuantConfig
    from octavo.quant.config import QuantSource as QuantSource
    from octavo.quant.config import TensorInfo as TensorInfo
    from octavo.quant.kv_scales import KVScales as KVScales
    from octavo.quant.linear import LinearMethod as LinearMethod
    from octavo.quant.linear import LinearRequest as LinearRequest
    from octavo.quant.oracle import weight_segments as weight_segments
    from octavo.quant.quantizer import CalibratedGroup as CalibratedGroup
    from octavo.quant.quantizer import QuantizedGroup as QuantizedGroup
    from octavo.quant.quantizer import Quantizer as Quantizer
    from octavo.quant.quantizer import QuantizerOptions as QuantizerOptions
    from octavo.quant.quantizer import round_to_nearest as round_to_nearest
    from octavo.quant.quantizer import stored_scales as stored_scales
    from octavo.quant.weight import (
        CODES as CODES,
    )
    from octavo.quant.weight import (
        ActivationSpec as ActivationSpec,
    )
    from octavo.quant.weight import (
        LinearLayer as LinearLayer,
    )
    from octavo.quant.weight import (
        QuantizedWeight as QuantizedWeight,
    )
    from octavo.quant.weight import (
        WeightSpec as WeightSpec,
    )
    from octavo.server.tools.parser import (
        ToolDelta as ToolDelta,
    )
    from octavo.server.tools.parser import (
        ToolGolden as ToolGolden,
    )
    from octavo.server.tools.parser import (
        ToolParser as ToolParser,
    )

_HOMES = {
    "octavo.attention.backend": "AttentionBackend AttentionBatch AttentionLayer AttentionRequest KVEncoding LayerKV",
    "octavo.attention.kv_format": "KVFormat KVGeometry PlainKV zeroed",
    "octavo.command": "Command add_engine_settings engine_config",
    "octavo.config": "EngineConfig",
    "octavo.engine.executor": "Executor ModelInfo",
    "octavo.engine.grammar": "GrammarCompiler GrammarMatcher GrammarSpec StructuredOutputsParams",
    "octavo.engine.sampling_params": "SamplingParams",
    "octavo.engine.step": "Step StepOutput TokenLogprobs",
    "octavo.engine.step_graph": "StepGraph",
    "octavo.errors": "CheckpointError ConfigError NoKernelError OctavoError PluginError RequestError",
    "octavo.front.llm": "LLM",
    "octavo.front.output_processor": "TextDelta",
    "octavo.front.outputs": "CompletionOutput Logprob RequestOutput",
    "octavo.hookspecs": "API_VERSION hookimpl",
    "octavo.model.architectures": "DecoderConfig RopeConfig",
    "octavo.model.checkpoint": "Checkpoint CheckpointReader",
    "octavo.model.embedding": "Embedding",
    "octavo.model.ops": "FusedOps",
    "octavo.model.plan": "LinearReport",
    "octavo.platforms": "Platform",
    "octavo.plugins": "PluginInfo Registry discover",
    "octavo.product": "row_product",
    "octavo.quant.activation": "quantize_inputs",
    "octavo.quant.calibration": "InputStatistics gram_loss parallel_map",
    "octavo.quant.compensation": "Rounded Rounding compensated_rounding",
    "octavo.quant.config": "Golden LayerFacts QuantConfig QuantSource TensorInfo",
    "octavo.quant.kv_scales": "KVScales",
    "octavo.quant.linear": "LinearMethod LinearRequest",
    "octavo.quant.oracle": "weight_segments",
    "octavo.quant.quantizer": "CalibratedGroup QuantizedGroup Quantizer QuantizerOptions round_to_nearest stored_scales",
    "octavo.server.tools.parser": "ToolDelta ToolGolden ToolParser",
    "octavo.quant.weight": "CODES ActivationSpec LinearLayer QuantizedWeight WeightSpec",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'octavo' has no attribute '{name}'")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
