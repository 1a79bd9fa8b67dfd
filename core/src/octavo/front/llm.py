"""The Python front door: `LLM(model).generate(prompts, SamplingParams(...))`, named and shaped as vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.engine import Engine, EngineStats
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.front.output_processor import OutputProcessor, TextDelta
from octavo.front.outputs import RequestOutput
from octavo.front.tokenizer import Tokenizer
from octavo.platforms import Platform
from octavo.plugins import Registry, discover

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLM:
    """A model ready to generate. Settings are those of `EngineConfig`, by name."""

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        quantization: str | None = None,
        dtype: str = "auto",
        registry: Registry | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            self.config = model
        else:
            given = {"model": model, **settings}
            if quantization is not None:
                given["quantization"] = quantization
            if dtype != "auto":
                given["dtype"] = dtype
            self.config = EngineConfig.load(given)
        self.registry = registry or registry_for(self.config)
        self.engine = Engine(self.config, self.registry)
        self.tokenizer = Tokenizer(self.config.tokenizer or self.config.model)
        self._processor = OutputProcessor(self.engine, self.tokenizer)
        self._ids = count()

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
        outputs: dict[str, RequestOutput] = {}
        order = self._submit(prompts, sampling_params, priority)
        try:
            with _progress(len(order), use_tqdm and not self.config.disable_progress) as show:
                while self._processor.has_unfinished:
                    for delta in self._processor.step():
                        outputs[delta.output.request_id] = delta.output
                        show(delta)
        except BaseException:
            self._abort(order)
            raise
        return [outputs[request_id] for request_id in order]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Like `generate`, but yields text as it becomes certain. Leaving the iterator early aborts what is unfinished."""
        order = self._submit(prompts, sampling_params, None)
        try:
            while self._processor.has_unfinished:
                yield from self._processor.step()
        finally:
            self._abort(order)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [{"prompt_token_ids": self.tokenizer.chat(c, **template_options)} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> EngineStats:
        """Counters of the engine: running and waiting requests, KV use, prefix hits, preemptions."""
        return self.engine.stats()

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[str]:
        listed = _as_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(each)} sampling_params", param="sampling_params")
        if priority is not None and len(priority) != len(listed):
            raise RequestError(f"{len(listed)} prompts but {len(priority)} priorities", param="priority")
        order: list[str] = []
        try:
            for i, (prompt, one) in enumerate(zip(listed, each, strict=True)):
                request_id = str(next(self._ids))
                text, ids = self._tokenize(prompt)
                try:
                    self._processor.add_request(request_id, text, ids, one, priority[i] if priority else 0)
                except RequestError as error:
                    where = f"prompt {i}: " if len(listed) > 1 else ""
                    raise RequestError(f"{where}{error}", param=error.param) from None
                order.append(request_id)
        except BaseException:
            self._abort(order)
            raise
        return order

    def _abort(self, order: Sequence[str]) -> None:
        for request_id in order:
            self._processor.abort(request_id)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self._tokenize(prompt["prompt"])
            raise RequestError(
                f"a prompt dict needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}", param="prompt"
            )
        ids = list(prompt)
        if not all(isinstance(token, int) for token in ids):
            raise RequestError("a prompt is text or a list of token ids", param="prompt")
        return None, ids


def registry_for(config: EngineConfig) -> Registry:
    """Discovers plugins as the settings say."""
    return discover(Platform.detect(config.device), disable=config.disable_plugins, strict=config.strict_plugins)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; a flat list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


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
        self._tokens = 0

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, delta: TextDelta) -> None:
        self._tokens += 1
        self._bar.update(self._task, advance=int(delta.output.finished), tokens=self._tokens)
