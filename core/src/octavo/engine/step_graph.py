"""The contract of step capture: removing the cost of launching a forward's operations one by one. Eager is the default.

Provisional: it is not part of plugin API 1.0 until a first real capture has shown which static buffers it needs.
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
    def capture(self, step_function: StepFunction) -> StepFunction:
        """A function with the arguments and result of `step_function`, which it may record on first use and replay later."""


class EagerStep(StepGraph):
    """Runs every operation as Python reaches it."""

    name = "eager"
    rank = 0

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return None

    def capture(self, step_function: StepFunction) -> StepFunction:
        return step_function
