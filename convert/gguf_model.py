"""A GGUF file as a source: its tensors, config, tokenizer files and end tokens."""

from __future__ import annotations

from pathlib import Path

from bonsai.convert.config_gguf import read_gguf_config
from bonsai.convert.gguf import GGUFFile, TensorInfo, read_gguf
from bonsai.convert.gguf_tokenizer import tokenizer_files
from bonsai.convert.source import Rows, SourceModel, SourceTensor
from bonsai.errors import ConversionError
from bonsai.matrix import Matrix

__all__ = ["open_gguf"]

TABLE = "token_embd.weight"


def open_gguf(path: Path, group_size: int) -> SourceModel:
    """Open and check a file. Nothing but the header is read."""
    file = read_gguf(path)
    table = file.tensors.get(TABLE)
    if table is None:
        raise ConversionError(
            f"{path}: no tensor {TABLE}: not a language model, or one part of a split one"
        )
    architecture, config, warnings = read_gguf_config(file.metadata, table.shape[0], str(path))
    return SourceModel(
        kind="gguf",
        path=path,
        files=(path,),
        architecture=architecture,
        config=config,
        tensors={name: _tensor(file, info) for name, info in file.tensors.items()},
        extras=tokenizer_files(file.metadata),
        warnings=tuple(warnings),
    )


def _tensor(file: GGUFFile, info: TensorInfo) -> SourceTensor:
    raw = file.rows(info.name)

    def read(rows: Rows) -> Matrix:
        return info.type.read(info.name, raw[rows], info.dims[0])

    return SourceTensor(
        info.name, info.shape, info.type.name, read, lambda: file.release(info.name)
    )
