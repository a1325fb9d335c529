"""Files of a model folder that nobody vouches for: their names, what they are, and their hashes.

Knows paths and first bytes. Does not know tensors or the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from bonsai.errors import FormatError

__all__ = ["Progress", "child", "identify", "read_small", "sha256", "size_of"]

Progress = Callable[[str, int, int], None]

SMALL = 64 << 20  # bytes; the largest tokenizer.json in use has 33 MB
CHUNK = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
AGAIN = "download it again, or convert the model again"


def child(folder: Path, name: str, where: str) -> Path:
    """The file `name` in `folder`. `where` says who names it.

    Raises FormatError unless `name` is a plain file name and the file, with symbolic links
    followed, lies under `folder`, or in `blobs` beside `snapshots` when folder is
    `snapshots/<commit>` (the layout of the Hugging Face cache). The file need not exist.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith("."):
        raise FormatError(
            f"{where}: {_shown(name)} is not a plain file name",
            hint="files of a model lie in its own folder; do not load this one unless you know why",
        )
    path = folder / name
    target = Path(os.path.realpath(path))
    home = Path(os.path.realpath(folder))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and target.parent != blobs:
        raise FormatError(
            f"{where}: '{name}' is a link that leaves the folder, to {target}",
            hint="replace the link with the file itself",
        )
    return path


def size_of(path: Path) -> int:
    """Bytes of an ordinary file; raises FormatError where there is none."""
    try:
        if not path.is_file():
            raise FormatError(f"{path}: the file is missing", hint=AGAIN)
        return path.stat().st_size
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_small(path: Path, limit: int = SMALL) -> bytes:
    """The bytes of a file of at most `limit` bytes."""
    size = size_of(path)
    if size > limit:
        raise FormatError(f"{path}: {size} bytes, at most {limit} are accepted")
    try:
        with open(path, "rb") as file:
            data = file.read(size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    refuse_impostor(path, data[:256])
    return data


def identify(head: bytes) -> str | None:
    """What a file that is no checkpoint file looks like from its first bytes, or None."""
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "this looks like a git-LFS pointer, not the file itself"
    start = head.lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page, not the file itself"
    return None


def refuse_impostor(path: Path, head: bytes) -> None:
    """Raise FormatError when `head`, the first bytes, are those of a pointer or an error page."""
    found = identify(head)
    if found is not None:
        pointer = head.startswith(b"version https://git-lfs")
        raise FormatError(f"{path}: {found}", hint="git lfs pull" if pointer else AGAIN)


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file; `progress` gets the bytes of each step."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
