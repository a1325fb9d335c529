"""Hidden names beside a target, under which it is made before it gets its own by a rename.

Knows when one is stale: its lock file is there, but the process that held it has ended.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bonsai import locks

__all__ = ["beside"]


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A fresh path `.<name>.<random>.partial` in the folder of `target`, which is made if missing.

    A file or folder that is still there afterwards is deleted; so is, before, what processes that
    were killed have left there for the same target. Raises OSError.
    """
    _sweep(target)
    path = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    with locks.exclusive(path.with_name(f"{path.name}.lock"), lambda: None):
        try:
            yield path
        finally:
            _delete(path)


def _sweep(target: Path) -> None:
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}\.partial\.lock")
    with suppress(OSError):  # a folder that is missing, or that may not be listed
        for lock in list(target.parent.iterdir()):
            if ours.fullmatch(lock.name):
                with locks.abandoned(lock) as stale:
                    if stale:
                        _delete(lock.with_suffix(""))


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
