"""A name or a path -> a local directory; and the store of models that were pulled.

Knows the names of models and where the store is. Does not fetch (`download`) and does not convert:
what a repository holds in a foreign format is turned into a checkpoint above this file.

The store is `$HF_HOME/bonsai`. A model lies in `<folder>/<commit>/`, and `<folder>/refs.json` maps
each branch or tag that was pulled to the commit that it meant then. Nothing here changes unless
somebody pulls or removes: a model that worked goes on working, and needs no network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bonsai import cache, locks
from bonsai.errors import BonsaiError, FormatError, ModelNotFound

__all__ = [
    "MANIFEST",
    "Entry",
    "Name",
    "alone",
    "entries",
    "parse",
    "place",
    "publish",
    "published",
    "remove",
    "resolve",
    "store",
    "tree_bytes",
    "workspace",
]

MANIFEST = "manifest.json"
DEFAULT_REVISION = "main"
# What the hub allows in an owner's and in a repository's name; "--" and ".." are refused below.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"({_PART})/({_PART})")
_WHEEL = re.compile(rf"pypi:({_PART})")


@dataclass(frozen=True, slots=True)
class Name:
    """A model's name, "owner/name" or "pypi:name", and its folder in the store."""

    text: str
    folder: str

    @property
    def is_wheel(self) -> bool:
        return self.text.startswith("pypi:")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model in the store. `refs` are the branches and tags that lead to it."""

    name: str
    commit: str
    refs: tuple[str, ...]
    path: Path
    nbytes: int


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The directory of the checkpoint that a path or a name means; never touches the network.

    A directory on this machine wins over a name. Raises ModelNotFound, and FormatError for what
    is there but first has to be converted.
    """
    text = os.fspath(name)
    path = _existing(text)
    if path is not None and path.is_dir():
        return _checkpoint(path)
    if path is not None:
        _refuse_file(path)
    parsed = parse(text)
    found = published(parsed, revision)
    if found is None:
        at = f" at revision '{revision}'" if revision else ""
        wanted = f" --revision {revision}" if revision else ""
        raise ModelNotFound(
            f"'{text}'{at} is not on this machine", hint=f"bonsai models pull {text}{wanted}"
        )
    return found


def parse(text: str) -> Name:
    """The name in `text`. Raises ModelNotFound if it is none; no name leads out of the store."""
    repository, wheel = _REPOSITORY.fullmatch(text), _WHEEL.fullmatch(text)
    if "--" not in text and ".." not in text:
        if repository:
            return Name(text, f"models--{repository[1]}--{repository[2]}")
        if wheel:
            return Name(text, f"pypi--{wheel[1]}")
    raise ModelNotFound(
        f"no model at '{text}': not a directory here, and not a repository name (owner/name)",
        hint="bonsai models ls",
    )


def store() -> Path:
    """The folder of pulled models; it need not exist."""
    return cache.directory()


def published(name: Name, revision: str | None = None) -> Path | None:
    """Where that model lies in the store, or None. `revision` is a branch, a tag or a commit."""
    wanted = revision or DEFAULT_REVISION
    folder = store() / name.folder
    commit = _refs(folder).get(wanted, wanted)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", commit):
        return None
    path = folder / commit
    return path if (path / MANIFEST).is_file() else None


def place(name: Name, commit: str) -> Path:
    """Where one commit of a model belongs; its parent exists, and what is no checkpoint is gone."""
    path = store() / name.folder / commit
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not (path / MANIFEST).is_file():
        _delete(path)
    return path


def publish(name: Name, commit: str, revision: str | None = None) -> Path:
    """Let `revision` mean `commit`, which lies in the store by now; its path.

    What refs.json says is forgotten where it cannot be read.
    """
    folder = store() / name.folder
    try:
        refs = _refs(folder)
    except BonsaiError:
        refs = {}
    refs[revision or DEFAULT_REVISION] = commit
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".refs-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(refs, file, indent=1, sort_keys=True)
    os.replace(temporary, folder / "refs.json")
    return folder / commit


def entries() -> list[Entry]:
    """Every model in the store, by name and commit."""
    root = store()
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        name = _name_of(folder)
        if name is None:
            continue
        try:
            refs = _refs(folder)
        except BonsaiError:  # whoever asks for a revision of this model is told; others are not
            refs = {}
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not (path / MANIFEST).is_file():
                continue
            names = tuple(sorted(ref for ref, commit in refs.items() if commit == path.name))
            found.append(Entry(name.text, path.name, names, path, tree_bytes(path)))
    return found


def remove(name: Name) -> int:
    """Delete every revision of a model and broken downloads of it; the bytes that were freed.

    Raises ModelNotFound, and BonsaiError while another process pulls the model.
    """

    def refuse() -> None:
        raise BonsaiError(f"'{name.text}' is being pulled by another process", hint="stop it first")

    folders = [store() / name.folder, _workspace(name)]
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        raise ModelNotFound(f"'{name.text}' is not in the store", hint="bonsai models ls")
    with alone(name, refuse):
        freed = sum(tree_bytes(folder) for folder in folders)
        for folder in folders:
            _delete(folder)
    return freed


@contextmanager
def alone(name: Name, waiting: Callable[[], None]) -> Iterator[None]:
    """The only process that changes this model in the store; see `locks.exclusive` for the wait.

    What was not published before may be published when the wait is over.
    """
    try:
        with locks.exclusive(store() / ".incoming" / f"{name.folder}.lock", waiting):
            yield
    finally:
        _tidy(name)


@contextmanager
def workspace(
    name: Name, commit: str, keep_on: tuple[type[BaseException], ...] = ()
) -> Iterator[Path]:
    """A folder in the store for the raw files of one commit; afterwards it is gone.

    Two processes would share it, so use it `alone`. After an exception of a kind in `keep_on` the
    files stay, so that the next run goes on from them. Files of another commit are deleted at once.
    """
    root = _workspace(name)
    folder = root / commit
    folder.mkdir(parents=True, exist_ok=True)
    for other in root.iterdir():
        if other != folder:
            _delete(other)
    try:
        yield folder
    except keep_on:
        raise
    except BaseException:
        _sweep(name)
        raise
    _sweep(name)


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(parent, file)).st_size
            except OSError:
                continue
    return total


def _existing(text: str) -> Path | None:
    try:
        path = Path(text)
        return path if text and path.exists() else None
    except (OSError, ValueError):  # too long, NUL or lone surrogates: not a path
        return None


def _checkpoint(path: Path) -> Path:
    """The directory, if it holds a checkpoint; else an error that says what it holds."""
    if (path / MANIFEST).is_file():
        return path
    gguf = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        what, source = "a Hugging Face model", path
    elif gguf:
        what, source = "a folder with a GGUF file", gguf[0]
    else:
        raise FormatError(
            f"{path}: no {MANIFEST} in this directory, so it is not a bonsai checkpoint",
            hint="bonsai models ls",
        )
    raise FormatError(
        f"{path}: {what}, not a bonsai checkpoint", hint=f"bonsai convert {source} OUT"
    )


def _refuse_file(path: Path) -> None:
    with open(path, "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        raise FormatError(
            f"{path}: a GGUF file, not a bonsai checkpoint", hint=f"bonsai convert {path} OUT"
        )
    raise FormatError(
        f"{path}: a file; a checkpoint is a directory with {MANIFEST}",
        hint="name the directory; bonsai models ls lists what was pulled",
    )


def _refs(folder: Path) -> dict[str, str]:
    """What refs.json of a model's folder says; nothing where there is none."""
    try:
        refs = json.loads((folder / "refs.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        name = cache.name_of(folder.name)
        raise BonsaiError(
            f"{folder / 'refs.json'}: cannot be read: {error}",
            hint=f"bonsai models rm {name}, then bonsai models pull {name}",
        ) from error
    return {str(ref): str(commit) for ref, commit in refs.items()} if isinstance(refs, dict) else {}


def _name_of(folder: Path) -> Name | None:
    try:
        name = parse(cache.name_of(folder.name) or "")
    except ModelNotFound:
        return None
    return name if name.folder == folder.name and folder.is_dir() else None


def _workspace(name: Name) -> Path:
    return store() / ".incoming" / name.folder


def _sweep(name: Name) -> None:
    """Delete a workspace, and the folders of the store that are empty without it."""
    _delete(_workspace(name))
    _tidy(name)


def _tidy(name: Name) -> None:
    """Delete the folders of the store that are empty."""
    for parent in (_workspace(name).parent, store() / name.folder, store()):
        try:
            parent.rmdir()
        except OSError:  # not empty, or never made
            continue


def _delete(path: Path) -> None:
    """Delete a file or a folder of ours; a link is deleted, not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
