"""Token ids back to text, one at a time and byte-exact.

Knows how the tokens of a vocabulary spell bytes (the `decoder` of a tokenizer.json) and incremental
UTF-8. Does not know how text becomes ids, or which tokens are special.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bonsai.errors import FormatError, UnsupportedModel

__all__ = ["Spelling", "StreamDecoder", "byte_alphabet"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (256 of them).

    Printable bytes (33-126, 161-172, 174-255) are their own characters; the others, in ascending
    order, are the characters from 256 on.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    table = {byte: chr(byte) for byte in kept}
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


_BYTES = {char: byte for byte, char in enumerate(byte_alphabet())}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How tokens spell bytes.

    byte_level     every character stands for one byte (`byte_alphabet`)
    replaced       (character, text) pairs, such as "▁" for a space
    byte_fallback  tokens such as <0x0A> are single bytes
    strip_first    one space at the very start of a text belongs to the encoding, not to the text
    """

    byte_level: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_first: bool = False

    def spell(self, token: str) -> bytes:
        """The bytes of a token of the model's vocabulary (added tokens spell themselves)."""
        if self.byte_level:
            values = [_BYTES.get(char) for char in token]
            # Outside the alphabet a token is ordinary text, as in vocabularies extended by hand.
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for char, text in self.replaced:
            token = token.replace(char, text)
        return token.encode()

    @classmethod
    def read(cls, decoder: Any, where: str) -> Spelling:
        """From the `decoder` entry of a tokenizer.json; refuses kinds it does not know by name."""
        steps = list(_steps(decoder, where))
        kinds = [step.get("type") for step in steps]
        if set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
            return cls(byte_level=True)
        replaced: list[tuple[str, str]] = []
        fallback = strip = False
        for step, kind in zip(steps, kinds, strict=True):
            if kind == "Replace":
                replaced.append(_replacement(step, where))
            elif kind == "ByteFallback":
                fallback = True
            elif kind == "Strip":
                strip = _strips_first(step, where) or strip
            elif kind == "Metaspace":
                replaced.append((_one_char(step.get("replacement"), kind, where), " "))
                strip = step.get("prepend_scheme", "always") != "never"
            elif kind != "Fuse":
                raise UnsupportedModel(
                    f"{where}: decoder {kind!r} is not supported"
                    + (" together with others" if kind == "ByteLevel" else ""),
                    hint="supported: ByteLevel, or Replace, ByteFallback, Fuse, Strip, Metaspace",
                )
        return cls(False, tuple(replaced), fallback, strip)


class StreamDecoder:
    """Text from ids as they come; what cannot be shown yet is held back.

    `spell` gives the bytes of an id: none for special tokens and for ids that do not exist. A
    character that is split over tokens appears with its last byte; bytes that cannot become a
    character appear as U+FFFD as soon as that is certain. All texts together are the decoded ids.
    """

    def __init__(self, spell: Callable[[int], bytes], *, strip_first: bool = False) -> None:
        self._spell = spell
        self._at_start = strip_first
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What can be shown now that `token` is known; often nothing."""
        return self._utf8.decode(self._take(token))

    def push_all(self, tokens: Iterable[int]) -> str:
        """The same as joining `push` of each token, faster."""
        return self._utf8.decode(b"".join(map(self._take, tokens)))

    def flush(self) -> str:
        """The end of the text: what is still held back is an incomplete character, U+FFFD."""
        return self._utf8.decode(b"", True)

    def _take(self, token: int) -> bytes:
        data = self._spell(token)
        if self._at_start and data:
            self._at_start = False
            return data[1:] if data[:1] == b" " else data
        return data


def _steps(decoder: Any, where: str, depth: int = 0) -> Iterable[dict[str, Any]]:
    """The decoders of nested sequences, in order."""
    if decoder is None:
        raise UnsupportedModel(
            f"{where}: there is no decoder, so tokens cannot be turned back into text"
        )
    if not isinstance(decoder, dict) or depth > 8:
        raise FormatError(f"{where}: the decoder is not an object of a known form")
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for inner in decoder.get("decoders") or ():
        yield from _steps(inner, where, depth + 1)


def _replacement(step: dict[str, Any], where: str) -> tuple[str, str]:
    pattern = step.get("pattern")
    char = pattern.get("String") if isinstance(pattern, dict) else None
    text = step.get("content")
    if not isinstance(text, str):
        raise FormatError(f"{where}: decoder 'Replace' has no content")
    return _one_char(char, "Replace", where), text


def _one_char(value: Any, kind: str, where: str) -> str:
    # More than one character could lie across two tokens, which a stream cannot replace in time.
    if not isinstance(value, str) or len(value) != 1:
        raise UnsupportedModel(
            f"{where}: decoder {kind!r} replaces {value!r}, expected one character"
        )
    return value


def _strips_first(step: dict[str, Any], where: str) -> bool:
    start, stop = step.get("start"), step.get("stop")
    if step.get("content") != " " or start not in (0, 1) or stop != 0:
        raise UnsupportedModel(
            f"{where}: decoder 'Strip' of {step.get('content')!r}, {start!r} at the start and "
            f"{stop!r} at the end; supported: one space at the start"
        )
    return bool(start)
