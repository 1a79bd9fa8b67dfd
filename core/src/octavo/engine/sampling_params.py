"""What a user may ask of one request, validated where it enters. No torch; the sampler reads these, nothing else sets them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from octavo.config import describe
from octavo.engine.grammar import StructuredOutputsParams
from octavo.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less gains nothing and overflows."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
    return value


Strings = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Ids = Annotated[tuple[int, ...], BeforeValidator(lambda value: () if value is None else value)]


class SamplingParams(BaseModel):
    """How to sample one request; names and meanings are vLLM's. Immutable. Raises RequestError on anything unusable.

    Order of effects: structured outputs, allowed ids and bad words, min_tokens, logit_bias, repetition penalty (prompt and
    output), frequency and presence penalties (output only), temperature, top_k, top_p, min_p. `logprobs` are of the raw logits,
    before all this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    n: int = Field(1, ge=1, description="Outputs for each prompt.", json_schema_extra={"short": "-n"})
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="0 (or below 1e-5) is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens that sum to this probability.")
    top_k: int = Field(0, ge=-1, description="Keep this many likeliest tokens; 0 or -1: all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted once from tokens in the output.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Subtracted for each occurrence in the output.")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Divides positive, multiplies negative logits of tokens in prompt or output."
    )
    seed: int | None = Field(None, description="Makes this request reproducible on its own.")
    max_tokens: int | None = Field(16, ge=1, description="Most output tokens; none: up to the model's limit.")
    min_tokens: int = Field(0, ge=0, description="Output tokens before any end or stop is allowed.")
    stop: Strings = Field((), description="Strings that end the output.")
    stop_token_ids: Ids = Field((), description="Token ids that end the output.")
    include_stop_str_in_output: bool = Field(False, description="Leave the stop string in the text.")
    ignore_eos: bool = Field(False, description="Go on after an end token.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    logprobs: int | None = Field(None, ge=-1, description="Logprobs of this many likeliest tokens; -1: all.")
    prompt_logprobs: int | None = Field(None, ge=-1, description="The same for each prompt token.")
    logit_bias: dict[int, float] = Field({}, description="Added to the logits of token ids, clamped to [-100, 100].")
    allowed_token_ids: Ids | None = Field(None, description="The only token ids that may be chosen.")
    bad_words: Strings = Field((), description="Words that may not appear.")
    structured_outputs: Annotated[StructuredOutputsParams | None, BeforeValidator(_json)] = Field(
        None,
        description='What the output must be, as JSON: {"regex": "[0-9]+"}, or json, choice, grammar, json_object.',
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]["loc"]
            raise RequestError(describe(error, "sampling parameter"), param=str(first[0]) if first else None) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if any(not text or len(text) > MAX_STOP_LENGTH for text in self.stop):
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words may not contain an empty string")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be chosen")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n = {self.n} with greedy sampling would give equal outputs; raise the temperature")
        if any(not -1e30 < bias < 1e30 for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must hold finite numbers")
        return self

    def clone(self) -> Self:
        return self.model_copy(deep=True)

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW
