"""The default executor: one worker, in this process."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config import EngineConfig
from octavo.engine.executor import Executor, ModelInfo
from octavo.engine.runner import Runner
from octavo.engine.step import Step, StepOutput
from octavo.errors import ConfigError
from octavo.plugins import Registry


class InProcessExecutor(Executor):
    """Runs the model where the engine runs."""

    name = "uni"

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        if config.tensor_parallel_size != 1:
            raise ConfigError(
                f"--tensor-parallel-size {config.tensor_parallel_size} needs an executor with several workers; "
                "'uni' runs one (choose another with --distributed-executor-backend)"
            )
        self.runner = Runner(config, registry)

    @property
    def num_blocks(self) -> int:
        return self.runner.kv.num_blocks

    @property
    def model_info(self) -> ModelInfo:
        return self.runner.info

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.runner.kv.copy_blocks(pairs)

    def execute(self, step: Step) -> StepOutput:
        return self.runner.execute(step)
