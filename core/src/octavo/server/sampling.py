"""From a request's fields to SamplingParams."""

from __future__ import annotations

from typing import Any

from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.server.core import Server
from octavo.server.schema import ChatRequest, CompletionRequest, SamplingFields

_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
COMPLETION_TOKENS = 16
"""Of /v1/completions without max_tokens, as OpenAI has it. A chat goes on to the model's limit."""


def sampling_params(request: SamplingFields, server: Server) -> SamplingParams:
    """What the request says, else --generation-config, else the API's defaults. Raises RequestError that names the field."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    values = dict(server.sampling_defaults)
    default_tokens = values.pop("max_tokens", None)
    values |= {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    values["max_tokens"] = request.max_tokens
    if isinstance(request, ChatRequest):
        values["max_tokens"] = _chat_tokens(request)
        values["logprobs"] = _chat_logprobs(request)
    elif isinstance(request, CompletionRequest):
        values["logprobs"] = request.logprobs
        if request.echo:
            if request.logprobs is not None and request.prompt_logprobs is None:
                values["prompt_logprobs"] = request.logprobs
            if request.max_tokens == 0:  # the prompt alone, to be scored: one token is computed and not shown
                values["max_tokens"] = 1
        if values["max_tokens"] is None and default_tokens is None:
            values["max_tokens"] = COMPLETION_TOKENS
    if values["max_tokens"] is None:
        values["max_tokens"] = default_tokens
    priority = request.priority
    if priority and server.config.scheduling_policy != "priority":
        raise RequestError("priority needs --scheduling-policy priority", param="priority")
    return SamplingParams(**values)


def _chat_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens ({old}) and max_completion_tokens ({new}) mean the same and differ; send one of them",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return request.top_logprobs or 0


def _logit_bias(given: dict[str, float]) -> dict[int, Any]:
    biases: dict[int, Any] = {}
    for token, bias in given.items():
        try:
            biases[int(token)] = bias
        except ValueError:
            raise RequestError(f"logit_bias: '{token[:50]}' is not a token id", param="logit_bias") from None
    return biases
