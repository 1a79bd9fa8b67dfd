"""What answers in a terminal: a model in this process, or any server with OpenAI's API. Both stream the same pieces."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.front.llm import LLM

Message = Mapping[str, Any]
MAX_EVENT_BYTES = 1 << 24


@dataclass(slots=True)
class Answer:
    """What is known of an answer so far. Token counts are None where the server does not tell them."""

    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    started: float = 0.0  # seconds of time.monotonic()
    first: float | None = None
    ended: float = 0.0

    def add(self, text: str) -> None:
        if text and self.first is None:
            self.first = time.monotonic()
        self.text += text
        self.ended = time.monotonic()

    def summary(self) -> str:
        """Tokens, their speed after the first, and the time to the first; only what is known."""
        first = self.ended if self.first is None else self.first
        facts = []
        if self.output_tokens is not None:
            facts.append(f"{self.output_tokens} tokens")
            if self.output_tokens > 1 and self.ended > first:
                facts.append(f"{(self.output_tokens - 1) / (self.ended - first):.1f} tokens/s")
        facts.append(f"first after {(first - self.started) * 1000:.0f} ms")
        if self.prompt_tokens is not None:
            facts.append(f"prompt {self.prompt_tokens} tokens")
        if self.finish_reason not in (None, "stop"):
            facts.append(f"ended by {self.finish_reason}")
        return ", ".join(facts)


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by name, each in its own type; raises RequestError where these are none."""
    return SamplingParams(**values).model_dump(exclude_unset=True)


class Speaker(ABC):
    """Answers conversations and continues texts, streaming; `values` are sampling parameters by name."""

    label: str

    @abstractmethod
    def chat(self, messages: Sequence[Message], values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """Yields text of the answer as it comes and books it in `answer`. Leaving the iterator stops the answer."""

    @abstractmethod
    def complete(self, prompt: str, values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """The same for the continuation of a text."""

    @abstractmethod
    def close(self) -> None: ...


class LocalSpeaker(Speaker):
    """A model loaded into this process. Earlier turns are found in its prefix cache."""

    def __init__(self, config: EngineConfig) -> None:
        self._llm = LLM(config)
        self.label = config.model

    def chat(self, messages: Sequence[Message], values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        return self._stream({"prompt_token_ids": self._llm.tokenizer.chat(messages)}, values, answer)

    def complete(self, prompt: str, values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        return self._stream(prompt, values, answer)

    def _stream(self, prompt: Any, values: Mapping[str, Any], answer: Answer) -> Generator[str]:
        answer.started = time.monotonic()
        with closing(self._llm.stream([prompt], SamplingParams(**values))) as deltas:  # type: ignore[type-var]
            for delta in deltas:
                answer.prompt_tokens = len(delta.output.prompt_token_ids)
                answer.output_tokens = len(delta.completion.token_ids)
                answer.finish_reason = delta.completion.finish_reason
                answer.add(delta.text)
                yield delta.text
                if answer.finish_reason == "error":
                    raise RequestError(f"the answer failed: {delta.completion.stop_reason}")

    def close(self) -> None:
        self._llm.shutdown()


class RemoteSpeaker(Speaker):
    """A server with OpenAI's API under `url`, which ends with /v1 as SDKs want it. `model` None: the first it lists."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, timeout_s: float = 600) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: expected an address such as http://localhost:8000/v1")
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model()
        self.label = f"{self._model} at {self._url}"

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            listed = _parsed(response.read(MAX_EVENT_BYTES), "the list of models").get("data")
        names = [str(m["id"]) for m in listed or () if isinstance(m, Mapping) and "id" in m]
        if not names:
            raise ConfigError(f"{self._url}/models lists no model; name one with --model-name")
        return names[0]

    def chat(self, messages: Sequence[Message], values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        return self._stream("/chat/completions", {"messages": list(messages), **values}, answer)

    def complete(self, prompt: str, values: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        return self._stream("/completions", {"prompt": prompt, **values}, answer)

    def _stream(self, path: str, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        answer.started = time.monotonic()
        wanted = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **body}
        with self._open(path, wanted) as response:
            for event in _events(response):
                if error := event.get("error"):
                    raise RequestError(_message(error))
                if usage := event.get("usage"):
                    answer.prompt_tokens, answer.output_tokens = (
                        usage.get("prompt_tokens"),
                        usage.get("completion_tokens"),
                    )
                for choice in event.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    answer.add(text)
                    yield text

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raw = error.read(1 << 20)
            try:
                reason = _message(json.loads(raw)["error"])
            except (ValueError, KeyError, TypeError):
                reason = raw.decode(errors="replace")[:300]
            raise RequestError(f"{self._url}{path} answered {error.code}: {reason}") from None
        except OSError as error:
            reason = str(getattr(error, "reason", error))
            raise ConfigError(f"cannot reach {self._url}{path}: {reason}; is the server running?") from None

    def close(self) -> None:
        pass


def _events(response: Any) -> Iterator[Mapping[str, Any]]:
    """The JSON of server-sent events, until [DONE]; comments and keep-alives are skipped."""
    while line := response.readline(MAX_EVENT_BYTES):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            if data:
                yield _parsed(data, "an event")
    raise OctavoError("the server closed the stream before its end")


def _parsed(data: bytes, what: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OctavoError(f"{what} of the server is no JSON object: {data[:200]!r}")
    return value


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
