"""One worker: the loaded model, its KV memory, and the forward that turns a `Step` into tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer
from octavo.attention.kv_format import AttentionStep, PagedKV
from octavo.attention.selection import select_for_layout
from octavo.config import EngineConfig
from octavo.engine.executor import ModelInfo
from octavo.engine.kv_plan import kv_layout, plan_host_blocks, plan_kv
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.step import Step, StepOutput, TokenLogprobs
from octavo.engine.step_graph import EagerStep, StepGraph
from octavo.errors import ask
from octavo.model.checkpoint import open_checkpoint
from octavo.model.decoder import attention_layers
from octavo.model.loader import load_model, progress
from octavo.model.plan import end_token_ids
from octavo.plugins import Registry

logger = logging.getLogger(__name__)

_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once: bounds memory at rows * vocabulary * 4 bytes."""


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """(tokens,), (tokens,) -> hidden (tokens, hidden_size)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size), fp32."""


def widest_window(layers: Sequence[AttentionLayer]) -> int | None:
    """The widest sliding window of a model; None where some layer sees everything."""
    windows = [layer.sliding_window for layer in layers]
    return None if None in windows else max(window for window in windows if window is not None)


class Runner:
    """Executes steps on this process's device."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        checkpoint = open_checkpoint(config.model, registry.checkpoint_readers)
        self.loaded = load_model(config, registry, checkpoint)
        plan = self.loaded.plan
        decoder = plan.config
        layout = kv_layout(plan, self.loaded.kv_scales)
        self.kv_plan = plan_kv(config, decoder, layout, registry.platform, weight_bytes=0)
        layers = attention_layers(decoder)
        attention = select_for_layout(
            layout, layers, registry.platform, registry.attention_backends, config.attention_backend
        )
        backend = attention.build()
        per_block = self.kv_plan.bytes_per_block
        host_blocks = plan_host_blocks(config, per_block, registry.platform)
        kv = PagedKV(layout, layers, self.kv_plan.num_blocks, registry.platform.device, host_blocks)
        graphs = [EagerStep] if config.enforce_eager else registry.step_graphs
        self._set_up(
            self.loaded.decoder, kv, backend, decoder.vocab_size, registry, config.max_num_batched_tokens, graphs
        )
        self.info = ModelInfo(
            vocab_size=decoder.vocab_size,
            max_model_len=self.kv_plan.max_model_len,
            end_token_ids=end_token_ids(checkpoint, decoder.vocab_size),
            stretches_beyond=decoder.rope.original_max_positions if decoder.rope.needs_prompt_lens else None,
            linears=tuple(self.loaded.linears),
            attention=str(attention),
            quantization=plan.quant.name if plan.quant else "",
            dtype=str(plan.dtype).removeprefix("torch."),
            kv_cache_dtype=self.kv_plan.format,
            bytes_per_block=per_block,
            sliding_window=widest_window(layers),
        )
        logger.info("%s", self.kv_plan)
        if host_blocks:
            logger.info(
                "swap space: %s blocks, %.0f MiB of host memory", f"{host_blocks:,}", host_blocks * per_block / 2**20
            )
        self._record(config)

    def _set_up(
        self,
        model: Model,
        kv: PagedKV,
        backend: AttentionBackend,
        vocab_size: int,
        registry: Registry,
        max_tokens: int,
        graphs: Sequence[type[StepGraph]],
    ) -> None:
        self.model, self.kv, self.backend = model, kv, backend
        self.device = registry.platform.device
        self.sampler = Sampler(vocab_size)
        ranked = sorted(graphs, key=lambda g: -g.rank)
        self.graph = next(g for g in ranked if ask(g.why_not, registry.platform) is None)()
        self.forward = self.graph.capture(model.forward, max_tokens)

    @classmethod
    def with_model(
        cls,
        model: Model,
        kv: PagedKV,
        backend: AttentionBackend,
        info: ModelInfo,
        registry: Registry,
        max_tokens: int = 2048,
    ) -> Runner:
        """A runner around a ready model, for tests with scripted ones."""
        runner = cls.__new__(cls)
        runner._set_up(model, kv, backend, info.vocab_size, registry, max_tokens, registry.step_graphs)
        runner.info = info
        return runner

    @torch.inference_mode()
    def _record(self, config: EngineConfig) -> None:
        """Records the sizes of steps that the graph wants to know before the first one."""
        if not (sizes := self.graph.sizes(config.max_num_seqs)):
            return
        with progress("recording steps", len(sizes), config.disable_progress) as advance:
            for size in sizes:
                if not self.graph.record(self.forward, *self._first_tokens(size)):
                    break
                advance()

    def _first_tokens(self, requests: int) -> tuple[Tensor, Tensor, AttentionStep]:
        """A step of so many requests whose first token is their only one, in whatever blocks there are."""
        size = self.kv.block_size
        width = -(-self.kv_plan.max_model_len // size)
        blocks = np.resize(np.arange(self.kv.num_blocks, dtype=np.int32), requests)
        tables = np.zeros((requests, width), dtype=np.int32)
        tables[:, 0] = blocks
        batch = self._attention_batch(
            [1] * requests, [1] * requests, tables, (blocks.astype(np.int64) * size).tolist(), [1] * requests
        )
        zeros = torch.zeros(requests, dtype=torch.int64, device=self.device)
        return zeros, zeros.clone(), AttentionStep(batch, self.backend, self.backend.plan(batch), self.kv)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutput:
        """Computes a step: K and V stored, tokens sampled for each request whose tokens are then all computed."""
        batch, token_ids, positions = self._batch(step)
        attention = AttentionStep(batch, self.backend, self.backend.plan(batch), self.kv)
        hidden = self.forward(token_ids, positions, attention)
        output = StepOutput([-1] * len(step.requests))
        ends = list(accumulate(step.num_scheduled_tokens))
        sampled = []
        for i, (request, num) in enumerate(zip(step.requests, step.num_scheduled_tokens, strict=True)):
            if request.num_computed_tokens + num == len(request.token_ids):
                sampled.append(i)
            if request.params.prompt_logprobs is not None and request.num_computed_tokens < request.num_prompt_tokens:
                output.prompt_logprobs[i] = self._prompt_logprobs(step, i, hidden[ends[i] - num : ends[i]])
        if sampled:
            logits = self.model.logits(hidden[self._placed([ends[i] - 1 for i in sampled], torch.int64)])
            rows = self.sampler.sample(logits, [step.requests[i] for i in sampled])
            for row, i in enumerate(sampled):
                if (error := rows.errors.get(row)) is not None:
                    output.errors[i] = error
                    continue
                output.token_ids[i], *forks = rows.token_ids[row]
                if forks:
                    output.fork_token_ids[i] = forks
                if (logprobs := rows.logprobs[row]) is not None:
                    output.logprobs[i] = logprobs
        return output

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int], seen: Callable[[Tensor], None] | None = None) -> Tensor:
        """The last hidden states (tokens, hidden_size) of one sequence, computed at once in the first KV blocks.

        For measurements, while nothing else runs. `seen` is as in `Decoder.forward`.
        """
        request = Request("probe", token_ids, SamplingParams())
        request.block_ids = list(range(-(-len(token_ids) // self.kv.block_size)))
        batch, ids, positions = self._batch(Step([request], [len(token_ids)], [], len(token_ids)))
        attention = AttentionStep(batch, self.backend, self.backend.plan(batch), self.kv)
        hidden: Tensor = self.loaded.decoder(ids, positions, attention, seen)
        return hidden

    def _batch(self, step: Step) -> tuple[AttentionBatch, Tensor, Tensor]:
        size = self.kv.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens = []
        tables = np.zeros(
            (len(step.requests), max(len(request.block_ids) for request in step.requests)), dtype=np.int32
        )
        for i, (request, num) in enumerate(zip(step.requests, step.num_scheduled_tokens, strict=True)):
            start = request.num_computed_tokens
            blocks = request.block_ids
            token_ids += request.token_ids[start : start + num]
            positions += range(start, start + num)
            slots += [blocks[p // size] * size + p % size for p in range(start, start + num)]
            tables[i, : len(blocks)] = blocks
            seq_lens.append(start + num)
        prompt_lens = [request.num_prompt_tokens for request in step.requests]
        batch = self._attention_batch(step.num_scheduled_tokens, seq_lens, tables, slots, prompt_lens)
        return batch, self._placed(token_ids, torch.int64), self._placed(positions, torch.int64)

    def _attention_batch(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        tables: NDArray[np.int32],
        slots: Sequence[int],
        prompt_lens: Sequence[int],
    ) -> AttentionBatch:
        return AttentionBatch(
            query_start_loc=self._placed([0, *accumulate(query_lens)]),
            seq_lens=self._placed(seq_lens),
            block_tables=self._placed(tables),
            slot_mapping=self._placed(slots, torch.int64),
            prompt_lens=self._placed(prompt_lens),
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            block_size=self.kv.block_size,
        )

    def _placed(self, numbers: Sequence[int] | NDArray[np.int32], dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device. To a GPU they are copied while this process goes on."""
        tensor = torch.as_tensor(numbers, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else tensor

    def _prompt_logprobs(self, step: Step, i: int, hidden: Tensor) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens that follow the scheduled positions (hidden: (scheduled, hidden_size))."""
        request = step.requests[i]
        first = request.num_computed_tokens + 1
        following = request.token_ids[first : min(first + len(hidden), request.num_prompt_tokens)]
        found: list[TokenLogprobs] = []
        for start in range(0, len(following), _LOGITS_ROWS):
            chunk = following[start : start + _LOGITS_ROWS]
            logits = self.model.logits(hidden[start : start + len(chunk)])
            found += self.sampler.prompt_logprobs(logits, chunk, request.params.prompt_logprobs or 0)
        return found
