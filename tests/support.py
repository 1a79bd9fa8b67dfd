"""Engines for tests: hostile memory around real models, and scripted models behind the whole front end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from octavo import (
    LLM,
    EngineConfig,
    KVGeometry,
    ModelInfo,
    Platform,
    Registry,
    SamplingParams,
    Step,
    discover,
)
from octavo.attention.backend import AttentionRequest
from octavo.attention.kv_format import AttentionStep, PagedKV, PlainKV
from octavo.attention.reference import ReferenceAttention
from octavo.engine.in_process import InProcessExecutor
from octavo.engine.request import Request, Status
from octavo.engine.runner import Runner
from octavo.testing import ScriptedModel, hostile, tiny_tokenizer

VOCAB_SIZE = 288


def registry() -> Registry:
    return discover(Platform.detect("cpu"), disable=tuple(filter(None, [os.environ.get("OCTAVO_DISABLE_PLUGINS")])))


def make_hostile(llm: LLM) -> LLM:
    """Fills every free block that holds no cached prefix, and every free host block, with NaN before each step."""
    engine = llm.engine
    scheduler, step = engine.scheduler, engine.step
    pool, host = scheduler.pool, scheduler.swap.host

    def poisoned_step() -> object:
        free = [b for b in range(pool.num_blocks) if pool.ref_counts[b] == 0 and pool._nodes[b] is None]
        hostile(engine.executor.runner.kv, free)
        hostile(engine.executor.runner.kv, [b for b in range(host.num_blocks) if host.ref_counts[b] == 0], host=True)
        pool.check([r.held_block_ids for r in scheduler])
        scheduler.swap.check([r for r in scheduler if r.status is Status.SWAPPED])
        return step()

    engine.step = poisoned_step
    return llm


def scripted_llm(
    folder: Path, scripts: Mapping[Sequence[int], Sequence[int]], *, words: Sequence[str] = (), **settings: object
) -> LLM:
    """An LLM whose model answers each prompt of `scripts` with its output, through hostile paged memory.

    `words` are extra tokens of the tokenizer, from id 259.
    """
    tiny_tokenizer(folder, words)
    model = ScriptedModel(scripts, VOCAB_SIZE)

    class ScriptedExecutor(InProcessExecutor):
        name = "scripted"

        def __init__(self, config: EngineConfig, registry: Registry) -> None:
            layers = list(model.attention_layers)
            layer = layers[0]
            geometry = KVGeometry(1, layer.kv_heads, layer.head_dim, config.block_size, torch.float32)
            kv = PagedKV(PlainKV(geometry), layers, config.num_blocks_override or 64, "cpu")
            request = AttentionRequest(layers, torch.float32, config.block_size, torch.float32, registry.platform)
            info = ModelInfo(VOCAB_SIZE, config.max_model_len or 512, frozenset([model.end_token_id]))
            self.runner = Runner.with_model(model, kv, ReferenceAttention(request), info, registry)

    installed = replace(registry(), executors={"scripted": ScriptedExecutor})
    llm = LLM(str(folder), registry=installed, distributed_executor_backend="scripted", **settings)
    return make_hostile(llm)


@torch.inference_mode()
def all_logits(llm: LLM, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits (tokens, vocab_size) at every position of a sequence, by the engine's own model, memory and kernels."""
    runner = llm.engine.executor.runner
    request = Request("probe", token_ids, SamplingParams())
    request.block_ids = list(range(-(-len(token_ids) // llm.config.block_size)))
    step = Step([request], [len(token_ids)], [], len(token_ids))
    batch, ids, positions = runner._batch(step)
    attention = AttentionStep(batch, runner.backend, runner.backend.plan(batch), runner.kv)
    return runner.model.logits(runner.model.forward(ids, positions, attention))
