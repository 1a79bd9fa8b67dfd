"""Which attention backend serves a model over its KV format, natively or over decoded blocks, and why not a better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.attention.backend import AttentionBackend, AttentionLayer, AttentionRequest
from octavo.attention.kv_format import DecodingBackend, KVFormat, KVLayout, MixedBackend
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


@dataclass(frozen=True, slots=True)
class LayoutSelection:
    """What was chosen for each format of a layout."""

    layout: KVLayout
    choices: dict[KVFormat, AttentionSelection]

    @property
    def refusals(self) -> tuple[tuple[str, str], ...]:
        """What better candidates said, without repetitions."""
        return tuple(dict.fromkeys(refusal for choice in self.choices.values() for refusal in choice.refusals))

    def build(self) -> AttentionBackend:
        """The backend for all layers."""
        backends = {kv_format: choice.build(kv_format) for kv_format, choice in self.choices.items()}
        if len(backends) == 1:
            return next(iter(backends.values()))
        return MixedBackend(self.layout, [backends[kv_format] for kv_format in self.layout.formats])

    def __str__(self) -> str:
        if len(set(map(str, self.choices.values()))) == 1:
            return str(next(iter(self.choices.values())))
        return ", ".join(f"{choice} for {kv_format.name}" for kv_format, choice in self.choices.items())


def select_for_layout(
    layout: KVLayout,
    layers: Sequence[AttentionLayer],
    platform: Platform,
    backends: Sequence[type[AttentionBackend]],
    wanted: str | None = None,
) -> LayoutSelection:
    """Chooses a backend for the layers of each format, as `select_attention` does and with its errors."""
    choices = {}
    for kv_format, indices in layout.layers_by_format.items():
        request = attention_request([layers[i] for i in indices], kv_format, platform)
        choices[kv_format] = select_attention(request, backends, wanted)
    return LayoutSelection(layout, choices)


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
