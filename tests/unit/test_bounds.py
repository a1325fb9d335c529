"""The fewest ids of a text by its length: never more than it has, and many for a huge one."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
import vocab
from vocab import added, byte_level, write

from bonsai.convert.gguf_tokenizer import tokenizer_files
from bonsai.tokenizer import Tokenizer
from bonsai.tokenizer.bounds import Bound

WORDS = ("hello", "internationalization")
LONG = [
    "hello" * 500,
    "internationalization" * 200,
    " " * 3000,
    "\n" * 3000,
    "\u4e2d\u6587" * 500,
    "\U0001f600" * 500,
    "\x04\x06\x13" * 1000,
    unicodedata.normalize("NFD", "\u1fa7" * 500 + "\ud55c" * 500),
]


def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Byte-level ones and one of sentencepiece, with a bound; `nfc` composes letters."""
    spm = vocab.data("sentencepiece_vocab.json")
    made = {
        "bytes": {"tokenizer.json": byte_level(WORDS)},
        "nfc": {"tokenizer.json": byte_level(WORDS, normalizer={"type": "NFC"})},
        "specials": {"tokenizer.json": byte_level((), ["<|" + "x" * 50 + "|>"])},
        "smollm2": tokenizer_files(vocab.data("smollm2_vocab.json")),
        "sentencepiece": tokenizer_files(spm),
    }
    return {name: Tokenizer.open(write(folder / name, files)) for name, files in made.items()}


def test_the_bound_is_never_above_the_truth(tmp_path: Path) -> None:
    rng = random.Random(0)
    letters = "ab \n\u00e9\u0301\u4e2d\U0001f600" + "".join(WORDS)
    texts = [*LONG, *("".join(rng.choices(letters, k=rng.randint(0, 200))) for _ in range(200))]
    for name, tokenizer in tokenizers(tmp_path).items():
        found = [tokenizer.least(text) for text in texts]
        assert max(found) > 20, name
        for text, least in zip(texts, found, strict=True):
            for special in (False, True):
                assert least <= len(tokenizer.encode(text, special=special)), (name, text[:20])


def test_texts_count_together(tmp_path: Path) -> None:
    tokenizer = tokenizers(tmp_path)["bytes"]
    width = len("internationalization")
    assert [tokenizer.least("x" * n) for n in (0, width - 1, width, 2 * width)] == [0, 0, 1, 2]
    assert tokenizer.least("x" * 15, "x" * 15, "\u00e9" * 5) == 2
    assert tokenizer.least("\udcff" * 40) == 2  # what no text may hold is refused later


def spaces_swallowed() -> dict:
    document = byte_level(WORDS)
    document["added_tokens"] = [added("<s>", 5000, rstrip=True)]
    return document


def test_spaces_that_a_token_may_swallow_do_not_count() -> None:
    bound = Bound.read(spaces_swallowed())
    assert bound.least(" " * 10**6) == 0 and bound.least("x " * 2000) == 100


def changed(**model) -> dict:
    document = byte_level(WORDS)
    document["model"].update(model)
    return document


SPLIT = {"type": "Split", "pattern": {"Regex": " "}, "invert": False}
LEVEL = byte_level()["pre_tokenizer"]


@pytest.mark.parametrize(
    "document",
    [
        byte_level(normalizer={"type": "NFKC"}),
        byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        byte_level(normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aa"}),
        byte_level(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}),
        byte_level(normalizer={"type": "Replace", "pattern": {"String": "\u4e2d"}, "content": "a"}),
        byte_level(pre_tokenizer={"type": "Whitespace"}),
        byte_level(pre_tokenizer={
            "type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, LEVEL]
        }),
        byte_level(pre_tokenizer=None),
        changed(type="WordPiece"),
        changed(vocab={"b": 0}),
    ],
)  # fmt: skip
def test_where_text_may_vanish_there_is_no_bound(document: dict) -> None:
    assert Bound.read(document).least("x" * 10**6) == 0


def test_sequences_of_known_steps_have_a_bound() -> None:
    steps = [{"type": "Digits", "individual_digits": True}, {**SPLIT, "behavior": "Isolated"}]
    nfc = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    document = byte_level(
        normalizer=nfc, pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, LEVEL]}
    )
    assert Bound.read(document).least("x" * 10**6) == 10**6 // 4
