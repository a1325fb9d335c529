"""The tokenizer files of a model folder, read as if they were written by an enemy.

Knows tokenizer.json, tokenizer_config.json and generation_config.json, and turns the faults of the
`tokenizers` library into errors that name the file. Does not encode or decode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bonsai.errors import BonsaiError, FormatError, InvalidRequest, UnsupportedModel
from bonsai.format.files import child, read_small
from bonsai.tokenizer.bounds import Bound
from bonsai.tokenizer.patterns import exploding
from bonsai.tokenizer.stream import Spelling

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

__all__ = ["AddedToken", "TokenizerFile", "guarded"]

LARGEST_ID = 1 << 24  # the largest vocabulary in use has half a million; masks have this size
WORD = "\0"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before anything else.

    special  not part of the text when ids are decoded
    control  may not come out of text that users write: special ones, and what looks like markup
             (<think>); runs of spaces and plain words in the table are just text
    """

    id: int
    content: str
    special: bool

    @property
    def control(self) -> bool:
        return self.special or not (self.content.isspace() or self.content.isalnum())


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """What the files say.

    full      the tokenizer as it is, except that it never truncates or pads
    finder    a tokenizer that finds the added tokens of a text and nothing else
    added     added tokens by id
    size      ids that exist, the largest plus one
    prefix    ids that belong before a text that is not a chat (the bos token, or nothing)
    unknown   the id of what the vocabulary cannot spell, in the few that have one
    names     what templates know: bos_token, eos_token, ...
    bound     how many ids a text has at least
    """

    path: Path
    full: Library
    finder: Library
    added: dict[int, AddedToken]
    size: int
    spelling: Spelling
    prefix: tuple[int, ...]
    bos: int | None
    unknown: int | None
    eos: frozenset[int]
    names: dict[str, str]
    config: dict[str, Any]
    bound: Bound

    @classmethod
    def read(cls, folder: Path) -> TokenizerFile:
        """Raises FormatError, or UnsupportedModel for an unknown decoder or post-processor."""
        path = child(folder, "tokenizer.json", str(folder))
        data = read_small(path)
        document = _parsed(data, path)
        full = _built(data, path)
        config = read_json(folder, "tokenizer_config.json")
        if _declare(document, config, folder / "tokenizer_config.json"):
            full = _built(json.dumps(document), path)
        _refuse_exploding(document, path)
        full.no_truncation()  # settings of some training run
        full.no_padding()
        added = _added(full, document, path)
        size = _size(document, added, path)
        names = {k: t for k, v in config.items() if k.endswith("_token") and (t := _name(v))}
        bos = _id_of(full, names.get("bos_token"))
        return cls(
            path=path,
            full=full,
            finder=_built(json.dumps(_finding(document)), path),
            added=added,
            size=size,
            spelling=Spelling.read(document.get("decoder"), str(path)),
            prefix=_prefix(document, config.get("add_bos_token"), bos, size, str(path)),
            bos=bos,
            unknown=_id_of(full, document["model"].get("unk_token")),
            eos=_eos(folder, _id_of(full, names.get("eos_token"))),
            names=names,
            config=config,
            bound=Bound.read(document),
        )

    def plain(self, *, later: bool = False) -> Library:
        """The same tokenizer without control tokens: text that spells one becomes ordinary pieces.

        `later` is for text that does not begin the input: models that put a space before the first
        word get none.
        """
        document = json.loads(self.full.to_str())
        control = {token.content for token in self.added.values() if token.control}
        document["added_tokens"] = [
            token for token in document["added_tokens"] if token["content"] not in control
        ]
        _forget(document["model"], control)
        if later:
            _never_first(document["pre_tokenizer"])
        return _built(json.dumps(document), self.path)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file that may be absent (then it is empty)."""
    path = child(folder, name, str(folder))
    return _parsed(read_small(path), path) if path.exists() else {}


def guarded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the library; what it raises for bad input, panics included, becomes InvalidRequest."""
    try:
        return function(*args, **kwargs)
    except BonsaiError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the tokenizer refuses the text: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by Rust code; not an Exception
            raise
        raise InvalidRequest(f"the tokenizer fails on the text: {error}") from None


def _built(document: str | bytes, path: Path) -> Library:
    from tokenizers import Tokenizer as Library

    try:
        data = document.encode() if isinstance(document, str) else document
        return guarded(Library.from_buffer, data)
    except (InvalidRequest, UnicodeEncodeError) as error:
        reason = str(error).partition(": ")[2][:200]
        raise FormatError(f"{path}: not a tokenizer: {reason}") from None


def _refuse_exploding(document: Mapping[str, Any], path: Path) -> None:
    """Raises UnsupportedModel for a regular expression that could hang or panic on a text."""
    todo = [document.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            pattern = value.get("Regex")
            found = exploding(pattern) if isinstance(pattern, str) else None
            if found is not None:
                raise UnsupportedModel(
                    f"{path}: the regular expression {pattern!r:.80} may take exponential time: "
                    f"{found!r:.80} repeats what can match one text in many ways",
                    hint="tokenizer.json is damaged, or was made to do harm",
                )
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise FormatError(f"{path}: nested too deep") from None
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path}: a JSON {type(document).__name__}, expected an object")
    return document


def _declare(document: dict[str, Any], config: Mapping[str, Any], path: Path) -> bool:
    """Put the added tokens of tokenizer_config.json into `document`, where they win.
    Returns whether that changed anything."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise FormatError(f"{path}: added_tokens_decoder is not an object")
    known = {entry["content"]: entry for entry in document.setdefault("added_tokens", [])}
    before = dict(known)
    for key, entry in declared.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or len(key) > 9 or not isinstance(content, str):
            raise FormatError(
                f"{path}: added_tokens_decoder: no token with content at {key[:40]!r}"
            )
        flags = {flag: entry[flag] for flag in FLAGS if isinstance(entry.get(flag), bool)}
        default = {"id": int(key), **dict.fromkeys(FLAGS, False)}
        known[content] = {**default, **known.get(content, {}), **flags, "content": content}
    document["added_tokens"] = sorted(known.values(), key=lambda entry: entry["id"])
    return known != before


def _finding(document: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with the same added tokens for which everything else is one word."""
    model = {"type": "WordLevel", "vocab": {WORD: 0}, "unk_token": WORD}
    kept = {key: document.get(key) for key in ("version", "added_tokens", "normalizer")}
    return {**kept, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}


def _added(full: Library, document: dict[str, Any], path: Path) -> dict[int, AddedToken]:
    """The added tokens, by the ids that they really get."""
    for entry in document["added_tokens"]:
        if (found := full.token_to_id(entry["content"])) != entry.get("id"):
            raise FormatError(
                f"{path}: the added token {entry['content']!r} has id {entry.get('id')}, "
                f"by the vocabulary it is {found}"
            )
    tokens = full.get_added_tokens_decoder()
    return {i: AddedToken(i, token.content, token.special) for i, token in tokens.items()}


def _size(document: dict[str, Any], added: Iterable[int], path: Path) -> int:
    vocabulary = document["model"].get("vocab")
    if isinstance(vocabulary, dict):
        ids = vocabulary.values()
        if len(set(ids)) != len(ids):
            raise FormatError(f"{path}: two tokens of the vocabulary have one id")
        largest = max(ids, default=-1)
    else:
        largest = len(vocabulary or ()) - 1
    size = max(largest, max(added, default=-1)) + 1
    if not 0 < size <= LARGEST_ID:
        raise FormatError(f"{path}: the largest id is {size - 1}, expected 0 to {LARGEST_ID - 1}")
    return size


def _name(value: Any) -> str | None:
    """A token from tokenizer_config.json: text, or an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _id_of(full: Library, name: str | None) -> int | None:
    return None if name is None else guarded(full.token_to_id, name)


def _eos(folder: Path, named: int | None) -> frozenset[int]:
    """The union of what all files call an end."""
    found = set() if named is None else {named}
    for file, key in (
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos"),
        ("config.json", "eos_token_id"),
    ):
        value = read_json(folder, file).get(key)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise FormatError(f"{folder / file}: {key}: {token!r:.40} is not a token id")
            found.add(token)
    return frozenset(found)


def _prefix(
    document: dict[str, Any], add_bos: Any, bos: int | None, size: int, where: str
) -> tuple[int, ...]:
    """tokenizer_config's add_bos_token decides; where it is silent, the post-processor does.

    What a post-processor puts after the text is left out: a prompt that ends is not continued.
    """
    if isinstance(add_bos, bool):
        return (bos,) if add_bos and bos is not None else ()
    ids = _before(document.get("post_processor"), where)
    if any(not 0 <= token < size for token in ids):
        raise FormatError(
            f"{where}: the post-processor adds id {max(ids)}, the largest is {size - 1}"
        )
    return tuple(ids)


def _before(processor: Any, where: str) -> list[int]:
    kind = processor.get("type") if isinstance(processor, dict) else None
    if processor is None or kind == "ByteLevel":
        return []
    if kind == "Sequence":
        parts = [_before(inner, where) for inner in reversed(processor["processors"])]
        return [token for part in parts for token in part]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]]
    if kind != "TemplateProcessing":
        raise UnsupportedModel(f"{where}: post-processor {kind!r} is not supported")
    ids: list[int] = []
    for piece in processor["single"]:
        if "SpecialToken" not in piece:
            break
        token = processor["special_tokens"].get(piece["SpecialToken"]["id"])
        ids += token["ids"] if token else []
    return ids


def _forget(model: dict[str, Any], words: set[str]) -> None:
    """Take `words` out of a vocabulary, so that no text becomes one of them."""
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        return
    for word in words & vocabulary.keys() - {model.get("unk_token")}:
        del vocabulary[word]
    if "merges" in model:
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [(a, b) for a, b in pairs if not {a, b, a + b} & words]


def _never_first(pre_tokenizer: Any) -> None:
    """Change "a space before the first word" to "never", also in sequences."""
    if isinstance(pre_tokenizer, dict):
        if pre_tokenizer.get("prepend_scheme") == "first":
            pre_tokenizer["prepend_scheme"] = "never"
        for inner in pre_tokenizer.get("pretokenizers") or ():
            _never_first(inner)
