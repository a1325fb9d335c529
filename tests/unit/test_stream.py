"""Ids to text, one at a time: no character is broken, no byte is lost."""

from __future__ import annotations

import pytest
import vocab
from hypothesis import given
from hypothesis import strategies as st

from bonsai.errors import FormatError, UnsupportedModel
from bonsai.tokenizer.stream import Spelling, StreamDecoder, byte_alphabet

FLAG = bytes.fromhex("f09f8fb3efb88fe2808df09f8c88")
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def deltas(*pieces: bytes, strip_first: bool = False) -> list[str]:
    """What each token shows, and what is left at the end if there is something."""
    decoder = StreamDecoder(lambda i: pieces[i], strip_first=strip_first)
    shown = [decoder.push(i) for i in range(len(pieces))]
    end = decoder.flush()
    return [*shown, end] if end else shown


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "\U0001f600"]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "\U0001f600"]),
        ([b"\xc4", b"\x8f"], ["", "\u010f"]),
        ([b"\xe4\xb8", b"\xad"], ["", "\u4e2d"]),
        ([b"\xe2", b"(", b"A"], ["", "\ufffd(", "A"]),
        ([b"\xe2\x9c\x85", b"\x85", b"ok"], ["\u2705", "\ufffd", "ok"]),
        ([b"\x9c"], ["\ufffd"]),
        ([b"\xf0\x9f\x98"], ["", "\ufffd"]),
        ([b"\xff", b"a"], ["\ufffd", "a"]),
    ],
)
def test_deltas_are_whole_characters(pieces, expected):
    assert deltas(*pieces) == expected


@pytest.mark.parametrize("width", range(1, len(FLAG) + 1))
def test_a_joined_emoji_survives_every_split(width):
    pieces = [FLAG[i : i + width] for i in range(0, len(FLAG), width)]
    assert "".join(deltas(*pieces)) == FLAG.decode()


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_deltas_together_are_the_decoded_bytes(pieces):
    assert "".join(deltas(*pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_many_at_once_is_one_after_another(pieces):
    decoder = StreamDecoder(lambda i: pieces[i], strip_first=True)
    text = decoder.push_all(range(len(pieces))) + decoder.flush()
    assert text == "".join(deltas(*pieces, strip_first=True))


def test_one_space_at_the_start_belongs_to_the_encoding():
    assert deltas(b"", b" a", b" b", strip_first=True) == ["", "a", " b"]
    assert deltas(b"  a", strip_first=True) == [" a"]
    assert deltas(b"a", b" b", strip_first=True) == ["a", " b"]


def test_the_byte_alphabet_is_the_one_of_gpt2():
    table = byte_alphabet()
    assert table == vocab.alphabet()
    assert len(set(table)) == 256
    assert (table[0x20], table[0x0A], table[0x41], table[0xAD]) == ("Ġ", "Ċ", "A", "Ń")


def test_byte_level_tokens_are_bytes():
    spelling = Spelling.read(LEVEL, "t.json")
    assert spelling.spell("Ġhi") == b" hi"
    assert spelling.spell("âľħ") == "\u2705".encode()
    assert spelling.spell("\u4e2d") == "\u4e2d".encode()  # outside the alphabet
    assert Spelling.read({"type": "Sequence", "decoders": [LEVEL]}, "t.json") == spelling


def test_sentencepiece_tokens_are_text_or_bytes():
    spelling = Spelling.read(LLAMA, "t.json")
    assert spelling.spell("▁hi▁") == b" hi "
    assert spelling.spell("<0xE2>") == b"\xe2"
    assert spelling.spell("<0xE2") == b"<0xE2"
    assert spelling.strip_first


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace_strips_unless_it_never_prepends(scheme):
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    spelling = Spelling.read(step, "t.json")
    assert spelling.spell("▁a") == b" a"
    assert spelling.strip_first == (scheme != "never")
    assert spelling.spell("<0x0A>") == b"<0x0A>"  # without ByteFallback it is text


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "no decoder"),
        ({"type": "WordPiece", "prefix": "##"}, "'WordPiece'"),
        ({"type": "CTC"}, "'CTC'"),
        ({"type": "Sequence", "decoders": [LEVEL, {"type": "ByteFallback"}]}, "'ByteLevel'"),
        ({"type": "Replace", "pattern": {"Regex": "a"}, "content": " "}, "one character"),
        ({"type": "Replace", "pattern": {"String": "ab"}, "content": " "}, "one character"),
        ({"type": "Strip", "content": " ", "start": 2, "stop": 0}, "'Strip'"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "'Strip'"),
    ],
)
def test_unknown_decoders_are_refused_by_name(decoder, message):
    with pytest.raises(UnsupportedModel, match=message) as caught:
        Spelling.read(decoder, "t.json")
    assert "t.json" in str(caught.value)


def test_a_decoder_that_is_no_object_is_damage():
    deep = {"type": "Sequence", "decoders": []}
    for _ in range(20):
        deep = {"type": "Sequence", "decoders": [deep]}
    for decoder in ("ByteLevel", [LEVEL], deep):
        with pytest.raises(FormatError, match=r"t\.json"):
            Spelling.read(decoder, "t.json")
