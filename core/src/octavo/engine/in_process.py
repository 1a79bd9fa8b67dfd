"""The default executor: one worker, in this process."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.engine.executor import BlockPairs, Executor, ModelInfo
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

    @property
    def num_host_blocks(self) -> int:
        return self.runner.kv.num_host_blocks

    def move_blocks(self, swap_out: BlockPairs, swap_in: BlockPairs, copies: BlockPairs) -> None:
        self.runner.kv.swap_out(swap_out)
        self.runner.kv.swap_in(swap_in)
        self.runner.kv.copy_blocks(copies)

    def execute(self, step: Step) -> StepOutput:
        return self.runner.execute(step)
