"""Small tokenizers for tests: folders with a tokenizer.json and what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def data(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    """`folder` with `files` in it; what is neither bytes nor text is written as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        (folder / name).write_bytes(content)
    return folder


def alphabet() -> list[str]:
    """The characters of the 256 bytes in a byte-level vocabulary, by the rule of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def added(content: str, i: int, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    default = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": content, **default, "special": special, **flags}


def byte_level(
    words: Iterable[str] = (), specials: Iterable[str] = (), **parts: Any
) -> dict[str, Any]:
    """A tokenizer.json: ids 0 to 255 are the bytes, then `words` (of letters, each with the merges
    that build it from the left), then `specials`. `parts` replaces entries."""
    tokens = alphabet()
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append([word[: end - 1], word[end - 1]])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    specials = [added(text, len(tokens) + i) for i, text in enumerate(specials)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
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
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
        **parts,
    }
