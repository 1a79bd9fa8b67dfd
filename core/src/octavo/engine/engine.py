"""The engine: admits requests, runs the three-call step, and contains what goes wrong to the request it belongs to.

It knows token ids and nothing of text: tokenizing, stop strings and chat live in front of it. Not thread-safe: one thread
calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.executor import Executor
from octavo.engine.grammar import GrammarMatcher, GrammarState
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import EngineStats, kv_use
from octavo.engine.step import Step, StepOutput, TokenLogprobs
from octavo.engine.swap import SwapCosts
from octavo.errors import ConfigError, RequestError
from octavo.plugins import Registry

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SequenceUpdate:
    """What one step did for one sequence. `token_id` is -1 where only prompt logprobs came or the sequence ended in error."""

    request_id: str
    sequence_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 0  # of how many prompt tokens, after the first, logprobs were computed before these
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None


class Engine:
    """Scheduler and executor, and the step between them."""

    def __init__(self, config: EngineConfig, registry: Registry, executor: Executor | None = None) -> None:
        self.config, self.registry = config, registry
        if executor is None:
            name = config.distributed_executor_backend
            if name not in registry.executors:
                known = ", ".join(sorted(registry.executors))
                raise ConfigError(f"--distributed-executor-backend {name}: no such executor; installed: {known}")
            executor = registry.executors[name](config, registry)
        self.executor = executor
        self.model_info = executor.model_info
        self._costs = SwapCosts(self.model_info.bytes_per_block)
        self.scheduler = Scheduler(
            executor.num_blocks,
            config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            by_priority=config.scheduling_policy == "priority",
            num_host_blocks=0 if config.preemption_mode == "recompute" else executor.num_host_blocks,
            swap_costs=self._costs if config.preemption_mode == "auto" else None,
            sliding_window=self.model_info.sliding_window,
        )
        self._num_added = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        end_token_ids: frozenset[int] = frozenset(),
        stop_token_ids: Collection[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        cache_salt: str | None = None,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """Queues a request, validated against the model; raises RequestError and leaves the engine as it was.

        `end_token_ids` are ends that the tokenizer knows of, in addition to the model's own; `stop_token_ids` end the request
        even with `ignore_eos`, in addition to those of `params`. Requests of different `cache_salt` share no cached prefix, so
        that nobody learns from the time of an answer what others have sent. `grammar` is what `params.structured_outputs` was
        compiled to; it becomes the request's own.
        """
        self._validate(prompt_token_ids, params)
        if type(priority) is not int:
            raise RequestError(f"priority must be an integer, got {priority!r}", param="priority")
        num_prompt = len(prompt_token_ids)
        known = self.model_info.end_token_ids | {t for t in end_token_ids if t < self.model_info.vocab_size}
        ends = frozenset() if params.ignore_eos and grammar is None else known
        if grammar is None and params.structured_outputs is not None:
            raise RequestError("structured_outputs must be compiled first", param="structured_outputs")
        if grammar is not None and not known:
            raise RequestError(
                "structured outputs need an end token, and neither model nor tokenizer has one",
                param="structured_outputs",
            )
        special = frozenset(t for t in stop_token_ids if t < self.model_info.vocab_size)
        stretched = self.model_info.stretches_beyond is not None and num_prompt > self.model_info.stretches_beyond
        limit = self.model_info.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            priority=priority,
            limit_tokens=limit,
            end_token_ids=ends | special | frozenset(params.stop_token_ids),
            bad_word_ids=bad_word_ids,
            seed=self.config.seed * 1_000_003 + self._num_added if params.seed is None else params.seed,
            cache_root=(cache_salt, num_prompt if stretched else None),
            grammar=None if grammar is None else GrammarState(grammar, known),
        )
        self.scheduler.add(request)
        self._num_added += 1

    def _validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab, limit = self.model_info.vocab_size, self.model_info.max_model_len
        if not prompt:
            raise RequestError("the prompt is empty: it has no tokens", param="prompt")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the model's limit is {limit}, prompt and output together",
                param="prompt",
            )
        ids = {
            "prompt": prompt,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids,
        }
        for name, values in ids.items():
            if not all(isinstance(token, int) for token in values):
                raise RequestError(f"{name}: token ids must be integers", param=name)
            if values and not (min(values) >= 0 and max(values) < vocab):
                bad = next(v for v in values if not 0 <= v < vocab)
                raise RequestError(f"{name}: token id {bad} is outside the vocabulary (0 to {vocab - 1})", param=name)
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            most = self.config.max_logprobs
            if asked is not None and most != -1 and (asked == -1 or asked > most):
                raise RequestError(
                    f"{name} = {asked} exceeds max_logprobs ({most}); ask for less or raise that",
                    param=name,
                )
        if params.n > self.config.max_num_sequences_per_request:
            raise RequestError(
                f"n = {params.n} exceeds max_num_sequences_per_request ({self.config.max_num_sequences_per_request})",
                param="n",
            )

    def finish(self, request_id: str, sequence_index: int, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends one sequence of a request now; unknown or finished ones are left alone."""
        name = request_id if sequence_index == 0 else f"{request_id}:{sequence_index}"
        self.scheduler.finish(name, reason, stop_reason)

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request and frees their blocks."""
        for index in range(self.config.max_num_sequences_per_request):
            self.finish(request_id, index, "abort")

    @property
    def has_unfinished(self) -> bool:
        return len(self.scheduler) > 0

    def step(self) -> list[SequenceUpdate]:
        """Runs one step; empty where there was nothing to do."""
        step = self.scheduler.schedule()
        if not step.requests:
            assert not self.has_unfinished, "the scheduler has requests but schedules nothing"
            return []
        starts = {i: r.num_computed_tokens for i, r in enumerate(step.requests) if r.params.prompt_logprobs is not None}
        output = self._run(step)
        forks = self.scheduler.commit(step, output)
        updates = []
        for i, (request, token) in enumerate(zip(step.requests, output.token_ids, strict=True)):
            if token < 0 and i not in output.errors and i not in output.prompt_logprobs:
                continue
            sequences = [request, *forks.get(i, ())]
            logprobs = output.logprobs.get(i)
            for j, sequence in enumerate(sequences):
                update = SequenceUpdate(
                    sequence.parent_id,
                    sequence.sequence_index,
                    token if j == 0 else sequence.token_ids[-1],
                    logprobs=None if logprobs is None else logprobs[j],
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    first_scheduled_time=sequence.first_scheduled_time,
                )
                if j == 0:
                    update.prompt_logprobs = output.prompt_logprobs.get(i)
                    update.prompt_logprobs_start = starts.get(i, 0)
                updates.append(update)
        return updates

    def _run(self, step: Step) -> StepOutput:
        try:
            if step.block_copies or step.swap_out or step.swap_in:
                self.executor.move_blocks(step.swap_out, step.swap_in, step.block_copies)
        except Exception as error:
            logger.exception("blocks could not be moved; the step's requests are ended, swapped ones start over")
            self.scheduler.distrust_host()
            reason = f"{type(error).__name__}: {error}"
            return StepOutput([-1] * len(step.requests), errors=dict.fromkeys(range(len(step.requests)), reason))
        if step.total_tokens == len(step.requests):
            return self._execute(step)
        start = time.perf_counter()
        output = self._execute(step)
        if any(token >= 0 for token in output.token_ids):  # sampled, so all of it was waited for
            self._costs.note_prefill(step.total_tokens, time.perf_counter() - start)
        return output

    def _execute(self, step: Step) -> StepOutput:
        """Runs a step; where it fails as a whole, each request alone, so that only those that fail alone end."""
        try:
            return self.executor.execute(step)
        except Exception as error:
            if len(step.requests) == 1:
                logger.exception("request %s failed and is ended", step.requests[0].request_id)
                return StepOutput([-1], errors={0: f"{type(error).__name__}: {error}"})
            logger.warning("a step of %d requests failed (%s); running each alone", len(step.requests), error)
        whole = StepOutput([])
        for i, (request, num) in enumerate(zip(step.requests, step.num_scheduled_tokens, strict=True)):
            part = self._execute(Step([request], [num], [], num))
            whole.token_ids += part.token_ids
            for name in ("fork_token_ids", "logprobs", "prompt_logprobs", "errors"):
                if found := getattr(part, name):
                    getattr(whole, name)[i] = found[0]
        return whole

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; requests that run keep their blocks."""
        self.scheduler.pool.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counts in O(running requests)."""
        scheduler, pool, host = self.scheduler, self.scheduler.pool, self.scheduler.swap.host
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_host_blocks=host.num_blocks,
            num_free_host_blocks=host.num_free,
            kv=kv_use(pool, scheduler.running),
            scheduler=scheduler.stats,
        )

    def shutdown(self) -> None:
        self.executor.shutdown()
