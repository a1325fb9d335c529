"""JSON objects from untrusted files: no duplicate keys, no deep nesting, no NaN, no huge numbers,
no more keys and values than a model can have.

Knows JSON text. Does not know what the keys mean.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bonsai.errors import FormatError

__all__ = ["MAX_DEPTH", "MAX_MARKS", "TOKENIZER_MARKS", "parse_object"]

MAX_DEPTH = 64
MAX_DIGITS = 20
# Commas, colons and opening brackets outside strings. A matrix in a safetensors header has 12, so
# this is for 25,000 of them. No text with so many takes more than about 0.1 s and 40 MB to parse.
MAX_MARKS = 300_000
TOKENIZER_MARKS = 1 << 23  # the longest tokenizer.json in use has 2 million
CHUNK = 1 << 16
_STRUCTURE = b'"[]{},:'
_REST = bytes(i for i in range(256) if i not in _STRUCTURE)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def parse_object(data: bytes, where: str, *, most: int = MAX_MARKS) -> dict[str, Any]:
    """The object in `data`; `where` names the file in errors. Costs time linear in len(data).

    `most` bounds how much is in it, in commas, colons and opening brackets, before it is parsed.
    """
    marks = _outside_strings(data)
    count = len(marks) - marks.count(b"]")
    if count > most:
        raise FormatError(f"{where}: {count} keys and values, at most {most} are accepted")
    if _too_deep(marks):
        raise FormatError(f"{where}: not valid JSON, or nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_bounded_int,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _outside_strings(data: bytes) -> bytes:
    """The commas, colons and brackets outside strings, brackets of both kinds as "[" and "]".

    Dropping two adjacent quotes never changes what is inside a string.
    """
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _without_strings(bare.translate(_ONE_KIND, _REST).replace(b'""', b""))


def _too_deep(marks: bytes) -> bool:
    """Whether brackets nest too deep, or do not match, without any recursion: one replacement of
    "[]" takes away the innermost level everywhere."""
    bare = marks.translate(None, b",:")
    for _ in range(MAX_DEPTH):
        size = len(bare)
        bare = bare.replace(b"[]", b"")
        if len(bare) == size:
            break
    return bool(bare)


def _without_strings(bare: bytes) -> bytes:
    """What is left of marks and quotes when quotes, and the marks between them, are gone."""
    kept, inside = [], 0
    for start in range(0, len(bare), CHUNK):
        part = np.frombuffer(bare, np.uint8, min(CHUNK, len(bare) - start), start)
        quotes = part == ord('"')
        within = inside + np.cumsum(quotes) & 1
        kept.append(part[(within == 0) & ~quotes].tobytes())
        inside = int(within[-1])
    return b"".join(kept)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r:.100} appears twice")
            seen.add(key)
    return found


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")
