"""What a request returns, in the shapes and names of vLLM, so that scripts port by their import line."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """A token's log probability, its rank among all tokens (1 is likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]
"""Logprobs at one position: token id -> Logprob; always holds the chosen token."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's outputs, complete or as far as it is."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsByToken] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop string or stop token id that matched, or the error

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request with all its outputs. `num_cached_tokens` prompt tokens were found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
