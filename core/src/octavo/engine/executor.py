"""The contract between engine and workers: one call a step. How workers are placed is the executor's affair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.engine.step import Step, StepOutput

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.model.plan import LinearReport
    from octavo.plugins import Registry


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a loaded model."""

    vocab_size: int
    max_model_len: int
    end_token_ids: frozenset[int]  # from config.json and generation_config.json
    stretches_beyond: int | None = None  # prompts longer than this have K that depends on the prompt's length
    linears: tuple[LinearReport, ...] = ()  # the kernel table
    attention: str = ""  # the attention backend


class Executor(ABC):
    """Runs steps on one or more workers. Chosen by `--distributed-executor-backend NAME`."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        """Loads the model and allocates KV memory on all workers."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """KV blocks that every worker holds."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """The model as the engine must know it."""

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks (source, destination) on every worker, all read before any is written."""

    @abstractmethod
    def execute(self, step: Step) -> StepOutput:
        """Computes one step: same order as `step.requests`. Raises only when the step as a whole failed."""

    def shutdown(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Frees workers and memory. May be called twice."""
