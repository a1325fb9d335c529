"""Damage: good files cut, flipped, padded, relabelled; and safetensors files with any header.

Every function changes files in place. `reseal` makes the manifest agree with the files again, so
that what comes after the sizes and hashes is reached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path


def cut(path: Path, count: int) -> None:
    """Take bytes away from the end."""
    path.write_bytes(path.read_bytes()[:-count])


def pad(path: Path, data: bytes = b"trailer") -> None:
    """Append bytes."""
    path.write_bytes(path.read_bytes() + data)


def flip(path: Path, offset: int = -1, mask: int = 1) -> None:
    """Change bits of one byte; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(bytes(data))


def put(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes."""
    old = bytearray(path.read_bytes())
    assert offset + len(data) <= len(old)
    old[offset : offset + len(data)] = data
    path.write_bytes(bytes(old))


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    """Change the object in a JSON file."""
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def safetensors(path: Path, header: dict | bytes, data: bytes, length: int | None = None) -> Path:
    """A file of any header and data; `length` is what its first eight bytes claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claim = len(text) if length is None else length
    path.write_bytes(claim.to_bytes(8, "little") + text + data)
    return path


def header(path: Path) -> dict:
    """The header of a safetensors file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def edit_header(path: Path, change: Callable[[dict], None]) -> None:
    """Change the header of a safetensors file; its length and the data stay where they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    value = json.loads(data[8 : 8 + length])
    change(value)
    text = json.dumps(value, separators=(",", ":")).encode()
    assert len(text) <= length, "no room in the header"
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def reseal(folder: Path) -> None:
    """Write the sizes and hashes that the files have now into the manifest."""

    def change(manifest: dict) -> None:
        for name, entry in manifest["files"].items():
            if (folder / name).exists():
                data = (folder / name).read_bytes()
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit_json(folder / "manifest.json", change)
