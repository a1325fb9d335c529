"""A model that must say what it is told: every token has one successor. Real files, real weights.

    path = successor.write(tmp_path / "m", ["Hel", "lo"])
    bonsai.load(path, backend="reference").generate("anything").text == "Hello"

All matrices of its one layer are zero, so the last hidden state is the embedding of the last token,
a random row of +-1; the head's row of a token's successor is that same row. At width 128 the right
logit is 128 and the best wrong one about 50. It has no memory: only the last token counts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny

from bonsai import ternary
from bonsai.matrix import PackedMatrix

WIDTH = 128
TRIGGER = ord(">")  # the last token of every prompt: the template ends with it
TEMPLATE = """\
{%- for m in messages -%}
{{ ">" if m.role == "assistant" else m.role + ": " }}{{ m.content + "\\n" }}
{%- endfor -%}
{{ ">" if add_generation_prompt }}"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """256 bytes, the pieces of a reply that are longer, and the special tokens."""

    pieces: tuple[bytes, ...]
    specials: tuple[str, ...] = ("<|end|>", "<|stop|>")

    @property
    def size(self) -> int:
        return 256 + len(self.pieces) + len(self.specials)

    def id(self, piece: str | bytes) -> int:
        """The id of a special token, a byte or a piece."""
        if piece in self.specials:
            return 256 + len(self.pieces) + self.specials.index(str(piece))
        data = piece.encode() if isinstance(piece, str) else piece
        return data[0] if len(data) == 1 else 256 + self.pieces.index(data)

    def files(self) -> dict[str, bytes]:
        """The tokenizer, without merges: text is encoded as bytes."""
        names = [_visible(bytes([b])) for b in range(256)] + [_visible(p) for p in self.pieces]
        off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = [{"id": self.id(s), "content": s, "special": True, **off} for s in self.specials]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {**level, "use_regex": False},
            "post_processor": None,
            "decoder": {**level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {name: i for i, name in enumerate(names)},
                "merges": [],
            },
        }
        return {
            "tokenizer.json": json.dumps(tokenizer).encode(),
            "tokenizer_config.json": b"{}",
            "chat_template.jinja": TEMPLATE.encode(),
        }


@dataclass(frozen=True, slots=True)
class Successor:
    """What to say: pieces (each unique; a special token by its name), and how.

    `end` is the token after the last piece, None for whatever has the best wrong logit. `eos` are
    the end tokens in config.json. `vocab` pads the model beyond the tokenizer, and `louder` maps
    ids to a token after which they win, with twice the logit of the right successor.
    """

    pieces: Sequence[str | bytes]
    end: str | None = "<|end|>"
    eos: tuple[str, ...] = ("<|end|>",)
    vocab: int | None = None
    louder: dict[int, str | bytes] = field(default_factory=dict)
    context: int = 4096
    architecture: str = "llama"

    @property
    def vocabulary(self) -> Vocabulary:
        bare = Vocabulary(())
        data = [p.encode() if isinstance(p, str) else p for p in self.pieces]
        return Vocabulary(
            tuple(
                d
                for d, p in zip(data, self.pieces, strict=True)
                if len(d) > 1 and p not in bare.specials
            )
        )

    @property
    def spec(self) -> tiny.Tiny:
        vocabulary = self.vocabulary
        return tiny.Tiny(
            architecture=self.architecture,
            layers=1,
            hidden=WIDTH,
            ffn=WIDTH,
            vocab=self.vocab or vocabulary.size,
            tied=False,
            context=self.context,
            eos=tuple(vocabulary.id(e) for e in self.eos),
        )


def write(
    out: Path,
    what: Successor | Sequence[str | bytes],
    made: tiny.Weights | None = None,
    **files: bytes | None,
) -> Path:
    """A checkpoint folder. `files` are further .json: generation_config=b"{}"; None omits one."""
    what = what if isinstance(what, Successor) else Successor(what)
    given = {f"{name}.json": data for name, data in files.items()}
    merged = {**what.vocabulary.files(), **given}
    kept = {name: data for name, data in merged.items() if data is not None}
    return tiny.save(out, what.spec, weights(what) if made is None else made, kept)


def weights(what: Successor) -> tiny.Weights:
    """The tensors of a random tiny model, with the tables of this one and zeros elsewhere."""
    spec = what.spec
    made = tiny.weights(spec)
    matrices = {name: _packed(name, np.zeros(m.shape)) for name, m in made.matrices.items()}
    vectors = {name: np.ones_like(v) for name, v in made.vectors.items()}
    rows = np.random.default_rng(2).choice([-1, 1], (spec.vocab, WIDTH))
    head, scale = np.zeros_like(rows), np.ones(spec.vocab)
    ids = [what.vocabulary.id(p) for p in what.pieces]
    path = [TRIGGER, *ids, *([] if what.end is None else [what.vocabulary.id(what.end)])]
    assert len(set(path)) == len(path), "a piece occurs twice"
    for token, following in itertools.pairwise(path):
        head[following] = rows[token]
    for winner, after in what.louder.items():
        head[winner], scale[winner] = rows[what.vocabulary.id(after)], 2.0
    matrices["embedding"] = _packed("embedding", rows)
    matrices["head"] = _packed("head", head, scale)
    return tiny.Weights(matrices, vectors)


def _packed(name: str, trits: np.ndarray, scale: np.ndarray | float = 1.0) -> PackedMatrix:
    """Trits [out, in] with one scale for each row; groups that are all zero have scale 0."""
    groups = ternary.padded(trits.shape[1], WIDTH) // WIDTH
    padded = np.zeros((len(trits), groups * WIDTH))
    padded[:, : trits.shape[1]] = trits
    used = padded.reshape(len(trits), groups, WIDTH).any(axis=2)
    scales = (used * np.broadcast_to(scale, (len(trits),))[:, None]).astype(np.float16)
    codes = ternary.pack(trits.astype(np.int8), "t2", WIDTH)
    return PackedMatrix(name, "t2", trits.shape, WIDTH, codes, scales)


def _visible(data: bytes) -> str:
    """Bytes in the printable alphabet that byte-level BPE writes tokens in."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return "".join(chr(b) if b in shown else chr(256 + hidden.index(b)) for b in data)
