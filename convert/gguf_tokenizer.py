"""The tokenizer in a GGUF file as the files that Hugging Face models have.

Knows the `tokenizer.*` keys and how the models behind them cut text. The tokenizer.json encodes as
the original does, not as an approximation would: a pre-tokenizer we do not know is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bonsai.errors import FormatError, UnsupportedModel

__all__ = ["tokenizer_files"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPECIAL_IDS = ("bos", "eos", "unknown", "padding", "eot", "eom")
LONGEST_PIECE = 1024  # characters; sentencepiece makes at most 16 unless told otherwise

# Tokens that end a turn or a text in some model family. Files often name only one of theirs.
ENDS = frozenset(
    """<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|return|> <|call|>
    <end_of_turn> <end_of_utterance> <\uff5cend\u2581of\u2581sentence\uff5c> <EOT> [EOT] [EOS] <eos>
    </s>""".split()
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
)  # one digit at a time
QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _LINES
)  # marks go with letters
LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
)  # up to three digits


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a family cuts text into the pieces that merges work in.

    steps          pre-tokenizers before the bytes become characters
    nfc            text is composed first (a letter and its accent become one character)
    ignore_merges  a piece that is a token as a whole is that token, whatever the merges say
    add_bos        whether the bos token belongs before a text, where the file does not say
    """

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = Cutting((_split(LLAMA3),), ignore_merges=True, add_bos=True)
CUTTINGS: dict[str, Cutting] = {
    "gpt-2": Cutting((_split(GPT2),)),
    "olmo": Cutting((_split(GPT2),), nfc=True),  # the vocabulary of GPT-NeoX
    "smollm": Cutting((_DIGITS, _split(GPT2))),
    "qwen2": Cutting((_split(QWEN2),), nfc=True),
    "qwen35": Cutting((_split(QWEN35),), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    # What llama.cpp does with files from before the key existed.
    "default": Cutting(
        tuple(map(_split, (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")))
    ),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]` is the token with id i, `types[i]` what it is; `ids` has those that can occur.

    `special` are the ids the file names: "bos", "eos", ...
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    special: Mapping[str, int]
    where: str

    def of_type(self, *types: int) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]


def tokenizer_files(metadata: Mapping[str, Any], where: str = "GGUF") -> dict[str, bytes]:
    """File name -> contents: tokenizer.json, tokenizer_config.json, generation_config.json and,
    where the file has one, chat_template.jinja.

    `metadata` are the keys of the file, `where` is its name in errors. Raises FormatError for a
    damaged vocabulary, UnsupportedModel for a kind that cannot be encoded identically.
    """
    kind = _take(metadata, "tokenizer.ggml.model", str, where)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2', 'llama'"
        )
    words = _read_vocabulary(metadata, kind, where)
    if kind == "gpt2":
        document, add_bos = _byte_level(metadata, words)
    else:
        document, add_bos = _sentencepiece(metadata, words)
    add_bos = _take(metadata, "tokenizer.ggml.add_bos_token", bool, where, add_bos)
    add_bos = add_bos and "bos" in words.special
    document["post_processor"] = _bos_first(words) if add_bos else None
    templates = _templates(metadata, where)
    files = {
        "tokenizer.json": document,
        "tokenizer_config.json": _config(words, add_bos, templates),
        "generation_config.json": _generation(words),
    }
    made = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}
    if "default" in templates:
        made["chat_template.jinja"] = templates["default"].encode()
    return made


def _take(metadata: Mapping[str, Any], key: str, kind: type, where: str, *default: Any) -> Any:
    value = metadata.get(key)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise FormatError(f"{where}: {key} is {found}, expected {kind.__name__}")
    return value


def _take_list(metadata: Mapping[str, Any], key: str, kinds: Any, where: str) -> list[Any]:
    values = metadata.get(key)
    if values is not None and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise FormatError(f"{where}: {key} is {'missing' if values is None else 'not an array'}")
    for i, value in enumerate(values):
        if not isinstance(value, kinds):
            raise FormatError(f"{where}: {key}[{i}] is {value!r:.60}, of an unexpected type")
    return list(values)


# ---- the vocabulary ------------------------------------------------------------------------------


def _read_vocabulary(metadata: Mapping[str, Any], kind: str, where: str) -> Vocabulary:
    tokens = _take_list(metadata, "tokenizer.ggml.tokens", str, where)
    special = _special_ids(metadata, kind, len(tokens), where)
    if metadata.get("tokenizer.ggml.token_type") is None:
        named = set(special.values())
        types = [CONTROL if i in named else NORMAL for i in range(len(tokens))]
    else:
        types = _take_list(metadata, "tokenizer.ggml.token_type", int, where)
    if len(types) != len(tokens):
        raise FormatError(
            f"{where}: tokenizer.ggml has {len(tokens)} tokens and {len(types)} token types"
        )
    ids: dict[str, int] = {}
    for i, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if not 0 <= type_ <= BYTE:
            raise FormatError(f"{where}: tokenizer.ggml.token_type[{i}] is {type_}")
        if type_ == BYTE and not re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            raise FormatError(
                f"{where}: tokenizer.ggml.tokens[{i}] is the byte token {token!r:.60}",
                hint="byte tokens are <0x00> to <0xFF>; the file is damaged",
            )
        if not token or type_ == UNUSED:  # rows without a token: they decode to nothing
            continue
        if ids.setdefault(token, i) != i:
            raise FormatError(
                f"{where}: tokenizer.ggml.tokens: {token!r:.60} has ids {ids[token]} and {i}"
            )
    return Vocabulary(tokens, types, ids, special, where)


def _special_ids(metadata: Mapping[str, Any], kind: str, count: int, where: str) -> dict[str, int]:
    # sentencepiece files from before the keys existed have unknown, bos, eos at 0, 1, 2.
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if kind == "llama" and count > 2 else {}
    special = {}
    for name in SPECIAL_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        value = _take(metadata, key, int, where, defaults.get(name))
        if value is None:
            continue
        if not 0 <= value < count:
            raise FormatError(f"{where}: {key} is {value}, the vocabulary has {count} tokens")
        special[name] = value
    return special


def _added_tokens(words: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are matched before anything else; special ones are no part of decoded text."""
    return [
        {
            "id": i,
            "content": words.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": words.types[i] != USER_DEFINED or words.tokens[i] in ENDS,
        }
        for i in words.of_type(UNKNOWN, CONTROL, USER_DEFINED)
        if words.tokens[i]
    ]


# ---- tokenizer.json ------------------------------------------------------------------------------


def _byte_level(metadata: Mapping[str, Any], words: Vocabulary) -> tuple[dict[str, Any], bool]:
    """A byte-level tokenizer, and whether it wants a bos token."""
    name = _take(metadata, "tokenizer.ggml.pre", str, words.where, "default")
    cutting = CUTTINGS.get(name)
    if cutting is None:
        raise UnsupportedModel(
            f"{words.where}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(CUTTINGS)}",
            hint="convert the Hugging Face folder of this model, which has its tokenizer.json",
        )
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [*cutting.steps, {**alphabet, "use_regex": False}]
    document = _document(
        words,
        normalizer={"type": "NFC"} if cutting.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder={**alphabet, "use_regex": True},
        model={
            "ignore_merges": cutting.ignore_merges,
            "vocab": dict(words.ids),
            "merges": _read_merges(metadata, words),
        },
    )
    return document, cutting.add_bos


def _read_merges(metadata: Mapping[str, Any], words: Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for i, merge in enumerate(_take_list(metadata, "tokenizer.ggml.merges", str, words.where)):
        cut = merge.find(" ", 1)  # a token may be one space
        left, right = merge[:cut], merge[cut + 1 :]
        missing = next((t for t in (left, right, left + right) if t not in words.ids), None)
        if cut < 1 or missing is not None:
            raise FormatError(
                f"{words.where}: tokenizer.ggml.merges[{i}] is {merge!r:.60}, "
                f"but {missing!r:.60} is not a token"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(metadata: Mapping[str, Any], words: Vocabulary) -> tuple[dict[str, Any], bool]:
    """A sentencepiece BPE tokenizer with byte fallback, and whether it wants a bos token."""
    where = words.where
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModel(f"{where}: a sentencepiece vocabulary with its own normalization")
    if _take(metadata, "tokenizer.ggml.remove_extra_whitespaces", bool, where, False):
        raise UnsupportedModel(f"{where}: a sentencepiece vocabulary that drops spaces")
    prefix = _take(metadata, "tokenizer.ggml.add_space_prefix", bool, where, True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    unknown = words.special.get("unknown")
    document = _document(
        words,
        normalizer={"type": "Sequence", "normalizers": [*prepend, space]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "unk_token": None if unknown is None else words.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(words.ids),
            "merges": _scored_merges(metadata, words),
        },
    )
    return document, True


def _scored_merges(metadata: Mapping[str, Any], words: Vocabulary) -> list[tuple[str, str]]:
    """The merges that scores imply: any two tokens whose union is a token, best union first."""
    scores = _take_list(metadata, "tokenizer.ggml.scores", (int, float), words.where)
    if len(scores) != len(words.tokens) or not all(map(math.isfinite, scores)):
        raise FormatError(
            f"{words.where}: tokenizer.ggml.scores are not {len(words.tokens)} finite numbers"
        )
    pieces = {words.tokens[i] for i in words.of_type(0, NORMAL) if words.tokens[i]}
    ranked = sorted(pieces, key=lambda piece: (-scores[words.ids[piece]], words.ids[piece]))
    merges = []
    for piece in ranked:
        if len(piece) > LONGEST_PIECE:
            raise FormatError(f"{words.where}: a token of {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _document(words: Vocabulary, *, model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(words),
        **parts,
        "model": {**bpe, **model},
    }


def _bos_first(words: Vocabulary) -> dict[str, Any]:
    """A post-processor that puts the bos token before a text."""
    token = words.tokens[words.special["bos"]]
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {token: {"id": token, "ids": [words.special["bos"]], "tokens": [token]}},
    }


# ---- the other files -----------------------------------------------------------------------------


def _templates(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Chat templates by name; the main one is "default"."""
    start = "tokenizer.chat_template"
    return {
        key[len(start) + 1 :] or "default": _take(metadata, key, str, where)
        for key in metadata
        if key == start or key.startswith(start + ".")
    }


def _config(words: Vocabulary, add_bos: bool, templates: Mapping[str, str]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config: dict[str, Any] = {
        f"{short}_token": words.tokens[words.special[name]]
        for name, short in names.items()
        if name in words.special
    }
    others = [{"name": n, "template": t} for n, t in templates.items() if n != "default"]
    if others:
        config["chat_template"] = others
    return {
        **config,
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _generation(words: Vocabulary) -> dict[str, Any]:
    """All ids that end a reply: the ones the file names, and end tokens that it has."""
    ends = {words.special[name] for name in ("eos", "eot", "eom") if name in words.special}
    ends |= {i for i in words.of_type(CONTROL, USER_DEFINED) if words.tokens[i] in ENDS}
    generation: dict[str, Any] = {"eos_token_id": sorted(ends)}
    for name, short in (("bos", "bos"), ("padding", "pad")):
        if name in words.special:
            generation[f"{short}_token_id"] = words.special[name]
    return generation
