"""Which planes a logical tensor has in its container, and whether the planes there are those.

Knows dtypes and shapes from packing, shape and group. Does not read values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from bonsai import affine, ternary
from bonsai.errors import FormatError
from bonsai.format.manifest import Manifest, TensorEntry, groups
from bonsai.format.safetensors_io import TensorInfo

__all__ = [
    "ALIGNMENT",
    "PROOF_INPUT",
    "PROOF_OUTPUT",
    "Plane",
    "Store",
    "check_planes",
    "planes",
    "signs",
]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
PROOF_INPUT = "hadamard.proof.input"
PROOF_OUTPUT = "hadamard.proof.output"
CONVERT_AGAIN = "the tensors and manifest.json come from different models; convert it again"
_PAD = re.compile(r"_pad\.\d+")
_DENSE_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}

Plane = tuple[str, tuple[int, ...]]
"""dtype (a name of safetensors) and shape."""


class Store(Protocol):
    """A container of named arrays: SafetensorsFile, ShardedTensors or NpzFile."""

    path: Path
    bf16: tuple[str, ...]
    """What `info` calls the dtype of bf16 here."""

    def names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def array(self, name: str) -> np.ndarray: ...

    def release(self, name: str) -> None: ...

    def prefetch(self, name: str) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def signs(width: int) -> str:
    """The name of the sign vector of an input width."""
    return f"hadamard.signs.{width}"


def planes(name: str, entry: TensorEntry) -> dict[str, Plane]:
    """The arrays of one logical tensor: plane name -> (dtype, shape)."""
    if entry.dense:
        return {name: (_DENSE_DTYPES[entry.packing], entry.shape)}
    assert entry.group is not None
    rows, columns = entry.shape
    scales: Plane = ("F16", (rows, ternary.padded(columns, entry.group) // entry.group))
    if entry.packing in affine.BITS:
        codes = affine.codes_shape(entry.packing, rows, columns, entry.group)
        parts = {"codes": ("U8", codes), "scales": scales, "biases": scales}
    else:
        kind = ternary.PACKINGS[entry.packing]
        dtype = "U32" if kind.dtype is np.uint32 else "U8"
        parts = {"codes": (dtype, kind.codes_shape(rows, columns, entry.group)), "scales": scales}
    return {f"{name}.{part}": plane for part, plane in parts.items()}


def check_planes(store: Store, manifest: Manifest) -> None:
    """Raises FormatError unless the store holds exactly the planes that the manifest declares."""
    held = {name: store.info(name) for name in store.names()}
    owners: dict[str, str] = {}
    for name, entry in manifest.tensors.items():
        for plane, wanted in planes(name, entry).items():
            if plane in owners:
                raise FormatError(f"{store.path}: {plane} belongs to {owners[plane]} and to {name}")
            owners[plane] = name
            _check_plane(store, held, plane, wanted, (name, entry))
    for plane, wanted in _extra_planes(manifest).items():
        owners[plane] = plane
        _check_plane(store, held, plane, wanted, None)
    for plane, info in held.items():
        padding = _PAD.fullmatch(plane) and info.dtype == "U8" and info.nbytes < ALIGNMENT
        if plane not in owners and not padding:
            raise FormatError(
                f"{info.file}: tensor '{plane}' is not in manifest.json", hint=CONVERT_AGAIN
            )


def _extra_planes(manifest: Manifest) -> Mapping[str, Plane]:
    """Signs, and the input and output of the proof."""
    spec = manifest.hadamard
    if spec is None:
        return {}
    extra: dict[str, Plane] = {signs(width): ("I8", (width,)) for width in spec.widths}
    if spec.proof is not None:
        rows, columns = manifest.tensors[spec.proof].shape
        extra[PROOF_INPUT] = ("F32", (columns,))
        extra[PROOF_OUTPUT] = ("F32", (rows,))
    return extra


def _check_plane(
    store: Store,
    held: Mapping[str, TensorInfo],
    plane: str,
    wanted: Plane,
    owner: tuple[str, TensorEntry] | None,
) -> None:
    dtype, shape = wanted
    needed = f"{dtype} [{', '.join(map(str, shape))}]"
    if plane not in held:
        raise FormatError(
            f"{store.path}: no tensor '{plane}', manifest.json needs {needed}", hint=CONVERT_AGAIN
        )
    info = held[plane]
    dtypes = store.bf16 if dtype == "BF16" else (dtype,)
    if info.dtype not in dtypes or info.shape != shape:
        why = "" if owner is None else _other_group(held, *owner)
        raise FormatError(
            f"{info.file}: {plane} is {info}, manifest.json needs {needed}{why}",
            hint=CONVERT_AGAIN,
        )
    if info.offset % ALIGNMENT:
        raise FormatError(
            f"{info.file}: {plane} begins at byte {info.offset}, not a multiple of {ALIGNMENT}",
            hint="another program wrote the file; convert the model again",
        )


def _other_group(held: Mapping[str, TensorInfo], name: str, entry: TensorEntry) -> str:
    """Says which group the planes in the file have, when they are those of another one."""
    for group in groups(entry.packing):
        wanted = planes(name, replace(entry, group=group))
        if all(plane in held for plane in wanted) and wanted == {
            plane: (held[plane].dtype, held[plane].shape) for plane in wanted
        }:
            return f": the file has groups of {group}, the manifest says {entry.group}"
    return ""
