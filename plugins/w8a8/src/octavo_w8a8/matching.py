"""Which entries of `targets` and `ignore` mean a layer: exact names, "re:" patterns, fused names, names of classes.

Whether a layer is quantised is never decided here: its tensors decide that. Matching only finds the scheme that explains them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from octavo_w8a8.schemes import Scheme

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of modules that hold several linears in one, as engines and a few models have them."""
_PREFIXES = re.compile(r"^(?:model\.|language_model\.|text_model\.)+")
_WRITTEN = ("", "model.", "model.language_model.", "language_model.model.")


def best_match(name: str, schemes: Iterable[Scheme]) -> Scheme | None:
    """The scheme whose targets mean the layer: by exact name, else by pattern, by fused name, by class name.

    Within a level the first scheme counts, as it does for writers.
    """
    schemes = tuple(schemes)
    for level in (_exact, _pattern, _fused, _class):
        for scheme in schemes:
            if level(scheme.targets, name):
                return scheme
    return None


def matches(name: str, targets: Iterable[str]) -> bool:
    """Whether any of the targets means the layer."""
    targets = tuple(targets)
    return any(level(targets, name) for level in (_exact, _pattern, _fused, _class))


@lru_cache(maxsize=4096)
def _compile(target: str) -> re.Pattern[str]:
    return re.compile(target.removeprefix("re:"))


@lru_cache(maxsize=4096)
def _spellings(name: str) -> tuple[str, ...]:
    """A layer's name, and as it would be with the prefixes that multimodal wrappers add or drop."""
    tail = _PREFIXES.sub("", name)
    return name, *(prefix + tail for prefix in _WRITTEN if prefix + tail != name)


def _exact(targets: Sequence[str], name: str) -> bool:
    return any(target in _spellings(name) for target in targets)


def _pattern(targets: Sequence[str], name: str) -> bool:
    patterns = [_compile(target) for target in targets if target.startswith("re:")]
    return any(pattern.match(spelling) for pattern in patterns for spelling in _spellings(name))


def _fused(targets: Sequence[str], name: str) -> bool:
    """The layer is a member of a fused module that is named, or it is a fused module of which all members are named."""
    parent, dot, last = name.rpartition(".")
    if last in FUSED:
        members = [f"{parent}{dot}{member}" for member in FUSED[last]]
        return all(_exact(targets, member) or _pattern(targets, member) for member in members)
    for fused in (fused for fused, members in FUSED.items() if last in members):
        spelled_out = [target for target in targets if fused in target]  # "re:.*kv_proj" does not mean qkv_proj
        if _exact(spelled_out, f"{parent}{dot}{fused}") or _pattern(spelled_out, f"{parent}{dot}{fused}"):
            return True
    return False


def _class(targets: Sequence[str], name: str) -> bool:
    """Class names are known only as far as names of layers tell: an embedding, or a linear layer, the head among them."""
    endings = ("Embedding",) if name.endswith("embed_tokens") else ("Linear", "LinearBase")
    if name.endswith("lm_head"):
        endings = (*endings, "ParallelLMHead")
    return any(target.endswith(endings) for target in targets if not target.startswith("re:") and "." not in target)
