"""The tape: the same bits as the eager forward, whatever the batch; what cannot be recorded stays eager and says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.testing import tiny_model
from octavo_cpu import tape
from octavo_cpu.native import native
from octavo_cpu.tape import TapedForward, _Watch

pytestmark = pytest.mark.skipif(native() is None, reason="octavo-cpu has no native module here")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [[5, 6, 7], list(range(10, 50)), [9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native().threads()
    native().set_threads(2)
    yield
    native().set_threads(before)


def serve(folder: Path, eager: bool = False, **settings: Any) -> tuple[list[Any], TapedForward]:
    """Tokens and logprobs of all prompts, served together, and the forward that computed them."""
    options = {"num_blocks_override": 64, "disable_progress": True, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with LLM(str(folder), **{**options, **settings}) as llm:
        forward = llm.engine.executor.runner.forward  # type: ignore[attr-defined]
        assert isinstance(forward, TapedForward)
        if eager:
            forward.reason = "a test wants it so"
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found = [
            (o.outputs[0].token_ids, [{t: p.logprob for t, p in lp.items()} for lp in o.outputs[0].logprobs])
            for o in outputs
        ]
    return found, forward


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantize_weights": "int4"},
        {"quantize_weights": "int8"},
        {"quantize_weights": "int8,embed_tokens=int8,lm_head=int8", "cpu_activations": "int8"},
        {"kv_cache_dtype": "float16"},
    ],
    ids=str,
)
def test_a_tape_gives_the_bits_of_the_eager_forward(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(tmp_path)
    taped, forward = serve(tmp_path, **settings)
    assert forward.reason is None
    assert len(forward._program) > 10
    eager, _ = serve(tmp_path, eager=True, **settings)
    assert taped == eager


def test_torch_leaves_the_processors_to_the_tape(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        serve(tmp_path, eager=True)
        assert torch.get_num_threads() == 3
        serve(tmp_path)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_recording_does_not_import_torchs_compiler() -> None:
    assert _Watch.__torch_dispatch__.__code__.co_filename == tape.__file__


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    found = []
    for count in (1, 2, 3):
        native().set_threads(count)
        found.append(serve(tmp_path, quantize_weights="int4")[0])
    assert found[0] == found[1] == found[2]


def test_a_third_partys_linear_keeps_the_forward_eager_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        found, forward = serve(tmp_path, linear_kernels={"*down_proj": "dense"})
    assert forward.reason is not None
    assert "torch computes aten." in forward.reason
    assert [r.message for r in caplog.records if "eagerly" in r.message] == [
        f"the forward runs eagerly, which costs time in each step: {forward.reason}"
    ]
    assert len(found[0][0]) == GREEDY.max_tokens


def test_the_reference_attention_keeps_the_forward_eager(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    _, forward = serve(tmp_path, attention_backend="reference")
    assert forward.reason == "its attention is not this plugin's"


def test_an_operation_that_fails_while_recording_leaves_no_tape(tmp_path: Path) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise ValueError("broken")

    tiny_model(tmp_path)
    with LLM(str(tmp_path), num_blocks_override=64, disable_progress=True) as llm:
        forward = llm.engine.executor.runner.forward  # type: ignore[attr-defined]
        whole = forward._function
        forward._function = broken
        (output,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        forward._function = whole
        (output,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
        assert forward._program is not None
