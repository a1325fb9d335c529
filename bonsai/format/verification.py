"""`verify`: everything that can be wrong with a checkpoint, read completely, one finding each.

Knows hashes, value ranges and the proof of the transform. Opens no backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bonsai import ternary
from bonsai.errors import BonsaiError, ModelNotFound
from bonsai.format.checkpoint import (
    MANIFEST,
    Checkpoint,
    check_hash,
    check_size,
    open_store,
    read_config,
    read_manifest,
)
from bonsai.format.files import Progress, child
from bonsai.format.manifest import Manifest, TensorEntry
from bonsai.format.values import finite

__all__ = ["PROOF_TOLERANCE", "Finding", "Report", "verify"]

# Of the largest output. float32 sums of 20,000 terms stay below 1e-5; a wrong sign is about 1.
PROOF_TOLERANCE = 1e-4
ROWS = 256  # unpacked together for the proof


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `where` is the name of a file or a tensor."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` read, and what was wrong with it."""

    path: Path
    files: int
    tensors: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Report:
    """Read every byte of a checkpoint and report all that is wrong; never stops at the first.

    Hashes, structure, finite values, codes that no packer makes, padding, zero fractions, and the
    proof of the transform. progress("hash", bytes, total), then progress("tensors", n, total).
    Raises ModelNotFound when there is no folder.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except ModelNotFound:
        raise
    except BonsaiError as error:
        return Report(folder, 0, 0, (_finding(error, folder),))
    findings = list(_check_files(folder, manifest, progress))
    try:
        config = read_config(folder, manifest)
        with Checkpoint(folder, manifest, config, open_store(folder, manifest)) as checkpoint:
            findings.extend(_check_tensors(checkpoint, progress))
            findings.extend(_check_proof(checkpoint))
    except BonsaiError as error:
        found = _finding(error, folder)
        if found not in findings:
            findings.append(found)
    return Report(folder, len(manifest.files), len(manifest.tensors), tuple(findings))


def _finding(error: BonsaiError, folder: Path) -> Finding:
    """An error that stopped the reader, told apart into place and problem."""
    text = str(error).removeprefix(str(folder))
    if text.startswith(": "):
        return Finding(folder.name or str(folder), text[2:])
    where, _, problem = text.lstrip(os.sep).partition(": ")
    return Finding(where, problem)


def _check_files(folder: Path, manifest: Manifest, progress: Progress | None) -> Iterator[Finding]:
    total, done = sum(entry.bytes for entry in manifest.files.values()), 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("hash", done, total)

    for name, entry in manifest.files.items():
        try:
            path = child(folder, name, str(folder / MANIFEST))
            check_size(path, entry.bytes)
            check_hash(path, entry.sha256, step)
        except BonsaiError as error:
            yield _finding(error, folder)


def _check_tensors(checkpoint: Checkpoint, progress: Progress | None) -> Iterator[Finding]:
    names = checkpoint.names()
    for done, name in enumerate(names):
        if progress is not None:
            progress("tensors", done, len(names))
        for part, values in checkpoint.planes(name).items():
            packed = part.endswith(".codes")
            if not packed and not finite(values, checkpoint.entry(name).packing):
                yield Finding(part, "has values that are not finite")
        yield from _check_codes(checkpoint, name)
        checkpoint.release(name)
    if progress is not None:
        progress("tensors", len(names), len(names))


def _check_codes(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    entry = checkpoint.entry(name)
    if entry.packing not in ternary.PACKINGS:
        return
    codes = checkpoint.planes(name)[f"{name}.codes"]
    rows, columns = entry.shape
    group = entry.group or 0
    zeros, impossible = ternary.census(codes, entry.packing, group, columns)
    if impossible:
        what = "codes 3" if entry.packing == "t2" else "bytes that no five trits make"
        yield Finding(f"{name}.codes", f"has {impossible} {what}")
    elif not _padding_is_empty(codes, entry):
        yield Finding(f"{name}.codes", f"has padding after column {columns} that is not empty")
    elif entry.zeros is not None and zeros != round(entry.zeros * rows * columns):
        found = zeros / (rows * columns)
        yield Finding(
            f"{name}.codes", f"zero fraction is {found:.6f}, {MANIFEST} says {entry.zeros:.6f}"
        )


def _padding_is_empty(codes: np.ndarray, entry: TensorEntry) -> bool:
    group = entry.group or 0
    used = entry.shape[1] % group
    if used == 0:
        return True
    units = ternary.PACKINGS[entry.packing].units_per_group(group)
    last = ternary.unpack(codes[:, -units:], entry.packing, group, group)
    return bool((last[:, used:] == (-1 if entry.packing == "b1" else 0)).all())


def _check_proof(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The declared transform and the declared matrix make the declared output."""
    proof = checkpoint.proof()
    if proof is None:
        return
    name, x, expected = proof
    matrix = checkpoint.matrix(name)
    assert matrix.transform is not None
    turned = matrix.transform.forward(x.astype(np.float64))
    found = np.concatenate(
        [matrix.rows(slice(i, i + ROWS)) @ turned for i in range(0, matrix.shape[0], ROWS)]
    )
    size = float(np.abs(expected).max())
    error = float(np.abs(found - expected).max())
    if size == 0 or not error <= PROOF_TOLERANCE * size:
        yield Finding(
            name,
            f"its transformed product differs from the stored proof by {error:.3g}, "
            f"allowed are {PROOF_TOLERANCE * size:.3g}",
        )
