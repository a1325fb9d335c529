"""`manifest.json`: what a checkpoint says about itself, read strictly and written back.

Knows every key and which values are supported. Does not read tensors. docs/format.md explains it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bonsai import affine, ternary
from bonsai.config import Fields
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.matrix import DENSE

__all__ = [
    "FORMAT",
    "VERSION",
    "FileEntry",
    "Hadamard",
    "Manifest",
    "Source",
    "TensorEntry",
    "check_name",
    "groups",
    "read_tensor",
]

FORMAT = "bonsai"
VERSION = 1
TRANSFORMS = ("hadamard",)
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_ELEMENTS = 2**48  # far above any tensor, far below an overflow of 64-bit byte counts
MAX_DIMS = 4
RESERVED = ("_pad.", "hadamard.")
_TENSOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical tensor. `group` is None where the packing is dense.

    `zeros` is the fraction of zero trits (t2 and t5). `transform` "hadamard" means that the inputs
    of the matrix are transformed first, with the signs of its input width.
    """

    packing: str
    shape: tuple[int, ...]
    group: int | None = None
    zeros: float | None = None
    transform: str | None = None
    planes: int = 1

    @property
    def dense(self) -> bool:
        return self.packing in DENSE


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be: its size in bytes and the hex digest of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights came from: "gguf", "huggingface", ... and the files, by name."""

    kind: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hadamard:
    """The signed block transform: one sign vector per input width; `proof` names a matrix."""

    block: int
    widths: tuple[int, ...]
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of manifest.json. `tensors` keeps the order of the file."""

    architecture: str
    created_by: str
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    source: Source | None = None
    hadamard: Hadamard | None = None
    sampling: Mapping[str, float] | None = None
    tokenizer_size: int | None = None

    @staticmethod
    def read(values: Mapping[str, Any], where: str = "manifest.json") -> Manifest:
        """Raises UnsupportedModel or FormatError naming the key that cannot be honoured."""
        return _read(values, where)


def _read(values: Mapping[str, Any], where: str) -> Manifest:
    fields = Fields(values, where)
    _check_version(fields)
    tokenizer = fields.take_object("tokenizer")
    manifest = Manifest(
        architecture=fields.take(str, "architecture"),
        created_by=fields.take(str, "created_by"),
        source=_read_source(fields.take_object("source")),
        tensors=_read_tensors(fields),
        hadamard=_read_hadamard(fields.take_object("hadamard")),
        files=_read_files(fields),
        sampling=_read_sampling(fields.take_object("sampling")),
        tokenizer_size=None if tokenizer is None else tokenizer.take_size("size"),
    )
    fields.finish()
    if tokenizer is not None:
        tokenizer.finish()
    _check_transforms(manifest, where)
    return manifest


def _check_version(fields: Fields) -> None:
    name = fields.take_any("format")
    if name != FORMAT:
        raise FormatError(f"{fields.where}: 'format' is {name!r:.60}, expected {FORMAT!r}")
    version = fields.take(int, "version")
    if version != VERSION:
        raise UnsupportedModel(
            f"{fields.where}: format version {version}; this bonsai-lm reads version {VERSION}",
            hint="upgrade bonsai-lm, or convert the model again",
        )


def _members(fields: Fields, key: str) -> list[tuple[str, Any]]:
    """The pairs of a nested object whose keys are names."""
    values = fields.take_any(key)
    if not isinstance(values, dict) or not values:
        raise FormatError(f"{fields.where}: '{key}' is not an object with entries")
    return list(values.items())


def _read_tensors(fields: Fields) -> Mapping[str, TensorEntry]:
    found = {}
    for name, value in _members(fields, "tensors"):
        check_name(name, fields.where)
        found[name] = read_tensor(Fields(value, f"{fields.where}: {name}"))
    return MappingProxyType(found)


def check_name(name: str, where: str) -> None:
    """Raise FormatError unless a logical tensor may have this name."""
    if not _TENSOR.fullmatch(name) or len(name) > 256 or name.startswith(RESERVED):
        raise FormatError(f"{where}: {name!a:.80} cannot be the name of a tensor")


def read_tensor(fields: Fields) -> TensorEntry:
    """One entry of "tensors"."""
    packing = fields.take(str, "packing")
    allowed = groups(packing, fields.where)
    shape = _read_shape(fields)
    planes = fields.take(int, "planes", 1)
    if planes != 1:
        raise UnsupportedModel(f"{fields.where}: {planes} planes; supported: 1")
    group = None
    if allowed:
        group = fields.take(int, "group")
        if group not in allowed:
            raise UnsupportedModel(
                f"{fields.where}: group {group} of packing {packing}; "
                f"supported: {', '.join(map(str, allowed))}"
            )
        if len(shape) != 2:
            raise FormatError(f"{fields.where}: shape {list(shape)} of a matrix in {packing}")
    transform = fields.take_any("transform")
    if transform is not None and transform not in TRANSFORMS:
        raise UnsupportedModel(
            f"{fields.where}: transform {transform!r:.60}; supported: {', '.join(TRANSFORMS)}"
        )
    if transform is not None and len(shape) != 2:
        raise FormatError(f"{fields.where}: a transform of something that is not a matrix")
    entry = TensorEntry(packing, shape, group, _read_zeros(fields, packing), transform)
    fields.finish()
    return entry


def groups(packing: str, where: str = "") -> tuple[int, ...]:
    """The groups that a packing supports; none for a dense one."""
    if packing in DENSE:
        return ()
    if packing in affine.BITS:
        return affine.GROUPS
    if packing in ternary.PACKINGS:
        return ternary.PACKINGS[packing].groups
    known = ", ".join((*ternary.PACKINGS, *affine.BITS, *DENSE))
    raise UnsupportedModel(f"{where}: packing {packing!r:.60}; supported: {known}")


def _read_shape(fields: Fields) -> tuple[int, ...]:
    shape = fields.take_any("shape")
    good = isinstance(shape, list) and 0 < len(shape) <= MAX_DIMS
    if not good or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise FormatError(
            f"{fields.where}: 'shape' is {shape!r:.80}, expected 1 to {MAX_DIMS} positive sizes"
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise FormatError(f"{fields.where}: 'shape' {shape} has too many elements")
    return tuple(shape)


def _read_zeros(fields: Fields, packing: str) -> float | None:
    value = fields.take_any("zeros")
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1 or packing not in ("t2", "t5"):
        raise FormatError(
            f"{fields.where}: 'zeros' is {value!r:.60}, expected a fraction, for t2 and t5 only"
        )
    return float(value)


def _read_files(fields: Fields) -> Mapping[str, FileEntry]:
    found = {}
    for name, value in _members(fields, "files"):
        found[name] = _read_file(Fields(value, f"{fields.where}: files: {name!a:.80}"))
    return MappingProxyType(found)


def _read_file(fields: Fields) -> FileEntry:
    size, digest = fields.take(int, "bytes"), fields.take(str, "sha256")
    fields.finish()
    if size < 0 or not _DIGEST.fullmatch(digest):
        raise FormatError(
            f"{fields.where}: {size} bytes, sha256 {digest!r:.80}: not a size and a hash"
        )
    return FileEntry(size, digest)


def _read_source(fields: Fields | None) -> Source | None:
    if fields is None:
        return None
    kind, files = fields.take(str, "kind"), fields.take_any("files", [])
    fields.finish()
    if not isinstance(files, list):
        raise FormatError(f"{fields.where}: 'files' is not a list")
    found = {}
    for value in files:
        entry = Fields(value, f"{fields.where}: files")
        name = entry.take(str, "name")  # before the rest: _read_file refuses what is left
        found[name] = _read_file(entry)
    return Source(kind, MappingProxyType(found))


def _read_hadamard(fields: Fields | None) -> Hadamard | None:
    if fields is None:
        return None
    block, widths = fields.take_size("block"), fields.take_any("widths")
    proof = fields.take_object("proof")
    fields.finish()
    if block & (block - 1):
        raise FormatError(f"{fields.where}: 'block' is {block}, expected a power of two")
    good = isinstance(widths, list) and len(set(map(str, widths))) == len(widths) > 0
    if not good or not all(type(w) is int and 0 < w < 2**31 and w % block == 0 for w in widths):
        raise FormatError(
            f"{fields.where}: 'widths' is {widths!r:.80}, expected multiples of the block {block}"
        )
    matrix = None
    if proof is not None:
        matrix = proof.take(str, "matrix")
        proof.finish()
    return Hadamard(block, tuple(widths), matrix)


def _read_sampling(fields: Fields | None) -> Mapping[str, float] | None:
    if fields is None:
        return None
    found: dict[str, float] = {}
    for key in SAMPLING_KEYS:
        kind = int if key == "top_k" else float
        value = fields.take(kind, key, None)
        if value is not None:
            found[key] = value
    fields.finish()
    return MappingProxyType(found)


def _check_transforms(manifest: Manifest, where: str) -> None:
    """Every transformed matrix has signs for its width, and the proof is about one of them."""
    spec = manifest.hadamard
    for name, entry in manifest.tensors.items():
        if entry.transform is None:
            continue
        if spec is None or entry.shape[1] not in spec.widths:
            known = "none" if spec is None else ", ".join(map(str, spec.widths))
            raise FormatError(
                f"{where}: {name} is transformed at width {entry.shape[1]}; "
                f"signs are declared for: {known}"
            )
    if spec is not None and spec.proof is not None:
        entry_ = manifest.tensors.get(spec.proof)
        if entry_ is None or entry_.transform is None:
            raise FormatError(f"{where}: hadamard: proof: {spec.proof!r:.80} is not transformed")
