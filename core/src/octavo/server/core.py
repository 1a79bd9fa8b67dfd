"""What all routes share: the engine's thread, settings, tokenizing, admission, and the defaults of sampling."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.admission import Admission
from octavo.server.engine_thread import EngineThread
from octavo.server.errors import APIError
from octavo.server.prompts import Prompter
from octavo.server.settings import ServerSettings
from octavo.server.tools.choice import find_parser
from octavo.server.tools.parser import ToolParser

_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Of generation_config.json: what counts here, and our names for it."""


@dataclass(slots=True)
class Server:
    """One server's parts; `app.state.server`."""

    thread: EngineThread
    settings: ServerSettings
    prompter: Prompter
    admission: Admission
    names: tuple[str, ...]
    sampling_defaults: Mapping[str, Any]
    tool_parser: type[ToolParser] | None = None  # of --tool-call-parser
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    rejections: Counter[str] = field(default_factory=Counter)  # refused requests, by the error's code
    background: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)  # run beside the server
    metrics: Any = None

    @property
    def config(self) -> EngineConfig:
        return self.thread.engine.config

    @property
    def max_model_len(self) -> int:
        return self.thread.engine.model_info.max_model_len

    @property
    def model_name(self) -> str:
        """The name that answers and metrics carry."""
        return self.names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with; APIError 404 for one that is not served."""
        if name and name not in self.names:
            raise APIError(
                f"the model '{name[:200]}' is not served here; this server has {', '.join(self.names)}",
                404,
                param="model",
                code="model_not_found",
            )
        return name or self.names[0]


def make_server(thread: EngineThread, settings: ServerSettings) -> Server:
    """Puts the parts together; raises ConfigError for settings that cannot be honoured."""
    config = thread.engine.config
    seats = config.max_num_seqs
    limit = min(thread.engine.model_info.max_model_len, thread.engine.scheduler.capacity_tokens)
    return Server(
        thread,
        settings,
        Prompter(thread.tokenizer, limit, settings.chat_template, settings.chat_template_timeout),
        Admission(
            seats,
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
            lambda: thread.stats().num_waiting > 0,
        ),
        settings.served_model_name or (Path(config.model).expanduser().resolve().name or config.model,),
        sampling_defaults(config.model, settings),
        find_parser(
            thread.engine.registry.tool_parsers,
            settings.tool_call_parser,
            str(settings.chat_template or thread.tokenizer.hf_tokenizer.chat_template or ""),
        ),
    )


def sampling_defaults(model: str, settings: ServerSettings) -> dict[str, Any]:
    """What requests that say nothing are sampled with, by the names of SamplingParams."""
    found: dict[str, Any] = {}
    if settings.generation_config != "vllm":
        folder = model if settings.generation_config == "auto" else settings.generation_config
        path = Path(folder).expanduser() / "generation_config.json"
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot read the generation config: {error}") from None
        elif settings.generation_config != "auto":
            raise ConfigError(f"--generation-config {folder}: there is no generation_config.json")
    overrides = dict(settings.override_generation_config)
    if unknown := sorted(set(overrides) - _DEFAULTS.keys() - set(_DEFAULTS.values())):
        raise ConfigError(f"--override-generation-config: '{unknown[0]}' is none of {', '.join(_DEFAULTS)}")
    merged = {**found, **overrides} if isinstance(found, dict) else overrides
    names = {**{ours: ours for ours in _DEFAULTS.values()}, **_DEFAULTS}
    return {names[key]: value for key, value in merged.items() if key in names and value is not None}
