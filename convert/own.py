"""One of our own checkpoints as a source: to repack it, or to quantize it again."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from bonsai.convert.source import Rows, SourceModel, SourceTensor
from bonsai.format import Checkpoint, Manifest, TensorEntry
from bonsai.format.checkpoint import CONFIG
from bonsai.format.files import child, read_small
from bonsai.format.shards import INDEX
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix

__all__ = ["open_own"]


def open_own(path: Path, group_size: int) -> SourceModel:
    """Open and check a checkpoint; its provenance and recommended sampling are kept."""
    checkpoint = Checkpoint.open(path)
    manifest = checkpoint.manifest
    config = {key: value for key, value in checkpoint.config.items() if key != "architecture"}
    return SourceModel(
        kind="bonsai",
        path=path,
        files=tuple(path / name for name in manifest.files if _holds_tensors(name)),
        architecture=checkpoint.architecture,
        config=config,
        tensors={name: _tensor(checkpoint, name) for name in checkpoint.names()},
        extras=_extras(path, manifest),
        provenance=_provenance(manifest),
        sampling=manifest.sampling,
        proof=checkpoint.proof(),
    )


def _tensor(checkpoint: Checkpoint, name: str) -> SourceTensor:
    entry = checkpoint.entry(name)
    whole = cache(lambda: _read(checkpoint, name, entry))

    def read(rows: Rows) -> Matrix:
        return _rows(whole(), rows)

    return SourceTensor(name, entry.shape, entry.packing, read, partial(checkpoint.release, name))


def _read(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> Matrix:
    if len(entry.shape) == 2:
        return checkpoint.matrix(name)
    values = checkpoint.vector(name).reshape(1, -1)
    return DenseMatrix(name, "f32", (1, values.shape[1]), values)


def _rows(matrix: Matrix, rows: Rows) -> Matrix:
    if isinstance(matrix, DenseMatrix):
        values = matrix.values[rows]
        return DenseMatrix(matrix.name, matrix.packing, values.shape, values, matrix.transform)
    codes, scales = matrix.codes[rows], matrix.scales[rows]
    biases = None if matrix.biases is None else matrix.biases[rows]
    shape = (len(codes), matrix.shape[1])
    return PackedMatrix(
        matrix.name, matrix.packing, shape, matrix.group, codes, scales, biases, matrix.transform
    )


def _holds_tensors(name: str) -> bool:
    return name.endswith((".safetensors", ".npz"))


def _extras(path: Path, manifest: Manifest) -> dict[str, bytes]:
    made = (CONFIG, INDEX)  # the writer makes these anew
    names = [name for name in manifest.files if name not in made and not _holds_tensors(name)]
    return {name: read_small(child(path, name, str(path))) for name in names}


def _provenance(manifest: Manifest) -> dict[str, Any] | None:
    source = manifest.source
    if source is None:
        return None
    files = [
        {"name": name, "bytes": entry.bytes, "sha256": entry.sha256}
        for name, entry in source.files.items()
    ]
    return {"kind": source.kind, "files": files}
