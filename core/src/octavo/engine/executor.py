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
    quantization: str = ""  # the format of the checkpoint; empty where it is not quantised
    dtype: str = ""  # what is computed in
    kv_cache_dtype: str = ""  # how K and V are stored
    bytes_per_block: int = 0  # that move when a KV block is copied to or from the host, on all workers together
    sliding_window: int | None = None  # where all layers have one: the widest. What lies before it is never read again


BlockPairs = Sequence[tuple[int, int]]


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

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that every worker has for swapping; 0 where it cannot."""
        return 0

    @abstractmethod
    def move_blocks(self, swap_out: BlockPairs, swap_in: BlockPairs, copies: BlockPairs) -> None:
        """Copies whole KV blocks (source, destination) on every worker, in this order.

        `swap_out` goes from device to host, then `swap_in` from host to device, then `copies` from device to device; of each
        kind, all are read before any is written. Raises where not all was done: then no host block is relied on any more.
        """

    @abstractmethod
    def execute(self, step: Step) -> StepOutput:
        """Computes one step: same order as `step.requests`. Raises only when the step as a whole failed."""

    def shutdown(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Frees workers and memory. May be called twice."""
