"""The Python front door: `LLM(model).generate(prompts, SamplingParams(...))`, named and shaped as vLLM's."""

from __future__ import annotations

import logging
import os
import reprlib
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from operator import index
from pathlib import Path
from typing import Any, Self

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.stats import EngineStats
from octavo.errors import ConfigError, RequestError
from octavo.front.output_processor import OutputProcessor, TextDelta
from octavo.front.outputs import RequestOutput
from octavo.front.tokenizer import Tokenizer
from octavo.model.checkpoint import open_checkpoint
from octavo.platforms import Platform
from octavo.plugins import Registry, discover

logger = logging.getLogger(__name__)

_WITHOUT_MEANING = {"trust_remote_code": (False,), "disable_log_stats": (False, True)}
"""Settings that scripts for vLLM give, with the values that ask for nothing here."""

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may have a "cache_salt": prompts of different salts
share nothing in the prefix cache, so that a tenant cannot tell from the time to the first token what others sent."""


class LLM:
    """A model ready to generate. Settings are those of `EngineConfig`, by name."""

    def __init__(self, model: str | EngineConfig, *, registry: Registry | None = None, **settings: Any) -> None:
        if isinstance(model, EngineConfig):
            if settings:
                raise ConfigError(f"settings beside a ready EngineConfig: {', '.join(settings)}; set them in that one")
            self.config = model
        else:
            ignored = [name for name, values in _WITHOUT_MEANING.items() if settings.get(name) in values]
            if ignored:
                logger.warning("ignored, for they mean nothing here: %s", ", ".join(ignored))
            self.config = EngineConfig.load({"model": model, **{k: v for k, v in settings.items() if k not in ignored}})
        self.registry = registry or registry_for(self.config)
        # before the weights: a bad one must not cost the minutes that those take
        self.tokenizer = tokenizer_for(self.config, self.registry)
        self.engine = Engine(self.config, self.registry)
        self._processor = OutputProcessor(self.engine, self.tokenizer)
        self._ids = count()
        self._closed = False
        self._mail: dict[str, deque[TextDelta]] = {}  # by request: what its caller has not taken yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Frees the workers and their memory; nothing can be generated afterwards."""
        self._closed = True
        self.engine.shutdown()

    def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.tokenizer.hf_tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; outputs are in the order of the prompts.

        `sampling_params` is one for all, or one a prompt. Raises RequestError before anything runs if any is unusable.
        """
        order = self._submit(prompts, sampling_params, priority)
        outputs: dict[str, RequestOutput] = {}
        shown = use_tqdm and not self.config.disable_progress
        with closing(self._deltas(order)) as deltas, _progress(len(order), shown) as show:
            for delta in deltas:
                outputs[delta.output.request_id] = delta.output
                show(delta)
        return [outputs[request_id] for request_id in order]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """Like `generate`, but yields text as it becomes certain. Leaving the iterator early aborts what is unfinished.

        The requests are queued, or refused, at once. Several streams may be read in turns, and between other calls.
        """
        return self._deltas(self._submit(prompts, sampling_params, None))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        `chat_template_kwargs` are further values that the template may ask for.
        """
        options = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        several = isinstance(messages, Sequence) and bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [{"prompt_token_ids": self.tokenizer.chat(c, **options)} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> EngineStats:
        """The engine now and since start: running, waiting and swapped requests, KV use, prefix hits, preemptions."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, also while requests run, which keep what they have. Always True, as vLLM's may be."""
        self.engine.reset_prefix_cache()
        return True

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[str]:
        if self._closed:
            raise ConfigError("this LLM has been shut down")
        if priority is not None and self.config.scheduling_policy != "priority":
            raise RequestError("priority needs --scheduling-policy priority", param="priority")
        listed = _as_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(listed)
        if not all(isinstance(one, SamplingParams) for one in each):
            raise RequestError("expected SamplingParams, or a list of one for each prompt", param="sampling_params")
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(each)} sampling_params", param="sampling_params")
        if priority is not None and (not isinstance(priority, Sequence) or len(priority) != len(listed)):
            raise RequestError(f"priority must be a list of {len(listed)} integers, one a prompt", param="priority")
        order: list[str] = []
        try:
            for i, (prompt, one) in enumerate(zip(listed, each, strict=True)):
                order.append(str(next(self._ids)))
                try:
                    text, ids = self._tokenize(prompt)
                    self._processor.add_request(
                        order[-1], text, ids, one, priority[i] if priority else 0, cache_salt=_cache_salt(prompt)
                    )
                except RequestError as error:
                    where = f"prompt {i}: " if len(listed) > 1 else ""
                    raise RequestError(f"{where}{error}", param=error.param) from None
        except BaseException:
            self._forget(order)
            raise
        return order

    def _deltas(self, order: Sequence[str]) -> Generator[TextDelta]:
        """The deltas of these requests as they come; a step that this drives leaves those of others in their mail.

        However the iterator ends, even one that was never used, unfinished requests are aborted.
        """
        mail: deque[TextDelta] = deque()
        self._mail |= dict.fromkeys(order, mail)

        def deltas() -> Generator[Any]:
            try:
                yield None
                unfinished = set(order)
                while unfinished or mail:
                    while not mail:
                        for delta in self._processor.step():
                            if (box := self._mail.get(delta.output.request_id)) is not None:
                                box.append(delta)
                    if mail[0].output.finished:
                        unfinished.discard(mail[0].output.request_id)
                    yield mail.popleft()
            finally:
                self._forget(order)

        started = deltas()
        next(started)  # closing a generator runs its `finally` only once it has begun
        return started

    def _forget(self, order: Sequence[str]) -> None:
        for request_id in order:
            self._processor.abort(request_id)
            self._mail.pop(request_id, None)

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The text, where there is one, and the ids of a prompt."""
        text = prompt
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text, _token_ids(prompt["prompt_token_ids"])
            if text is None:
                found = sorted(map(str, prompt))
                raise RequestError(f"a prompt dict needs 'prompt' or 'prompt_token_ids', got {found}", param="prompt")
        return (text, self.tokenizer.encode(text)) if isinstance(text, str) else (None, _token_ids(text))


def _cache_salt(prompt: Any) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt must be a string that is not empty, got {salt!r}", param="cache_salt")
    return salt


def _token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes | Mapping):
            raise TypeError
        return [index(token) for token in prompt]  # numbers of other libraries too
    except TypeError:
        found = reprlib.repr(prompt)
        raise RequestError(f"a prompt is text or a list of token ids, got {found}", param="prompt") from None


def registry_for(config: EngineConfig, *, plans_only: bool = False) -> Registry:
    """Discovers plugins as the settings say. For plans alone, a GPU that is asked for need not be here."""
    supposed = plans_only and config.device == "cuda" and Platform.detect().device != "cuda"
    platform = Platform.supposed() if supposed else Platform.detect(config.device)
    return discover(platform, disable=config.disable_plugins, strict=config.strict_plugins)


def tokenizer_for(config: EngineConfig, registry: Registry) -> Tokenizer:
    """The tokenizer of the folder that is set or of the model's; where files there are none, that of the weights' container."""
    folder = Path(config.tokenizer or config.model).expanduser()
    if config.tokenizer is not None or os.path.isfile(folder / "tokenizer.json"):
        return Tokenizer(folder)
    with closing(open_checkpoint(config.model, registry.checkpoint_readers)) as checkpoint:
        return Tokenizer(folder, checkpoint.tokenizer())


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several as a list; a flat list of ints is one prompt of token ids."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


class _progress:
    """A progress bar over finished requests on a terminal's stderr; silent elsewhere."""

    def __init__(self, total: int, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (enabled and sys.stderr.isatty()),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, tokens=0)
        self._tokens, self._finished = 0, set[str]()

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, delta: TextDelta) -> None:
        self._tokens += 1
        if delta.output.finished:
            self._finished.add(delta.output.request_id)
        self._bar.update(self._task, completed=len(self._finished), tokens=self._tokens)
