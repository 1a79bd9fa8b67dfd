"""From what clients send to token ids, on threads of their own: neither the event loop nor the engine waits for a tokenizer."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from octavo.errors import ConfigError, RequestError
from octavo.front.tokenizer import Tokenizer

T = TypeVar("T")
_WORKERS = 2
_MAX_RENDERED = 4
"""A rendered conversation may have this many times as many characters as the longest prompt could."""


class Prompter:
    """Tokenizes and renders. All methods are for the event loop; the work is done elsewhere."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, chat_template: str | None = None, template_timeout_s: float = 5
    ) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.chat_template = None if chat_template is None else _read_template(chat_template)
        self._timeout_s = template_timeout_s
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="octavo-tokenize")
        longest = max(map(len, tokenizer.hf_tokenizer.get_vocab()), default=1)
        self.max_characters = max_model_len * longest
        """More than this many characters can be no prompt: each token has so many at most."""

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", bounded: bool = True
    ) -> list[int]:
        """The ids of a text. With `bounded`, one that is too long for the model by its characters alone is refused untried."""
        if bounded:
            self._check_length(len(text), param)
        encode = self.tokenizer.encode if add_special_tokens else self.tokenizer.encode_plain
        return await self._run(lambda: encode(text))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return await self._run(lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[int]:
        """The ids of a conversation by the server's or the model's template, within limits of time and size.

        `template_kwargs` are a client's: values for the template, and none of the renderer's own arguments.
        """
        kwargs = dict(template_kwargs or {})
        own = inspect.signature(self.tokenizer.hf_tokenizer.apply_chat_template).parameters
        if refused := sorted(name for name in kwargs if name in own or name in ("self", "messages")):
            raise RequestError(
                f"chat_template_kwargs may not set '{refused[0]}'; the template is the server's (--chat-template)",
                param="chat_template_kwargs",
            )
        self._check_length(sum(len(str(message.get("content") or "")) for message in messages), "messages")
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        limit = _MAX_RENDERED * self.max_characters

        def render() -> list[int]:
            text = self.tokenizer.render(messages, **{**kwargs, **options})
            if len(text) > limit:
                raise RequestError(
                    f"the chat template made {len(text)} characters of the messages; the most are {limit}",
                    param="messages",
                )
            return self.tokenizer.encode(text) if add_special_tokens else self.tokenizer.encode_plain(text, "messages")

        return await self._run(render, self._timeout_s)

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self.max_characters:
            raise RequestError(
                f"{param} has {characters} characters; the model's limit is {self.max_model_len} tokens, which are at most "
                f"{self.max_characters} characters",
                param=param,
            )

    async def _run(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        loop = asyncio.get_running_loop()
        if timeout_s is None:
            return await loop.run_in_executor(self._pool, function)
        job = _Job(function)
        timer = loop.call_later(timeout_s, job.interrupt)
        try:
            return await loop.run_in_executor(self._pool, job.run)
        except _Overrun:
            raise RequestError(
                f"the chat template took more than {timeout_s:g} s (chat_template_timeout)", param="messages"
            ) from None
        finally:
            timer.cancel()


class _Overrun(BaseException):
    """Raised into a thread whose time is up; not an Exception, lest somebody on the way catches it."""


class _Job(Generic[T]):
    """A function that another thread can stop, at its next bytecode."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._overrun = False

    def run(self) -> T:
        with self._lock:
            if self._overrun:  # it waited for a thread all the time
                raise _Overrun
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            with self._lock:
                self._thread = None
            if self._overrun:
                for _ in range(1000):  # the exception, if it is still on its way, arrives here and not in the next job
                    pass

    def interrupt(self) -> None:
        with self._lock:
            self._overrun = True
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Overrun))


def _read_template(template: str) -> str:
    """A template given as a file's path or as itself."""
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {template}: cannot read the file: {error}") from None
