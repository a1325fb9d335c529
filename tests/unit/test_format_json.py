"""The strict JSON parser: its nesting check against a plain scanner, and what it refuses."""

from __future__ import annotations

import json
import random

import pytest

from bonsai.errors import FormatError
from bonsai.format import strict_json
from bonsai.format.strict_json import MAX_DEPTH, parse_object


def depth(text: bytes) -> int:
    """Deepest nesting, by walking over the bytes."""
    inside, position, level, deepest = False, 0, 0, 0
    while position < len(text):
        byte = text[position : position + 1]
        if inside:
            position += byte == b"\\"
            inside = byte != b'"'
        elif byte == b'"':
            inside = True
        else:
            level += (byte in (b"[", b"{")) - (byte in (b"]", b"}"))
            deepest = max(deepest, level)
        position += 1
    return deepest


def some_value(rng: random.Random, level: int):
    kind = rng.random()
    if level > 7 or kind < 0.3:
        return "".join(rng.choice('[]{}"\\a') for _ in range(rng.randint(0, 4)))
    if kind < 0.6:
        return [some_value(rng, level + 1) for _ in range(rng.randint(0, 3))]
    return {
        f"{some_value(rng, 9)}{i}": some_value(rng, level + 1) for i in range(rng.randint(0, 3))
    }


def test_nesting_is_measured_outside_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_DEPTH", 5)
    monkeypatch.setattr(strict_json, "CHUNK", 7)  # so that strings cross its borders
    rng, deep = random.Random(1), 0
    for _ in range(3000):
        value = {"v": some_value(rng, 0)}
        text = json.dumps(value).encode()
        if depth(text) > 5:
            deep += 1
            with pytest.raises(FormatError, match="nested more than 5 deep"):
                parse_object(text, "x")
        else:
            assert parse_object(text, "x") == value
    assert 300 < deep < 2700


def test_the_limit_of_nesting_is_exact() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert parse_object(nested(MAX_DEPTH), "x")
    with pytest.raises(FormatError, match=r"config.json: .* nested more than 64 deep"):
        parse_object(nested(MAX_DEPTH + 1), "config.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1}}', "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' appears twice"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 123456789012345678901}', "a number of 21 digits"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text (byte 7)"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
    ],
)
def test_what_is_no_strict_object_is_refused(text: bytes, expected: str) -> None:
    with pytest.raises(FormatError) as info:
        parse_object(text, "config.json")
    assert str(info.value).startswith("config.json: ") and expected in str(info.value)
    assert info.value.__suppress_context__ or info.value.__context__ is None
