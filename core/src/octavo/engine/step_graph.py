"""The contract of step capture: removing the cost of launching a forward's operations one by one. Eager is the default.

Two ways exist: plugins/cpu records what its own kernels are asked to do, in the first step, for steps of every shape;
plugins/paged_attn_cuda records CUDA graphs before the first step, one for each of some sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from octavo.platforms import Platform

StepFunction = Callable[..., Any]


class StepGraph(ABC):
    """One way to run a model's forward; the willing one of the highest `rank` is used."""

    name: ClassVar[str]
    rank: ClassVar[int]

    @classmethod
    @abstractmethod
    def why_not(cls, platform: Platform) -> str | None:
        """None if capture works here, else a sentence."""

    @abstractmethod
    def capture(self, step_function: StepFunction, max_tokens: int) -> StepFunction:
        """A function with the arguments and result of `step_function`, which it may record on first use and replay later.

        The arguments are token_ids and positions (tokens,) int64, at most `max_tokens`, and an AttentionStep. What a replay
        returns is valid until the next call.
        """

    def sizes(self, max_requests: int) -> Sequence[int]:
        """The sizes of steps, in requests of one token each, to `record` before the first step, up to `max_requests`."""
        return ()

    def record(self, step_function: StepFunction, token_ids: Tensor, positions: Tensor, attention: Any) -> bool:
        """Records such a step for `step_function`, which `capture` gave; its K and V go to slots that nobody uses yet.

        Its block tables are as wide as those of any step. False where it cannot be recorded, nor any other size.
        """
        return False


class EagerStep(StepGraph):
    """Runs every operation as Python reaches it."""

    name = "eager"
    rank = 0

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return None

    def capture(self, step_function: StepFunction, max_tokens: int) -> StepFunction:
        return step_function
