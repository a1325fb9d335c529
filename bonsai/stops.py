"""Stop strings in a stream of text: what may be shown, what must wait, and where to end.

Knows text only. Where a reply ends does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from bonsai.errors import InvalidRequest

__all__ = ["StopStrings", "read_stops"]


def read_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings of a request: one, several, or None. Empty strings stop nothing."""
    if stop is None:
        return ()
    several = [stop] if isinstance(stop, str) else stop
    if not isinstance(several, (list, tuple)) or not all(isinstance(s, str) for s in several):
        raise InvalidRequest(f"stop is {stop!r:.80}, expected a string, a list of strings or None")
    return tuple(dict.fromkeys(s for s in several if s))


class StopStrings:
    """Passes text on up to the first stop string, which is left out.

    The first is the one whose last character comes first; of several that end there, the longest.
    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """What may be shown after `text` arrived; nothing more once `matched`."""
        if self.matched:
            return ""
        known = len(self._held)
        self._held += text
        for i, character in enumerate(text, start=known + 1):
            ends = [m.stop for m in self._matchers if m.advance(character)]
            if ends:
                self.matched = True
                shown, self._held = self._held[: i - max(map(len, ends))], ""
                return shown
        waiting = max((m.length for m in self._matchers), default=0)
        cut = len(self._held) - waiting
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown


class _Matcher:
    """Knuth, Morris and Pratt: `length` characters of `stop` end the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = [0]  # of stop[: i + 1]: its longest proper prefix that is also a suffix
        for character in stop[1:]:
            border = self._borders[-1]
            while border and character != stop[border]:
                border = self._borders[border - 1]
            self._borders.append(border + (character == stop[border]))

    def advance(self, character: str) -> bool:
        """Take one character; true when the whole stop string has just ended."""
        while self.length and character != self.stop[self.length]:
            self.length = self._borders[self.length - 1]
        self.length += character == self.stop[self.length]
        return self.length == len(self.stop)
