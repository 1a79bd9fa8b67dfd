"""Fields that a request brings and this server does not use: nothing is ignored in silence.

Three kinds. What others support and we do not is refused, unless its value asks for nothing. What has no effect by its nature
is named in the answer's header X-Octavo-Warnings. So are unknown fields, which are also logged, once each; --strict-fields
refuses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from octavo.errors import RequestError
from octavo.server.schema import Lenient

logger = logging.getLogger(__name__)

HEADER = "X-Octavo-Warnings"
_MAX_HEADER = 1000
_MAX_REMEMBERED = 200
_MAX_NAME = 64

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "custom_logit_processor": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "kv_transfer_params": (None,),
    "logits_processors": (None, []),
    "lora_path": (None,),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Fields of other servers, with the values of them that ask for nothing."""

WITHOUT_EFFECT = frozenset(
    [
        "length_penalty",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    ]
)

_known: set[str] = set()


def check_fields(request: Lenient, strict: bool, also: Iterable[str] = ()) -> list[str]:
    """Notices about the fields of a request that are not used; RequestError for those that must not be ignored.

    `also` are declared fields of the same kind as WITHOUT_EFFECT that this request brings.
    """
    notices = [f"'{name}' has no effect" for name in also]
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
            continue
        if name in WITHOUT_EFFECT:
            notices.append(f"'{name}' has no effect")
            continue
        shown = name[:_MAX_NAME]
        nearest = get_close_matches(shown, type(request).model_fields, n=1)
        notice = f"unknown field '{shown}' is ignored" + "".join(f"; did you mean '{near}'?" for near in nearest)
        if strict:
            raise RequestError(notice.replace("is ignored", "is refused (strict_fields)"), param=shown)
        if shown not in _known and len(_known) < _MAX_REMEMBERED:
            _known.add(shown)
            logger.warning("a request has the %s (told once for each field)", notice.encode("unicode_escape").decode())
        notices.append(notice)
    return notices


def warning_headers(notices: list[str]) -> dict[str, str]:
    """The notices as a header, or none."""
    if not notices:
        return {}
    text = ", ".join(notices).encode("unicode_escape").decode("ascii")
    return {HEADER: text if len(text) <= _MAX_HEADER else text[:_MAX_HEADER] + "..."}
