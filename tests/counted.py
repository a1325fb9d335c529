"""Work counted instead of timed: executed lines, and comparisons of texts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = (str(ROOT / "bonsai"), str(ROOT / "convert"))


def lines(function: Callable[[], Any]) -> int:
    """Lines of this package that `function` executes in this thread.

    What one line does inside C code counts once, so give `Text`s where it could walk over a list.
    """
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


class Text(str):
    """Text that counts how often it is compared, in `Text.comparisons`."""

    comparisons = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Text.comparisons += 1
        return str.__eq__(self, other)
