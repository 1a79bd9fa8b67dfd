"""The tape: the native calls of one forward, recorded once, then replayed in one call, whatever the step's batch is.

While recording, every kernel of this plugin computes as always and is written down as well, with room for the most tokens that
a step may have. What changes from step to step (token ids, positions, the batch) is looked up at replay. A torch operation that
computes would be missing from the tape: a dispatch mode sees it, and the forward stays eager.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import StepGraph
from octavo_cpu.attention import Plan
from octavo_cpu.native import native, recording, why_not

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo import Platform

logger = logging.getLogger(__name__)


class Tape(StepGraph):
    """A whole forward in one native call, inside one parallel region."""

    name = "tape"
    rank = 30

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return why_not(platform)

    def capture(self, step_function: Callable[..., Any], max_tokens: int) -> Callable[..., Any]:
        return TapedForward(step_function, max_tokens)


class TapedForward:
    """A forward that records itself in its first call. `reason` says why it stayed eager, if it did."""

    def __init__(self, step_function: Callable[..., Any], max_tokens: int) -> None:
        self._function, self._max_tokens = step_function, max_tokens
        self._program: Any = None
        self._kv: Any = None
        self._hidden: Tensor | None = None
        self._arena: _Arena | None = None
        self.reason: str | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        plan, tokens = attention.plan, len(token_ids)
        if self._program is None and self.reason is None and 0 < tokens <= self._max_tokens:
            return self._record(token_ids, positions, attention)
        if self._hidden is None or attention.kv is not self._kv or not 0 < tokens <= self._max_tokens:
            eager: Tensor = self._function(token_ids, positions, attention)
            return eager
        native().replay(self._program, tokens, token_ids.data_ptr(), positions.data_ptr(), plan.handle)
        return self._hidden[:tokens]

    def _record(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        tokens = len(token_ids)
        if not isinstance(attention.plan, Plan):
            return self._stay_eager("its attention is not this plugin's", token_ids, positions, attention)
        program, arena, seen = native().Program(self._max_tokens), _Arena(self._max_tokens), _Watch()
        native().begin(program, tokens, token_ids.data_ptr(), positions.data_ptr(), attention.plan.handle)
        try:
            with recording(arena.take), seen:
                hidden: Tensor = self._function(token_ids, positions, attention)
        finally:
            native().end()
        if seen.computed is not None:
            self._give_up(f"torch computes {seen.computed} in it")
            return hidden
        whole = arena.whole(hidden)
        if whole is None:
            self._give_up("its result is not a kernel's of this plugin")
            return hidden
        self._program, self._arena, self._hidden, self._kv = program, arena, whole, attention.kv
        # What torch still computes in a step is small. With threads of its own it would leave one that spins, for
        # milliseconds, on a processor of the tape's.
        torch.set_num_threads(1)
        logger.info("the forward is a tape of %d operations on %d threads", len(program), native().threads())
        return hidden

    def profile(self, token_ids: Tensor, positions: Tensor, attention: Any) -> list[tuple[str, float]]:
        """Seconds of each operation of a replay, in order; empty where there is no tape."""
        if self._program is None:
            return []
        where = (token_ids.data_ptr(), positions.data_ptr(), attention.plan.handle)
        measured: list[tuple[str, float]] = native().profile(self._program, len(token_ids), *where)
        return measured

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        logger.warning("the forward runs eagerly, which costs time in each step: %s", reason)

    def _stay_eager(self, reason: str, *arguments: Any) -> Tensor:
        self._give_up(reason)
        hidden: Tensor = self._function(*arguments)
        return hidden


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch computes: everything but views and empty memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: for that torch would import its compiler, which takes a second and 140 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if self.computed is None and not func.is_view and not name.startswith("aten.empty"):
            self.computed = name
        return func(*args, **(kwargs or {}))


class _Arena:
    """Memory of a tape's intermediate results: taken again as soon as no tensor needs it, as it will be at each replay."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._by_address: dict[int, np.ndarray[Any, Any]] = {}

    def take(self, columns: int) -> Tensor:
        """fp32 (max rows, columns)."""
        spare = self._free.setdefault(columns, [])
        memory = spare.pop() if spare else _aligned(self._max_rows * columns)
        lent = memory.view()
        weakref.finalize(lent, spare.append, memory).atexit = False
        tensor = torch.from_numpy(lent)
        self._by_address[tensor.data_ptr()] = memory
        return tensor.view(self._max_rows, columns)

    def whole(self, part: Tensor) -> Tensor | None:
        """All rows of what some rows were cut from."""
        memory = self._by_address.get(part.data_ptr())
        return None if memory is None else torch.from_numpy(memory).view(self._max_rows, part.shape[1])


def _aligned(count: int) -> np.ndarray[Any, Any]:
    raw = np.empty(count * 4 + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.float32)
