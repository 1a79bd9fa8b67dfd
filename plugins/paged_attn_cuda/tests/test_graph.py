"""Recorded steps: the tokens of the eager forward, whatever fills up a record; what cannot be recorded stays eager.

There is no GPU here. A recording that does the same work again on the same memory, as a CUDA graph would, takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, AttentionRequest, Platform, SamplingParams, discover
from octavo.testing import gpu, tiny_model

pytest.importorskip("triton")

from octavo_paged_attn_cuda.attention import TritonAttention
from octavo_paged_attn_cuda.graph import CudaGraphs, GraphedForward
from octavo_paged_attn_cuda.ops import TritonOps
from octavo_paged_attn_cuda.support import interpreted
from octavo_paged_attn_cuda.work import graph_size

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are not interpreted here")
PROMPTS = [[5, 6, 7], list(range(10, 27)), [9]]


class OnCPU(TritonAttention):
    """The kernels, interpreted."""

    @classmethod
    def why_not(cls, request: AttentionRequest) -> str | None:
        return super().why_not(replace(request, platform=gpu((9, 0))))


class OpsOnCPU(TritonOps):
    @classmethod
    def why_not(cls, platform: Platform, dtype: torch.dtype) -> str | None:
        return super().why_not(gpu((9, 0)), dtype)


class Again:
    """Does the work once more, where it was done before."""

    def __init__(self, function: Callable[[], Tensor], result: Tensor) -> None:
        self.function, self.result, self.replays = function, result, 0

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.function())


def again(function: Callable[[], Tensor]) -> tuple[Tensor, Again]:
    result = function().fill_(float("nan"))
    return result, Again(function, result)


def refusing(function: Callable[[], Tensor]) -> tuple[Tensor, Again]:
    raise RuntimeError("operation not permitted when stream is capturing")


class Graphs(CudaGraphs):
    """The graphs, with a recorder that needs no GPU."""

    recorder = staticmethod(again)

    @classmethod
    def why_not(cls, platform: Platform) -> str | None:
        return super().why_not(gpu((9, 0)))

    def capture(self, step_function: Callable[..., Any], max_tokens: int) -> GraphedForward:
        return GraphedForward(step_function, self.recorder)


class Refused(Graphs):
    recorder = staticmethod(refusing)


def serve(
    folder: Path,
    graphs: type[CudaGraphs] = Graphs,
    prompts: list[list[int]] = PROMPTS,
    tokens: int = 3,
    **settings: Any,
) -> tuple[list[list[int]], Any]:
    """Greedy tokens of all prompts, served together, and the forward that computed them."""
    registry = discover(Platform.detect("cpu"))
    backends = (*registry.attention_backends, OnCPU)
    registry = replace(registry, attention_backends=backends, step_graphs=(graphs, *registry.step_graphs[:1]))
    registry = replace(registry, fused_ops=(registry.fused_ops[0],))
    options = {"num_blocks_override": 64, "disable_progress": True, "max_num_seqs": 4, "attention_backend": "triton"}
    with LLM(str(folder), registry=registry, **{**options, **settings}) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        forward = llm.engine.executor.runner.forward  # type: ignore[attr-defined]
    return [output.outputs[0].token_ids for output in outputs], forward


def replays(forward: GraphedForward) -> dict[int, int]:
    return {size: known.recording.replays for size, known in forward._recorded.items()}  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record launches as many programs as fill the GPU; interpreted ones take milliseconds each."""
    monkeypatch.setattr("octavo_paged_attn_cuda.attention.multiprocessors", lambda device: 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kv", ["auto", "fp8_per_token_head"])
def test_replayed_steps_give_the_tokens_of_others(folder: Path, kv: str) -> None:
    wanted, _ = serve(folder, kv_cache_dtype=kv, attention_backend="reference")
    found, forward = serve(folder, kv_cache_dtype=kv)
    assert found == wanted
    assert replays(forward) == {4: 2, 2: 0, 1: 0}, "three requests fill up to four; the first step has prompts"


def test_enforce_eager_records_nothing(folder: Path) -> None:
    _, forward = serve(folder, enforce_eager=True, prompts=[[5]], tokens=1)
    assert not isinstance(forward, GraphedForward)


def test_more_requests_than_were_recorded_run_eagerly(folder: Path) -> None:
    _, forward = serve(folder, prompts=[[5], [6], [7]], tokens=2, max_num_seqs=2)
    assert sum(replays(forward).values()) > 0
    recorded = forward._recorded.pop(2)
    assert recorded.hidden.shape[0] == 2
    assert forward.reason is None


@pytest.mark.parametrize(
    ("settings", "graphs", "reason"),
    [
        ({"attention_backend": "reference"}, Graphs, "its attention is not this plugin's alone"),
        ({"kv_cache_dtype_map": "0=float16,*=auto"}, Graphs, "its attention is not this plugin's alone"),
        ({}, Refused, "a step of 4 requests cannot be recorded: operation not permitted when stream is capturing"),
    ],
    ids=["another backend", "two formats", "refused by CUDA"],
)
def test_what_cannot_be_recorded_stays_eager_and_says_why(
    folder: Path, settings: dict[str, Any], graphs: type[CudaGraphs], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, forward = serve(folder, graphs, prompts=[[5]], tokens=1, **settings)
    assert forward.reason == reason
    assert [r.message for r in caplog.records if "eagerly" in r.message] == [
        f"steps run eagerly, which costs time in each of them: {reason}"
    ]
    assert forward._recorded == {}


def test_a_format_that_alone_can_write_is_not_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnCPU, "stores", lambda *_: False)
    _, forward = serve(folder, prompts=[[5]], tokens=1)
    assert forward.reason == "K and V in the format 'auto' are written by it alone, padding too"


def test_sizes_cover_all_numbers_of_requests() -> None:
    sizes = CudaGraphs().sizes(300)
    assert sizes[0] >= 300
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert {graph_size(requests) for requests in range(1, 301)} == set(sizes)
    assert all(requests <= graph_size(requests) <= max(requests + 31, 2) for requests in range(1, 301))
    assert len(sizes) < 30
