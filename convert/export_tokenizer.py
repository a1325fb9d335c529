"""The tokenizer files of a checkpoint as the `tokenizer.*` keys of a GGUF file.

Knows byte-level BPE and the names that GGUF has for ways to cut text. A tokenizer that the keys
cannot describe exactly is refused: what is written is read back and compared. The counterpart of
`gguf_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bonsai.convert.gguf_tokenizer import (
    CONTROL,
    CUTTINGS,
    ENDS,
    GPT2,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Cutting,
    tokenizer_files,
)
from bonsai.convert.gguf_writer import U32, Typed
from bonsai.errors import BonsaiError, ConversionError
from bonsai.format.strict_json import TOKENIZER_MARKS, parse_object
from bonsai.tokenizer import Tokenizer

__all__ = ["tokenizer_keys"]

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
OTHER_ENDS = ("eot", "eom")  # places for ids that end a reply, beside eos
FLAGS = ("single_word", "lstrip", "rstrip")


def tokenizer_keys(folder: Path, rows: int, ends: Iterable[int]) -> dict[str, Any]:
    """The keys for the tokenizer in `folder`, for an embedding of `rows` rows.

    `ends` are ids that end a reply beside those that the tokenizer files name. Raises
    ConversionError naming what the keys cannot say.
    """
    where = str(folder / "tokenizer.json")
    files = {path.name: path.read_bytes() for path in _present(folder)}
    if "tokenizer.json" not in files:
        raise ConversionError(f"{folder}: there is no tokenizer.json to export")
    document = parse_object(files["tokenizer.json"], where, most=TOKENIZER_MARKS)
    config = parse_object(files.get("tokenizer_config.json", b"{}"), str(folder))
    tokenizer = Tokenizer.open(folder)
    if tokenizer.size > rows:
        raise ConversionError(f"{where}: {tokenizer.size} ids, the embedding has {rows} rows")
    model = _byte_level_model(document, where)
    added = document.get("added_tokens") or []
    tokens, types = _tokens(model["vocab"], added, rows, where)
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": _cutting_name(document, where),
        "tokens": tokens,
        "token_type": types,
        "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "add_bos_token": _adds_bos(tokenizer, where),
    }
    ids = _special_ids(tokenizer, config, tokens, set(ends), where)
    keys |= {f"{name}_token_id": Typed(U32, value) for name, value in ids.items()}
    metadata = {PREFIX + key: value for key, value in keys.items()} | _templates(files, config)
    _check(metadata, document, where)
    return metadata


def _present(folder: Path) -> list[Path]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return [folder / name for name in names if (folder / name).is_file()]


def _byte_level_model(document: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The "model" part, of which nothing is unusual."""
    model = document["model"]
    decoder = (document.get("decoder") or {}).get("type")
    found = (model.get("type", "BPE"), decoder)
    if found != ("BPE", "ByteLevel"):
        raise ConversionError(
            f"{where}: model {found[0]!r}, decoder {found[1]!r}: only byte-level BPE is exported",
            hint="mlx-2bit copies the tokenizer files as they are",
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ConversionError(f"{where}: '{key}' is {model[key]!r}, which GGUF cannot say")
    return model


def _tokens(
    vocab: Mapping[str, int], added: list[dict[str, Any]], rows: int, where: str
) -> tuple[list[str], list[int]]:
    """Every row's token and its type; rows without a token are unused."""
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for token, i in vocab.items():
        tokens[i], types[i] = token, NORMAL
    for entry in added:
        flags = [flag for flag in FLAGS if entry.get(flag)]
        if entry.get("normalized") and not entry["content"].isascii():
            flags.append("normalized")
        if flags:
            raise ConversionError(
                f"{where}: the token {entry['content']!r} is {' and '.join(flags)}, "
                "which GGUF cannot say"
            )
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    return tokens, types


def _cutting_name(document: Mapping[str, Any], where: str) -> str:
    """The name of the way in which this tokenizer cuts text."""
    pre, normalizer = document.get("pre_tokenizer"), document.get("normalizer")
    found = (
        _steps(pre or {}),
        (normalizer or {}).get("type"),
        bool(document["model"].get("ignore_merges")),
    )
    for name, cutting in CUTTINGS.items():
        if found == _cutting(cutting):
            return name
    raise ConversionError(
        f"{where}: GGUF has no name that we know for the way in which it cuts text "
        f"(pre_tokenizer {json.dumps(pre)[:200]})",
        hint="mlx-2bit copies the tokenizer files as they are",
    )


def _cutting(cutting: Cutting) -> tuple[list[str], str | None, bool]:
    # What CUTTINGS leaves out comes last: bytes as characters, without another cut.
    last = {"type": "ByteLevel", "use_regex": False}
    steps = _steps({"type": "Sequence", "pretokenizers": [*cutting.steps, last]})
    return steps, "NFC" if cutting.nfc else None, cutting.ignore_merges


def _steps(part: Mapping[str, Any]) -> list[str]:
    """The pre-tokenizers in order, each as text; a byte level that also cuts becomes two."""
    kind = part.get("type")
    if kind == "Sequence":
        return [step for inner in part["pretokenizers"] for step in _steps(inner)]
    if kind == "ByteLevel":
        cut = [f"split {GPT2}"] if part.get("use_regex", True) else []
        return [*cut, f"bytes {part.get('add_prefix_space', False)}"]
    if kind == "Split":
        isolated = part.get("behavior") == "Isolated" and not part.get("invert")
        regex = part["pattern"].get("Regex") if isolated else None
        return [f"split {regex}" if regex else json.dumps(part, sort_keys=True)]
    return [json.dumps(part, sort_keys=True)]


def _adds_bos(tokenizer: Tokenizer, where: str) -> bool:
    if tokenizer.prefix not in ((), (tokenizer.bos,)):
        raise ConversionError(
            f"{where}: it puts the ids {list(tokenizer.prefix)} before a text, GGUF can only say "
            "one bos token"
        )
    return bool(tokenizer.prefix)


def _special_ids(
    tokenizer: Tokenizer, config: Mapping[str, Any], tokens: list[str], ends: set[int], where: str
) -> dict[str, int]:
    ids = {} if tokenizer.bos is None else {"bos": tokenizer.bos}
    for key, name in (("unk_token", "unknown"), ("pad_token", "padding")):
        value = _named(config.get(key), tokens)
        if value is not None:
            ids[name] = value
    ends = {i for i in ends | tokenizer.eos if i < len(tokens)}
    if not ends:
        return ids
    eos = _named(config.get("eos_token"), tokens)
    ids["eos"] = eos if eos in ends and eos is not None else min(ends)
    # Readers find those of well-known names by themselves; the others need the places most.
    others = sorted(ends - {ids["eos"]}, key=lambda i: (tokens[i] in ENDS, i))
    ids |= dict(zip(OTHER_ENDS, others))  # noqa: B905  # what is left is checked next
    left = [tokens[i] for i in others[len(OTHER_ENDS) :] if tokens[i] not in ENDS]
    if left:
        raise ConversionError(
            f"{where}: {len(ends)} ids end a reply; GGUF has no place for {', '.join(left)}"
        )
    return ids


def _named(value: Any, tokens: list[str]) -> int | None:
    """The id of a token in tokenizer_config.json: text, or an object with it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return tokens.index(text) if text in tokens else None


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates: "default" under the plain key, others under their names."""
    given = config.get("chat_template")
    named = {"default": given} if isinstance(given, str) else {}
    if isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
    if "chat_template.jinja" in files:
        named["default"] = files["chat_template.jinja"].decode()
    return {
        TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": text
        for name, text in named.items()
    }


def _check(metadata: Mapping[str, Any], document: Mapping[str, Any], where: str) -> None:
    """Read the keys back, and compare what decides how text is encoded."""
    plain = {key: v.value if isinstance(v, Typed) else v for key, v in metadata.items()}
    try:
        again = json.loads(tokenizer_files(plain, where)["tokenizer.json"])
    except BonsaiError as error:
        raise ConversionError(f"{where}: GGUF cannot hold it: {error}", hint=error.hint) from None
    for what, one, two in (
        ("tokens", _all_ids(document), _all_ids(again)),
        ("special tokens", _added(document), _added(again)),
        ("merges", _merges(document), _merges(again)),
    ):
        if one != two:
            first = next(iter(set(one) ^ set(two)), "their order")
            raise ConversionError(f"{where}: its {what} would not come back: {first!a:.80}")


def _all_ids(document: Mapping[str, Any]) -> set[tuple[str, int]]:
    added = {(entry["content"], entry["id"]) for entry in document.get("added_tokens") or []}
    return added | set(document["model"]["vocab"].items())


def _added(document: Mapping[str, Any]) -> set[tuple[str, bool]]:
    return {(entry["content"], entry["special"]) for entry in document.get("added_tokens") or []}


def _merges(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in document["model"]["merges"]
    ]
