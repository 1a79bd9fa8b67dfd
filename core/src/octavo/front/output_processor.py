"""From token updates to text: detokenizing, stop strings, logprobs, and the outputs that users see."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

from octavo.engine.engine import Engine, SequenceUpdate
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.step import TokenLogprobs
from octavo.front.detokenizer import Detokenizer
from octavo.front.grammars import Grammars
from octavo.front.outputs import CompletionOutput, Logprob, LogprobsByToken, RequestMetrics, RequestOutput
from octavo.front.stop_strings import StopChecker
from octavo.front.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence of one request; `finished` marks its last. `output` is the request as far as it is by now."""

    output: RequestOutput
    sequence_index: int
    text: str
    finished: bool

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[self.sequence_index]


@dataclass(slots=True)
class _Sequence:
    completion: CompletionOutput
    detokenizer: Detokenizer
    stops: StopChecker


@dataclass(slots=True)
class _Tracked:
    params: SamplingParams
    output: RequestOutput
    special_stops: dict[int, str]
    sequences: list[_Sequence] = field(default_factory=list)


class OutputProcessor:
    """Sits between users and one engine: takes prompts as ids, gives back text as it becomes certain."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.grammars = Grammars(
            engine.registry.grammar_compilers,
            tokenizer,
            engine.model_info.vocab_size,
            engine.config.structured_outputs_backend,
            engine.registry.failure_notes(),
        )
        self._tracked: dict[str, _Tracked] = {}

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestOutput:
        """Hands a request to the engine and returns its output, which fills up step by step.

        Raises RequestError and keeps nothing where it is refused. `arrival_time` is when the user sent it, of
        `time.monotonic()`; without it, now.
        """
        structured = params.structured_outputs
        grammar = None if structured is None else self.grammars.compile(structured)
        special = {s: self.tokenizer.special_id(s) for s in params.stop}
        special_stops = {token: text for text, token in special.items() if token is not None}
        self.engine.add_request(
            request_id,
            prompt_token_ids,
            params,
            priority=priority,
            end_token_ids=self.tokenizer.end_token_ids,
            stop_token_ids=special_stops,
            bad_word_ids=self.tokenizer.bad_word_ids(params.bad_words),
            cache_salt=cache_salt,
            grammar=grammar,
        )
        output = RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            [],
            RequestMetrics(time.monotonic() if arrival_time is None else arrival_time),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        tracked = self._tracked[request_id] = _Tracked(params, output, special_stops)
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        for index in range(params.n):
            completion = CompletionOutput(index)
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            output.outputs.append(completion)
            tracked.sequences.append(
                _Sequence(
                    completion,
                    Detokenizer(decode, prompt_token_ids),
                    StopChecker(params.stop, params.include_stop_str_in_output),
                )
            )
        return output

    def abort(self, request_id: str) -> None:
        """Ends a request; its outputs so far stand, with finish reason "abort"."""
        self.engine.abort(request_id)
        if (tracked := self._tracked.get(request_id)) is not None:
            self._end(tracked, "abort")

    @property
    def has_unfinished(self) -> bool:
        return bool(self._tracked)

    def step(self) -> list[TextDelta]:
        """Runs one engine step and returns what became certain; a delta may be empty where a sequence ended.

        A request fails as a whole: where one of its sequences does, or where its tokens cannot be turned into text.
        """
        deltas: list[TextDelta] = []
        updates = self.engine.step()
        now = time.monotonic()
        for update in updates:
            if (tracked := self._tracked.get(update.request_id)) is None:
                continue
            failure = update.stop_reason if update.finish_reason == "error" else None
            try:
                deltas += self._apply(tracked, update, now)
            except Exception as error:  # tokenizers raise what they like
                logger.exception("request %s: its tokens cannot be turned into text; it is ended", update.request_id)
                failure = f"{type(error).__name__}: {error}"
            if failure is not None:
                self.engine.abort(update.request_id)
                deltas += self._end(tracked, "error", failure)
            elif all(s.completion.finished() for s in tracked.sequences):
                self._end(tracked, "stop")
        if not self.engine.has_unfinished:  # what is left was aborted at the engine itself
            for tracked in list(self._tracked.values()):
                deltas += self._end(tracked, "abort")
        return deltas

    def _end(self, tracked: _Tracked, reason: str, stop_reason: int | str | None = None) -> list[TextDelta]:
        """Forgets a request that the engine no longer runs; the sequences that this ends get a last, empty delta."""
        output = tracked.output
        del self._tracked[output.request_id]
        output.finished, output.metrics.finished_time = True, time.monotonic()
        ended = [completion for completion in output.outputs if not completion.finished()]
        for completion in ended:
            completion.finish_reason, completion.stop_reason = reason, stop_reason
        return [TextDelta(output, completion.index, "", True) for completion in ended]

    def _apply(self, tracked: _Tracked, update: SequenceUpdate, now: float) -> list[TextDelta]:
        """Books what one step did for one sequence; returns one delta, or none where no token came."""
        output, params = tracked.output, tracked.params
        sequence = tracked.sequences[update.sequence_index]
        completion = sequence.completion
        output.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None and output.prompt_logprobs is not None:
            # A preempted request computes its prompt again: positions already reported come first.
            known = len(output.prompt_logprobs) - 1
            start = update.prompt_logprobs_start
            output.prompt_logprobs += [self._named(p) for p in update.prompt_logprobs[max(known - start, 0) :]]
        if update.token_id < 0 and update.finish_reason is None:
            return []
        text, matched = "", None
        if update.token_id >= 0:
            metrics = output.metrics
            if metrics.first_token_time is None:
                metrics.first_token_time, metrics.first_scheduled_time = now, update.first_scheduled_time
            metrics.last_token_time = now
            completion.token_ids.append(update.token_id)
            if update.logprobs is not None and completion.logprobs is not None:
                completion.logprobs.append(self._named(update.logprobs))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + update.logprobs.entries[0][1]
            # The token that ended a sequence is not part of its text, unless the user wants to see stops.
            if update.finish_reason != "stop" or params.include_stop_str_in_output:
                delta = sequence.detokenizer.add(update.token_id)
                text, matched = sequence.stops.feed(delta, check=len(completion.token_ids) > params.min_tokens)
        reason, stop_reason = update.finish_reason, update.stop_reason
        if reason == "stop" and stop_reason is None:
            stop_reason = tracked.special_stops.get(update.token_id)
        if reason is not None and matched is None:
            more, matched = sequence.stops.feed(sequence.detokenizer.flush())
            text += more
            if matched is None:
                text += sequence.stops.flush()
        if matched is not None:
            if reason is None:
                self.engine.finish(update.request_id, update.sequence_index, "stop", matched)
            reason, stop_reason = "stop", matched
        completion.text += text
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        return [TextDelta(output, update.sequence_index, text, reason is not None)]

    def _named(self, logprobs: TokenLogprobs) -> LogprobsByToken:
        return {
            token: Logprob(logprob, rank, self.tokenizer.decode([token], skip_special_tokens=False))
            for token, logprob, rank in logprobs.entries
        }
