"""Which large files were checked already, so that an unchanged one is not hashed at every load.

A stamp is a line in the cache directory. Losing one costs time, never correctness: whoever cannot
read or write stamps hashes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from bonsai import cache

__all__ = ["look", "matches", "remember"]

# A file written this recently may change again without a new mtime (clock ticks are coarse).
SETTLED_S = 2.0


def matches(path: Path, digest: str) -> bool:
    """Whether `path` had this hash when it last looked the way it does now."""
    try:
        stamp = json.loads(_place(path).read_text("utf-8"))
        return bool(stamp == [_real(path), *look(path), digest])
    except (OSError, ValueError, RecursionError):
        return False


def remember(path: Path, digest: str, before: list[int]) -> None:
    """Note that `path` has this hash, if it still looks as it did `before` it was hashed."""
    try:
        now = look(path)
        if not now or now != before or time.time() - now[1] / 1e9 < SETTLED_S:
            return
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.{os.getpid()}")
        partial.write_text(json.dumps([_real(path), *now, digest]), "utf-8")
        os.replace(partial, place)
    except OSError:
        pass


def look(path: Path) -> list[int]:
    """Size, times and identity: what changes when a file does. Nothing without a file."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _real(path: Path) -> str:
    return os.path.realpath(path)


def _place(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(_real(path))).hexdigest()[:32]
    return cache.directory() / ".checked" / f"{name}.json"
