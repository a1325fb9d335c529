"""What a template may use: time, turns of loops, and characters, asked for before they are made.

Knows sizes of Python values. Does not know jinja.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["METER", "Meter", "TemplateLimit", "steps"]

SECONDS = 5.0
STEPS = 20_000_000  # nodes of the syntax tree; 10,000 messages in a large template need 5 million
TEXT = 16 << 20  # characters of one string, and of the whole output
MADE = 256 << 20  # bytes of all strings and lists made, dropped ones included
ELEMENTS = 1 << 20  # of one list, nested ones included
DEEPEST = 100  # levels of nested lists
CALLS = 50  # calls in calls: below Python's own limit, about 7 frames each


class TemplateLimit(Exception):
    """The template asks for more than it may have."""


class Meter:
    """The budget of one rendering. `size` is the characters that the caller put in: text, memory
    and elements grow with it, because a long conversation needs them and is no attack.
    """

    __slots__ = ("_deadline", "_depth", "_emitted", "_made", "_steps", "elements", "text")

    def __init__(self, size: int = 0, seconds: float = SECONDS) -> None:
        self.text = TEXT + 8 * size
        self.elements = ELEMENTS + size
        self._made = MADE + 256 * size
        self._steps = STEPS + 64 * size
        self._emitted = 0
        self._depth = 0
        self._deadline = time.monotonic() + seconds

    def step(self, weight: int = 1) -> None:
        """One turn of something, as heavy as `weight` syntax nodes."""
        self._steps -= weight
        if self._steps < 0:
            raise TemplateLimit("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimit("it takes too long")

    def room(self, characters: int) -> None:
        """Ask before making a string or list of that length."""
        if characters > self.text:
            raise TemplateLimit(f"it makes a text of {characters:,} characters")

    def count(self, elements: int) -> None:
        """Ask before taking a list, or a text letter by letter, apart or putting it together."""
        if elements > self.elements:
            raise TemplateLimit(f"it makes a list of {elements:,} elements")
        self.step(elements)

    def emit(self, characters: int) -> None:
        """Output was written, to the prompt or to a variable."""
        self._emitted += characters
        if self._emitted > self.text:
            raise TemplateLimit(f"it writes more than {self.text:,} characters")

    def made(self, value: Any) -> Any:
        """Charge a value that was just made; it is returned."""
        if isinstance(value, (str, list, tuple, dict)):
            self.room(len(value))
            self._made -= sys.getsizeof(value)
            if self._made < 0:
                raise TemplateLimit("it uses too much memory")
        return value

    def weighed(self, value: Any) -> Any:
        """Charge a value that may hold others: lists in lists count as if they were written out,
        because a few lines could make one that takes years to compare or print."""
        self.made(value)
        if isinstance(value, (list, tuple, dict)):
            self._weigh(value)
        return value

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Around a call."""
        self._depth += 1
        if self._depth > CALLS:
            raise TemplateLimit(f"it calls itself more than {CALLS} times")
        try:
            yield
        finally:
            self._depth -= 1

    def _weigh(self, value: Any) -> None:
        elements = characters = 0
        rest = [(value, 1)]
        while rest:
            value, depth = rest.pop()
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            elements += len(inner)
            if elements > self.elements or depth > DEEPEST:
                raise TemplateLimit("it makes a list that is too large")
            for item in inner:
                if isinstance(item, (list, tuple, dict)):
                    rest.append((item, depth + 1))
                elif isinstance(item, str):
                    characters += len(item)
            self.room(characters)
        self.step(elements)


def steps(iterable: Iterable[Any], weight: int, meter: Meter) -> Steps:
    """The same elements, each of which counts when it is taken."""
    kind = SizedSteps if hasattr(iterable, "__len__") else Steps
    return kind(iterable, weight, meter)


class Steps:
    """What `steps` makes of an iterator."""

    __slots__ = ("_iterable", "_meter", "_weight")

    def __init__(self, iterable: Iterable[Any], weight: int, meter: Meter) -> None:
        self._iterable = iterable
        self._weight = weight
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._meter.step(self._weight)
            yield item


class SizedSteps(Steps):
    """What `steps` makes of a list: loops ask for its length, and whether it is empty."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


METER: ContextVar[Meter] = ContextVar("meter")
"""The budget of the template that runs in this context; set around compiling and rendering."""
