"""Which attention backend serves a model over its KV format, natively or over decoded blocks, and why not a better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.attention.backend import AttentionBackend, AttentionLayer, AttentionRequest
from octavo.attention.kv_format import DecodingBackend, KVFormat
from octavo.errors import ConfigError, NoKernelError, ask
from octavo.platforms import Platform

_DECODING_COSTS = 10
"""Ranks that a backend loses where it must read decoded copies: a native one of the next lower kind is preferred."""


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """The chosen backend, whether it `decodes` first, and what each better candidate said against it."""

    method: type[AttentionBackend]
    request: AttentionRequest
    decodes: bool
    refusals: tuple[tuple[str, str], ...]

    def build(self, kv_format: KVFormat) -> AttentionBackend:
        backend = self.method(self.request)
        return DecodingBackend(backend, kv_format) if self.decodes else backend

    def __str__(self) -> str:
        return f"{self.method.name}{' over decoded blocks' if self.decodes else ''}"


def attention_request(layers: Sequence[AttentionLayer], kv_format: KVFormat, platform: Platform) -> AttentionRequest:
    """What a model over a KV format asks of a backend that reads its blocks as they are."""
    geometry = kv_format.geometry
    return AttentionRequest(
        layers, geometry.dtype, geometry.block_size, kv_format.storage, platform, kv_format.has_scales
    )


def select_attention(
    request: AttentionRequest, backends: Sequence[type[AttentionBackend]], wanted: str | None = None
) -> AttentionSelection:
    """Chooses the willing backend of the highest rank; one that must decode first counts 10 less.

    `request` describes the blocks as they are stored. `wanted` names one backend and admits no other. Raises NoKernelError with
    all reasons, ConfigError for a wanted backend that is unknown or cannot serve.
    """
    known = [b for b in backends if wanted in (None, b.name)]
    if not known:
        names = ", ".join(sorted(b.name for b in backends))
        raise ConfigError(f"--attention-backend {wanted}: no such backend; installed: {names}")

    def native(backend: type[AttentionBackend]) -> bool:
        return request.kv_dtype in backend.loads and (backend.reads_scales or not request.kv_has_scales)

    refusals: list[tuple[str, str]] = []
    for backend in sorted(
        known, key=lambda b: (b.rank - (0 if native(b) else _DECODING_COSTS), native(b)), reverse=True
    ):
        seen = request if native(backend) else replace(request, kv_dtype=request.dtype, kv_has_scales=False)
        reason = ask(backend.why_not, seen)
        if reason is None:
            return AttentionSelection(backend, seen, not native(backend), tuple(refusals))
        refusals.append((backend.name, reason))
    lines = [f"  {name}: {reason}" for name, reason in refusals]
    if wanted is not None:
        raise ConfigError("\n".join([f"--attention-backend {wanted} cannot serve this model:", *lines]))
    raise NoKernelError("\n".join(["no attention backend can serve this model:", *lines]))
