"""Where files go that could be made again: pulled models, and notes about files already checked."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["directory"]


def directory() -> Path:
    """`$HF_HOME/bonsai`, with the default of the Hugging Face tools for HF_HOME; need not exist."""
    home = os.environ.get("HF_HOME")
    if not home:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.path.join(base, "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(home))) / "bonsai"
