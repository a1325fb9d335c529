"""Points of a conversation that a session with a recurrent memory can go back to.

Knows when such a point is worth its memory and which one to give up. Does not know what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Mark", "Marks"]

LIMIT = 4
"""Marks that a session holds at most: the memory of a 27B model is 150 MB."""
SPACING = 2048
"""Tokens after which there is a new mark: less than that is computed again soon enough."""
TAIL = 8
"""Tokens before the end of a prompt where there is a mark: the next prompt of a chat is the same
up to the opening of the reply, which templates make of fewer tokens than this."""
WORTH = 64
"""Tokens since the last mark that make one at the tail worth the shorter forwards around it."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The recurrent memory after `length` tokens, and the hidden row of the last of them."""

    length: int
    memory: Any = field(repr=False)
    last: Any = field(repr=False)


class Marks:
    """The marks of one session, by length. They belong to the tokens that it holds."""

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks = list(marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def stop(self, position: int, end: int, total: int) -> int:
        """Where a forward from `position` to `end` should stop, when `total` tokens are held."""
        tail = total - TAIL
        worth = tail - self._newest() >= WORTH
        return tail if worth and position < tail < end else end

    def due(self, position: int, total: int) -> bool:
        """Whether to keep a mark at `position`."""
        since = position - self._newest()
        return since >= SPACING or (position == total - TAIL and since >= WORTH)

    def add(self, mark: Mark) -> None:
        """Keep it; of too many, the one goes that leaves the smallest gap, never the newest."""
        self._marks.append(mark)
        if len(self._marks) > LIMIT:
            lengths = [0, *(m.length for m in self._marks)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(self._marks) - 1)]
            del self._marks[gaps.index(min(gaps))]

    def back(self, length: int) -> Mark | None:
        """The last mark at or before `length`, None for the start; those after it are dropped."""
        self._marks = [mark for mark in self._marks if mark.length <= length]
        return self._marks[-1] if self._marks else None

    def _newest(self) -> int:
        return self._marks[-1].length if self._marks else 0
