"""Every error that octavo raises on purpose, with the exit code and HTTP status that each one maps to.

An error of this tree is meant for a person: it names the file, tensor, layer, field or setting, says what was expected and
what was found, and is printed without a traceback. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable


def ask(why_not: Callable[..., str | None], *request: object) -> str | None:
    """A candidate's answer, with an exception of its own taken as a refusal: one broken kernel must not stop the others."""
    try:
        return why_not(*request)
    except Exception as error:
        return f"its why_not failed: {type(error).__name__}: {error}"


class OctavoError(Exception):
    """Base of all deliberate errors."""

    exit_code = 2
    http_status = 500


class ConfigError(OctavoError):
    """A setting, or a combination of settings, that cannot be honoured."""

    http_status = 400


class CheckpointError(OctavoError):
    """A model folder whose files are missing, damaged, contradictory, or not what their labels say."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.file, self.tensor, self.expected, self.found, self.hint = file, tensor, expected, found, hint
        facts = {"tensor": tensor, "file": file, "expected": expected, "found": found, "hint": hint}
        details = [f"  {name}: {value}" for name, value in facts.items() if value is not None]
        super().__init__("\n".join([message, *details]))


class NoKernelError(OctavoError):
    """No installed kernel can run a layer; the message holds each candidate's reason."""


class PluginError(OctavoError):
    """A plugin that was needed could not be loaded or broke its contract; names distribution and version."""


class RequestError(OctavoError, ValueError):
    """A request that is refused; other requests are not affected. `param` names the offending field."""

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)
