"""One process at a time: a lock file, which the system lets go of when its holder ends, however."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["abandoned", "exclusive"]

POLL_S = 0.1


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`, which is gone afterwards; its folder is made where it is missing.

    While another process holds it, `waiting` is called again and again; what it raises ends the
    wait. Where the file system has no locks, nobody waits.
    """
    while (file := _held(path)) is None:
        waiting()
        time.sleep(POLL_S)
    try:
        yield
    finally:
        _let_go(path, file)


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether the holder of the lock file `path` has ended and left it there.

    If so it is held for the time of the block and gone afterwards. Where the file system has no
    locks nobody knows, and it counts as held.
    """
    try:
        file = open(path, "r+b")
    except OSError:
        yield False
        return
    if _lock(file):
        try:
            yield True
        finally:
            _let_go(path, file)
    else:
        file.close()
        yield False


def _let_go(path: Path, file: BinaryIO) -> None:
    if sys.platform == "win32":  # which deletes no file that is open
        file.close()
    with suppress(OSError):
        path.unlink()
    file.close()


def _held(path: Path) -> BinaryIO | None:
    """The locked file, or None where it is another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = open(path, "ab")
    except FileNotFoundError:  # the last holder has just deleted the folder
        return None
    # The last holder may have deleted the file after it was opened here: such a lock is worthless.
    with suppress(OSError):
        if _lock(file) is not False and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    file.close()
    return None


def _lock(file: BinaryIO) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
