"""Ends a text at the first stop string in it, while the text arrives in pieces of any length."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Passes a text on up to the stop string that is complete first; of several complete at once the longest wins.

    So the outcome does not depend on how the text is cut into pieces. Held back is only what may yet become part of a
    stop string: a tail that is the beginning of one. `include` leaves the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, delta: str, check: bool = True) -> tuple[str, str | None]:
        """The text that is now certain, and the stop string that ended it, if one did: then nothing more may be fed.

        With `check` off (until min_tokens are out) a stop string that `delta` completes is text like any other.
        """
        text = self._held + delta
        if check:
            # a stop string that ends in what was held back was let pass before
            firsts = ((text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops)
            if matches := [(start + len(stop), start, stop) for start, stop in firsts if start >= 0]:
                end, start, stop = min(matches)
                self._held = ""
                return text[: end if self._include else start], stop
        certain = max(0, len(text) - self._longest + 1)
        while certain < len(text) and not self._begins_stop(text[certain:]):
            certain += 1
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """What was held back, once the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins_stop(self, tail: str) -> bool:
        return any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops)
