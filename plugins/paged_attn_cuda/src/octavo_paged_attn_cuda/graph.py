"""Steps of one token a request as CUDA graphs: recorded at the start for some sizes, replayed with one call.

A graph reads and writes where it did when it was recorded. So all that changes from step to step lies in buffers of its own,
filled before it is replayed: token ids, positions, block tables, and how the step is divided among programs. A smaller step
fills up with requests that store nothing and compute what nobody reads. Steps with prompts run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo import Platform, StepGraph
from octavo_paged_attn_cuda.attention import Plan, Share
from octavo_paged_attn_cuda.support import why_not
from octavo_paged_attn_cuda.work import graph_size

logger = logging.getLogger(__name__)


class Recording(Protocol):
    """A function's work, recorded: `replay` does it again, on the same memory."""

    def replay(self) -> None: ...


class CudaGraphs(StepGraph):
    """The graphs of one forward share memory, for they never run at once."""

    name = "cuda-graphs"
    rank = 20

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return why_not(platform, torch.float16)

    def capture(self, step_function: Callable[..., Any], max_tokens: int) -> GraphedForward:
        return GraphedForward(step_function, CudaRecorder())

    def sizes(self, max_requests: int) -> Sequence[int]:
        return sorted({graph_size(requests) for requests in range(1, max_requests + 1)}, reverse=True)

    def record(self, step_function: Any, token_ids: Tensor, positions: Tensor, attention: Any) -> bool:
        return bool(step_function.record(token_ids, positions, attention))


class CudaRecorder:
    """Records on a stream of its own, as CUDA wants it."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Recording]:
        """The tensor that each replay fills, and the recording. Runs the function twice: compiling cannot be recorded."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = self._pool or graph.pool()
        return result, graph


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One size: the arguments that its recording reads, and the result that it writes."""

    token_ids: Tensor
    positions: Tensor
    attention: Any
    hidden: Tensor
    recording: Recording

    def replay(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        num, own, given = len(token_ids), self.attention.plan, attention.plan
        batch, mine = given.batch, own.batch
        pairs = [
            (self.token_ids[:num], token_ids),
            (self.positions[:num], positions),
            (mine.slot_mapping[:num], batch.slot_mapping),
            (mine.seq_lens[:num], batch.seq_lens),
            (mine.prompt_lens[:num], batch.prompt_lens),
            (mine.block_tables[:num, : batch.block_tables.shape[1]], batch.block_tables),
        ]
        for window, (share,) in own.shares.items():
            (step,) = given.shares[window]
            pairs += [(share.items, step.items), (share.merges, step.merges)]
        for dtype in (torch.int32, torch.int64):  # one launch for all of a type
            targets, sources = zip(
                *((target, source) for target, source in pairs if target.dtype == dtype), strict=True
            )
            torch._foreach_copy_(targets, sources)
        if num < len(self.token_ids):
            mine.slot_mapping[num:].fill_(-1)
        self.recording.replay()
        return self.hidden[:num]


class GraphedForward:
    """A forward that replays what was recorded, where that serves the step. `reason` says why nothing could be."""

    def __init__(
        self,
        function: Callable[..., Any],
        recorder: Callable[[Callable[[], Tensor]], tuple[Tensor, Recording]],
    ) -> None:
        self._function, self._recorder = function, recorder
        self._recorded: dict[int, _Recorded] = {}
        self.reason: str | None = None

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        known = self._recorded.get(graph_size(len(token_ids)))
        if known is None or not _decodes(attention) or attention.kv is not known.attention.kv:
            hidden: Tensor = self._function(token_ids, positions, attention)
            return hidden
        return known.replay(token_ids, positions, attention)

    def record(self, token_ids: Tensor, positions: Tensor, attention: Any) -> bool:
        """Records the step for all of its size, or notes a `reason`."""
        size = len(token_ids)
        if (reason := _unfit(attention)) is not None:
            return self._give_up(reason)
        attention = replace(attention, plan=_whole(attention.plan, size))
        try:
            hidden, recording = self._recorder(lambda: self._function(token_ids, positions, attention))
        except RuntimeError as error:  # torch's, of what cannot be recorded
            return self._give_up(f"a step of {size} requests cannot be recorded: {error}")
        self._recorded[size] = _Recorded(token_ids, positions, attention, hidden, recording)
        return True

    def _give_up(self, reason: str) -> bool:
        self.reason = reason
        logger.warning("steps run eagerly, which costs time in each of them: %s", reason)
        return False


def _decodes(attention: Any) -> bool:
    return isinstance(attention.plan, Plan) and all(num == 1 for num in attention.batch.query_lens_list)


def _unfit(attention: Any) -> str | None:
    """Why a step cannot be recorded: its attention must be this plugin's, and store K and V, so that padding stores nothing."""
    if not isinstance(attention.plan, Plan):
        return "its attention is not this plugin's alone"
    for kv_format in attention.kv.layout.formats:
        encoding = kv_format.encoding(attention.backend.first)
        if encoding is None or not attention.backend.stores(attention.backend.first, encoding):
            return f"K and V in the format '{kv_format.name}' are written by it alone, padding too"
    return None


def _whole(plan: Plan, size: int) -> Plan:
    """The plan of every step of its size: all rows that one may have are launched.

    Of parts as long as a share there are at most as many as programs, and so of requests that are cut, which add one each.
    """

    def widest(share: Share) -> Share:
        programs = len(share.items) - size
        return replace(
            share,
            num_items=len(share.items),
            num_merges=min(size, programs),
            merged_rows=share.launch.tiling.group,
            num_slots=2 * programs,
        )

    return replace(plan, shares={window: tuple(map(widest, shares)) for window, shares in plan.shares.items()})
