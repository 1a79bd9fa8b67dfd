"""The contract of step capture: removing the cost of launching a forward's operations one by one. Eager is the default.

Provisional: plugins/cpu captures by recording what its own kernels were asked to do; what CUDA graphs need is not known yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

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


class EagerStep(StepGraph):
    """Runs every operation as Python reaches it."""

    name = "eager"
    rank = 0

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return None

    def capture(self, step_function: StepFunction, max_tokens: int) -> StepFunction:
        return step_function
