"""How many ids a text has at least, from its length: a text that cannot fit is not encoded at all.

Knows what of a tokenizer.json makes text shorter before it is cut, or lets it vanish. Where that
has no bound, or is not understood, there is no bound here either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bonsai.tokenizer.stream import byte_alphabet

__all__ = ["Bound"]

COMPOSED = 4  # NFC makes one character of at most 4, and one byte of at most 3
KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that drop nothing


@dataclass(frozen=True, slots=True)
class Bound:
    """How much text one id stands for at most.

    widest         bytes, or characters, of it; 0 if there is no bound
    lost           bytes that the vocabulary does not spell, which vanish; None to count characters
    counts_spaces  unless a token may swallow any length of white space
    """

    widest: int
    lost: bytes | None = None
    counts_spaces: bool = True

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Bound:
        """The bound of a valid tokenizer.json."""
        model, added = document["model"], document.get("added_tokens") or []
        steps = list(_steps(document.get("pre_tokenizer"), "pretokenizers"))
        in_bytes = any(step.get("type") == "ByteLevel" for step in steps)
        letters = byte_alphabet() if in_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
        vocabulary = model.get("vocab")
        if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
            return cls(0)
        lost = bytes(byte for byte, letter in enumerate(letters) if letter not in vocabulary)
        spells = in_bytes or (bool(model.get("byte_fallback")) and not lost)
        shrinks = _shrinks(document.get("normalizer"))
        if not spells or not shrinks or not all(map(_keeps, steps)):
            return cls(0)
        longest = max(map(len, vocabulary))
        for token in added:
            longest = max(longest, len(token["content"].encode()))
        strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
        return cls(longest * shrinks, lost if in_bytes else None, not strips)

    def least(self, *texts: str) -> int:
        """Ids that the texts have together, at least; they may be cut anywhere."""
        if not self.widest:
            return 0
        size = 0
        for text in texts:
            counted = text if self.counts_spaces else "".join(text.split())
            if self.lost is None:
                size += len(counted)
            else:
                size += len(counted.encode("utf-8", "replace").translate(None, self.lost))
        return size // self.widest


def _steps(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences in sequences flattened."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for each in part.get(inner) or () for step in _steps(each, inner)]


def _keeps(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    removes = step.get("behavior") == "Removed"
    return kind in KEEPING or (kind in ("Split", "Punctuation") and not removes)


def _shrinks(normalizer: Any) -> int:
    """How many times shorter the normalizer makes a text at most; 0 where nobody knows."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind, pattern, content = (step.get(key) for key in ("type", "pattern", "content"))
        old = pattern.get("String") if isinstance(pattern, dict) else None
        if kind == "NFC":
            factor *= COMPOSED
        elif kind == "Replace" and isinstance(old, str) and isinstance(content, str):
            if len(content) < len(old) or len(content.encode()) < len(old.encode()):
                return 0
        elif kind != "Prepend":
            return 0
    return factor
