"""What every kind of source looks like to the converter, and which kind a path is.

Knows the first bytes of files and the file names of model folders. Does not know what is inside:
`gguf_model`, `huggingface` and `own` open a path and return a `SourceModel`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bonsai.errors import ConversionError, FormatError, ModelNotFound
from bonsai.format.files import identify
from bonsai.matrix import Matrix

__all__ = [
    "GGUF_PART",
    "KINDS",
    "NotOfThisClass",
    "Rows",
    "SourceModel",
    "SourceTensor",
    "fp16_error",
    "fp16_scale",
    "part_name",
    "recognise",
    "refuse_rows",
]

GGUF_MAGIC = b"GGUF"
WANTED = "convert reads a GGUF file, a Hugging Face model folder, or a bonsai checkpoint folder"
# The kinds after the first three are GGUF files, told which order their I2_S tensors have.
KINDS = ("gguf", "huggingface", "bonsai", "i2_s", "i2_s-arm", "i2_s-rows")
GGUF_KINDS = ("gguf", *KINDS[3:])
GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
Rows = slice | np.ndarray


class NotOfThisClass(ConversionError):
    """Rows are not of the class that most tensors of their kind have; `otherwise` has them."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """One tensor. `read(rows)` gives those rows without rounding, in the source's own class.

    `label` names that class for people ("Q4_1"). `rounding` is the relative error that `read`
    cannot avoid (a scale that fp16 does not hold). A vector is read as a matrix of one row. Where
    `read` may raise NotOfThisClass, `otherwise` reads the same tensor in a class that always fits.
    """

    name: str
    shape: tuple[int, ...]
    label: str
    read: Callable[[Rows], Matrix] = field(repr=False)
    release: Callable[[], None] = field(repr=False, default=lambda: None)
    rounding: Callable[[], float] = field(repr=False, default=lambda: 0.0)
    otherwise: SourceTensor | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class SourceModel:
    """An opened source. `config` is ours; its "tied" is absent where only the tensors can tell.

    `files` are those that hold the weights and go into the manifest with their hashes, unless
    `provenance` already says where the weights came from. `extras` are tokenizer files.
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    architecture: str
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    extras: Mapping[str, bytes]
    warnings: tuple[str, ...] = ()
    provenance: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    proof: tuple[str, np.ndarray, np.ndarray] | None = None


def recognise(path: Path, kind: str | None = None) -> tuple[str, Path]:
    """(kind, path to open), by content unless `kind` says it. Errors say what was found instead."""
    try:
        if path.is_dir():
            return _recognise_folder(path, kind)
        if not path.is_file():
            raise ModelNotFound(f"{path}: no such file or folder")
        with open(path, "rb") as file:
            head = file.read(256)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    if head[:4] != GGUF_MAGIC:
        raise FormatError(f"{path}: {_what_it_is(head)}", hint=WANTED)
    if kind is not None and kind not in GGUF_KINDS:
        raise ConversionError(f"{path}: a GGUF file, not a folder of kind {kind!r}")
    return kind or "gguf", path


def _recognise_folder(path: Path, kind: str | None) -> tuple[str, Path]:
    found = kind or _kind_of_folder(path)
    if found not in GGUF_KINDS:
        return found, path
    files = _without_later_parts(sorted(path.glob("*.gguf")))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:8])
        raise ConversionError(
            f"{path}: {len(files)} GGUF files ({names or 'none'})", hint="name the file to convert"
        )
    return recognise(files[0], found)


def part_name(match: re.Match[str], number: int) -> str:
    """The name of another part of the set that `GGUF_PART` matched."""
    return f"{match['stem']}-{number:05}-of-{match['count']}.gguf"


def _without_later_parts(files: list[Path]) -> list[Path]:
    """`files` without the later parts of sets whose first part is there."""
    names = {file.name for file in files}

    def is_later(file: Path) -> bool:
        match = GGUF_PART.fullmatch(file.name)
        return match is not None and match["number"] != "00001" and part_name(match, 1) in names

    return [file for file in files if not is_later(file)]


def _kind_of_folder(path: Path) -> str:
    if (path / "manifest.json").is_file():
        return "bonsai"
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "huggingface"
    if any(path.glob("*.gguf")):
        return "gguf"
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise ConversionError(
            f"{path}: the weights are pickled PyTorch files, which can run code when they are read",
            hint="save the model as safetensors first (save_pretrained does)",
        )
    raise ConversionError(f"{path}: no model in this folder", hint=WANTED)


def _what_it_is(head: bytes) -> str:
    found = identify(head)
    if found is not None:
        return found
    if head[8:9] == b"{":
        return "a single safetensors file; name its folder, which also has config.json"
    if head[:2] in (b"PK", b"\x80\x02"):
        return "a pickled PyTorch file or a zip archive; safetensors and GGUF are read"
    return f"not a GGUF file (it starts with {head[:4]!r})"


def refuse_rows(
    name: str,
    bad: np.ndarray,
    rows: Rows,
    what: str,
    error: type[ConversionError] = ConversionError,
) -> None:
    """Raise an error about the first of `rows` where `bad` [len(rows)] is true, if any."""
    if bad.any():
        local = int(bad.argmax())
        row = (rows.start or 0) + local if isinstance(rows, slice) else int(rows[local])
        raise error(
            f"{name}: row {row} {what}", hint="the source is damaged, or not what it says it is"
        )


def fp16_scale(what: str, exact: float) -> np.float16:
    """The nearest fp16; ConversionError where that is 0 or not finite."""
    with np.errstate(over="ignore"):
        scale = np.float16(exact)
    if not (np.isfinite(scale) and scale != 0):
        raise ConversionError(f"{what} {exact:.3g} does not fit in fp16")
    return scale


def fp16_error(exact: float) -> float:
    """How much is lost by rounding a scale, relative to it."""
    return abs(float(np.float16(exact)) - exact) / abs(exact)
