"""What clients may send. Unknown fields are kept and told of (fields.py); all others are checked, here or by the engine.

Fields that are named as in `SamplingParams` mean the same and are checked there.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, WithJsonSchema

MAX_PRIORITY = 2**31


def _prompt(value: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    kinds = {type(item) for item in value} if isinstance(value, list) else set()
    if isinstance(value, str) or kinds <= {str} or kinds <= {int}:
        if value == []:
            raise ValueError("the prompt is empty")
        if isinstance(value, str | list):
            return value
    if kinds == {list} and all(type(token) is int for item in value for token in item):
        return value
    raise ValueError("expected a string, a list of strings, a list of token ids, or a list of such lists")


Prompts = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            ]
        }
    ),
]


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Messages = Annotated[
    list[dict[str, Any]],  # checked by messages.py, which names places
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
                },
                "required": ["role", "content"],
            },
        }
    ),
]


class Lenient(BaseModel):
    """Keeps fields that it does not know in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Lenient):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Lenient):
    """How to sample, the same for every endpoint that generates."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = Field(None, description="Keep this many tokens at the end of the prompt.")
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    request_id: str | None = Field(None, description="Echoed in X-Request-Id if that header is not sent.")
    user: str | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatFields(Lenient):
    """A conversation, and how it becomes a prompt."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class ChatRequest(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = Field(None, description="Begin the answer with the final message, if that is continued.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ResponsesRequest(Lenient):
    """POST /v1/responses, as far as it is about text."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: str | None = None
    user: str | None = None


class TokenizeRequest(Lenient):
    """POST /tokenize: a `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Lenient):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]
