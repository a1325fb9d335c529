"""A GGUF file, or all parts of a split one, as a source: tensors, config, tokenizer files."""

from __future__ import annotations

from pathlib import Path

from bonsai.convert.config_gguf import read_gguf_config
from bonsai.convert.gguf import GGUFFile, TensorInfo
from bonsai.convert.gguf_parts import read_parts
from bonsai.convert.gguf_tokenizer import tokenizer_files
from bonsai.convert.source import Rows, SourceModel, SourceTensor
from bonsai.errors import ConversionError
from bonsai.matrix import Matrix

__all__ = ["open_gguf"]

TABLE = "token_embd.weight"


def open_gguf(path: Path, group_size: int) -> SourceModel:
    """Open and check a file and its other parts. Nothing but the headers is read."""
    parts = read_parts(path)
    metadata = parts[0].metadata
    tensors = {name: _tensor(part, info) for part in parts for name, info in part.tensors.items()}
    table = tensors.get(TABLE)
    if table is None:
        raise ConversionError(f"{path}: no tensor {TABLE}: not a language model")
    architecture, config, warnings = read_gguf_config(metadata, table.shape[0], str(path))
    return SourceModel(
        kind="gguf",
        path=path,
        files=tuple(part.path for part in parts),
        architecture=architecture,
        config=config,
        tensors=tensors,
        extras=tokenizer_files(metadata, str(path)),
        warnings=tuple(warnings),
    )


def _tensor(file: GGUFFile, info: TensorInfo) -> SourceTensor:
    raw = file.rows(info.name)

    def read(rows: Rows) -> Matrix:
        return info.type.read(info.name, raw[rows], info.dims[0])

    return SourceTensor(
        info.name, info.shape, info.type.name, read, lambda: file.release(info.name)
    )
