"""Every setting of the HTTP server, defined once, as those of the engine are; names are vLLM's where the thing is the same."""

from __future__ import annotations

import ssl
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from octavo.config import HumanInt, Names, Settings, Text


def _keys(value: Any) -> Any:
    """Reads "a,b", a list, or what argparse collected, as a tuple."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        return tuple(item.strip() if isinstance(item, str) else item for item in value)
    return value


def _mapping(value: Any) -> Any:
    if isinstance(value, str):
        import json

        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("expected a JSON object") from None
    return value


Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_keys)]
Lists = Annotated[tuple[str, ...], BeforeValidator(lambda value: _list(value))]


def _list(value: Any) -> Any:
    """Reads '["a", "b"]', as vLLM wants it, or "a,b"."""
    if isinstance(value, str):
        value = _mapping(value) if value.lstrip().startswith("[") else [item for item in value.split(",") if item]
    return value


class ServerSettings(Settings):
    """How the server listens, whom it answers, and how much it takes on."""

    host: str | None = Field(None, description="Address to listen on. Default: 127.0.0.1; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one, which is printed.")
    uds: Text | None = Field(None, description="Unix domain socket to listen on, instead of host and port.")
    served_model_name: Names = Field(
        (), description="Names that requests may give the model; the first is reported. Default: the folder's name."
    )
    api_key: Keys = Field(
        (),
        description="Key that every request needs, except /, /health and /ready; may be given several times.",
        json_schema_extra={"repeat": True},
    )
    allowed_origins: Lists = Field(
        (), description="Origins that browsers may call from (CORS); * for all. Default: none."
    )
    allow_credentials: bool = Field(False, description="Let those origins send credentials.")
    allowed_methods: Lists = Field(("*",), description="Methods for those origins.")
    allowed_headers: Lists = Field(("*",), description="Headers for those origins.")
    ssl_keyfile: Text | None = Field(None, description="File of the TLS key.")
    ssl_certfile: Text | None = Field(None, description="File of the TLS certificate.")
    ssl_ca_certs: Text | None = Field(None, description="File of certificates that clients' must be signed by.")
    ssl_cert_reqs: int = Field(
        int(ssl.CERT_NONE), ge=0, le=2, description="Whether clients need a certificate: 0 no, 1 optional, 2 yes."
    )
    root_path: str = Field("", description="Path that a proxy in front strips.")
    max_num_queued_reqs: HumanInt = Field(
        1024, ge=0, description="Most sequences that wait beside those that run; more are refused with 429."
    )
    max_num_queued_tokens: HumanInt = Field(
        4 * 1024**2, ge=1, description="Most prompt tokens that wait; a request beyond is refused with 429."
    )
    max_prompts_per_request: HumanInt = Field(2048, ge=1, description="Most prompts in one request.")
    max_body_bytes: HumanInt = Field(32 * 1024**2, ge=1, description="Largest request body; accepts 64MiB.")
    body_timeout: float = Field(60, gt=0, description="Seconds that a client may take to send a request's body.")
    h11_max_incomplete_event_size: HumanInt = Field(64 * 1024, ge=1024, description="Most bytes of headers.")
    timeout_keep_alive: int = Field(
        75,
        ge=0,
        description="Seconds that an idle connection is kept: longer than clients and proxies keep theirs (5 to 60), or a "
        "request may go into a connection that is being closed.",
    )
    shutdown_timeout: float = Field(
        30,
        ge=0,
        description="Seconds after SIGTERM in which running requests may end; a second SIGTERM ends them at once.",
    )
    health_timeout: float = Field(
        120, gt=0, description="Seconds without a finished step, while there is work, after which /health answers 503."
    )
    strict_fields: bool = Field(False, description="Refuse requests with unknown fields, instead of a warning.")
    generation_config: Text = Field(
        "auto", description="Defaults of sampling: auto: the model's generation_config.json; vllm: none; or a folder."
    )
    override_generation_config: Annotated[dict[str, Any], BeforeValidator(_mapping)] = Field(
        {}, description="Sampling defaults as JSON, over those of --generation-config."
    )
    chat_template: Text | None = Field(
        None, description="File of a chat template, or the template, instead of the model's."
    )
    chat_template_timeout: float = Field(5, gt=0, description="Seconds that rendering a chat template may take.")
    response_role: str = Field("assistant", description="Role of the answers.")
    enable_auto_tool_choice: bool = Field(False, description="Let the model decide to call tools.")
    tool_call_parser: str | None = Field(
        None, description="Format of the model's tool calls: hermes, llama3_json, a plugin's, or auto: by the template."
    )
    enable_prompt_tokens_details: bool = Field(True, description="Show cached tokens in usage.")
    enable_force_include_usage: bool = Field(False, description="Send usage at the end of every stream.")
    enable_request_id_headers: bool = Field(True, description="Answer with X-Request-Id, the client's if it sent one.")
    enable_log_requests: bool = Field(False, description="Log one JSON line a request; no text of prompts or answers.")
    disable_uvicorn_access_log: bool = Field(True, description="Do not log each HTTP request.")
    disable_log_stats: bool = Field(False, description="Log no line of statistics.")
    log_stats_interval: float = Field(10, gt=0, description="Seconds between those lines.")
    disable_fastapi_docs: bool = Field(False, description="Serve neither /openapi.json nor /docs.")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = Field(
        "warning", description="How much the HTTP server itself logs."
    )

    def __init__(self, **values: Any) -> None:  # type checkers would make one of the fields
        super().__init__(**values)

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("ssl_keyfile and ssl_certfile belong together: give both or neither")
        if any(not key.get_secret_value() for key in self.api_key):
            raise ValueError("api_key is empty: give a key, or leave the setting out")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser: how does this model write calls?")
        return self
