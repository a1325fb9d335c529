"""Regular expressions that explode are told from those of real tokenizers."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer as Library

from bonsai.convert import gguf_tokenizer
from bonsai.tokenizer.patterns import exploding


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("(a+)+$", "(a+)+"),
        ("x|((a*)*)*b", "(a*)*"),
        ("(?:a|aa)+$", "(?:a|aa)+"),
        ("(?:a+b?)*", "(?:a+b?)*"),
        ("((a+))+", "((a+))+"),
        ("(?<x>[^b]+){2,}", "(?<x>[^b]+){2,}"),
        (r"(?:\p{L}+\s*)+$", r"(?:\p{L}+\s*)+"),
        ("(^a{2,})*", "(^a{2,})*"),
        (r"(?=(\w+)+x)", r"(\w+)+"),
        ("(" * 3000 + "a+" + ")" * 3000 + "+", "(" * 3000 + "a+" + ")" * 3000 + "+"),
    ],
)
def test_what_explodes_is_found(pattern: str, part: str | None) -> None:
    assert exploding(pattern) == part


REAL = [
    value
    for value in vars(gguf_tokenizer).values()
    if isinstance(value, str) and (r"\p{" in value or r"\s" in value)
]
OTHERS = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re|'ve)?|\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|(?:\p{L}\p{M}*)+",
    "(?>a+)+",
    "(a++)+",
    "(?:ab|cd)+",
    "[(a+)+]+",
    "[]a]+(b)*",
    r"\(a+\)+",
    "(?#(a+)+)b",
    "(a+){3}",
    " ?[^(\\s|[.,!?\u2026\u3002\uff0c])]+",
]


@pytest.mark.parametrize("pattern", REAL + OTHERS)
def test_what_real_tokenizers_use_is_not(pattern: str) -> None:
    assert exploding(pattern) is None


def test_there_are_real_ones() -> None:
    assert len(REAL) > 2


def test_any_valid_pattern_is_read() -> None:
    rng, valid = random.Random(1), 0
    for _ in range(3000):
        parts = ("a", "(", ")", "|", "*", "+", "?", "{2,}", "{", "[^", "]", "\\", "(?:", "(?=", "-")
        pattern = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
        text = json.dumps({"model": model, "pre_tokenizer": {**split, "invert": False}})
        try:
            Library.from_buffer(text.encode())
        except ValueError:
            continue
        valid += 1
        exploding(pattern)
    assert valid > 300
