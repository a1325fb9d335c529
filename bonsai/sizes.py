"""Amounts of memory as people write them: "2GiB", "500 MB".

Knows the units. Does not know what is measured.
"""

from __future__ import annotations

import re
from typing import Any

from bonsai.errors import InvalidRequest

__all__ = ["read_size", "show_size"]

UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([a-z]{1,3})")


def read_size(value: Any, name: str) -> int:
    """Bytes of a whole number of bytes, or of text with a unit; raises InvalidRequest."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is not None and match[2] in UNITS and float(match[1]) > 0:
        return max(1, int(float(match[1]) * UNITS[match[2]]))
    raise InvalidRequest(
        f"{name} is {value!r:.80}, expected an amount of memory",
        hint="a number and a unit, such as 2GiB (2 x 1024^3 bytes) or 500MB (500 x 1000^2 bytes)",
    )


def show_size(count: int) -> str:
    """Bytes in the unit that --memory-limit is mostly given in."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
