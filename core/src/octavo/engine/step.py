"""What passes between scheduler and executor in one step. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.request import Request


@dataclass(slots=True)
class Step:
    """One forward: for `requests[i]`, tokens num_computed_tokens ... + `num_scheduled_tokens[i]` are to be computed.

    The requests are read, never changed, by executors; one that has workers elsewhere sends them what it needs.
    The engine has whole blocks moved before the step is executed, pairs of (source, destination): first all of `swap_out`
    (device, host), then all of `swap_in` (host, device), then all of `block_copies` (both on the device). So what is swapped
    out makes room for what is swapped in or copied, and what was swapped in may be copied.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    total_tokens: int = 0
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs at one position: the chosen token's first, then the likeliest ones, each (token id, logprob, rank from 1)."""

    entries: list[tuple[int, float, int]]


@dataclass(slots=True)
class StepOutput:
    """What a step sampled. `token_ids[i]` belongs to `requests[i]` of the step; -1 where its prompt is not finished.

    The rest is sparse, by index into the step. `fork_token_ids`: first tokens of the further sequences of a request with
    n > 1. `logprobs`: one entry a sampled token (forks included, in order). `prompt_logprobs`: for the scheduled prompt
    positions, each predicting the next prompt token. `errors`: requests that must end, and why.
    """

    token_ids: list[int]
    fork_token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
