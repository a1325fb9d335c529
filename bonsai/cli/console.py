"""What goes to stderr: notes, progress and errors. stdout belongs to the answer.

Knows whether a person is looking (a terminal) and what -q and -v ask for. Imports rich only when a
bar is shown.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Console", "Report", "printable", "size"]

Report = Callable[[str, int, int], None]
"""progress(stage, done, total); a total of 0 means that nobody knows."""


class Console:
    """stderr at one of three levels: quiet (-1), as it is (0), verbose (1)."""

    def __init__(self) -> None:
        self.level = 0

    @property
    def shows(self) -> bool:
        """Whether notes are wanted: by a terminal, or by -v."""
        return self.level > 0 or (self.level == 0 and is_terminal(sys.stderr))

    def note(self, text: str) -> None:
        """A line for people: timings, warnings, what was chosen."""
        if self.shows:
            _write(printable(text))

    def error(self, message: str, hint: str | None, cause: BaseException) -> None:
        """Two lines: what is wrong, and what to do. -v adds the traceback before them."""
        if self.level > 0:
            _write("".join(traceback.format_exception(cause)).rstrip())
        _write(f"error: {printable(message)}")
        if hint:
            _write(f"hint:  {printable(hint)}")

    def end_line(self) -> None:
        """Leave a terminal's cursor at the start of a line."""
        for stream in (sys.stderr, sys.stdout):
            if is_terminal(stream):
                stream.write("\n")
                stream.flush()
                return

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A progress callback that draws a bar per stage on a terminal and is silent elsewhere."""
        if self.level < 0 or not is_terminal(sys.stderr):
            yield _silent
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        stage, percent = TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f}%")
        screen = RichConsole(stderr=True)
        columns = (stage, BarColumn(), percent, TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True) as bars:
            yield _Bars(bars).report


class _Bars:
    """One rich task per stage name."""

    def __init__(self, bars) -> None:  # type: ignore[no-untyped-def]  # rich is imported lazily
        self._bars = bars
        self._tasks: dict[str, int] = {}

    def report(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(printable(stage), total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees this stream; a closed or missing one is seen by nobody."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def printable(text: str) -> str:
    """One line without control characters: names come from files and must not steer a terminal."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """Bytes for people, decimal: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _write(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:  # stderr is gone; there is nobody left to tell
        pass
