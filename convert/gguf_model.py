"""A GGUF file, or all parts of a split one, as a source: tensors, config, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bonsai.convert.blocks import I2_S
from bonsai.convert.config_gguf import read_gguf_config
from bonsai.convert.gguf import GGUFFile, TensorInfo
from bonsai.convert.gguf_parts import read_parts
from bonsai.convert.gguf_tokenizer import tokenizer_files
from bonsai.convert.hadamard import read_gguf_fold
from bonsai.convert.i2_s import i2_s_tensor
from bonsai.convert.qwen35 import from_gguf
from bonsai.convert.source import Rows, SourceModel, SourceTensor
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.matrix import Matrix

__all__ = ["open_gguf"]

TABLE = "token_embd.weight"
OF_BITNET_CPP = ("bitnet-25", "bitnet-b1.58")  # architectures that only its converters write
USUAL_LAYOUT = "i2_s"
CUTTING = "tokenizer.ggml.pre"
LLAMA3_VOCAB = 128256


def open_gguf(path: Path, group_size: int, i2_s: str | None = None) -> SourceModel:
    """Open and check a file and its other parts. Nothing but the headers is read.

    `i2_s` is the layout of I2_S tensors, where it is not known from the architecture.
    """
    parts = read_parts(path)
    metadata = parts[0].metadata
    table = next((p.tensors[TABLE] for p in parts if TABLE in p.tensors), None)
    if table is None:
        raise ConversionError(f"{path}: no tensor {TABLE}: not a language model")
    architecture, config, warnings = read_gguf_config(metadata, table.shape[0], str(path))
    layout, notes = _i2_s_layout(parts, i2_s)
    tokenizer_keys, said = _with_cutting(metadata, table.shape[0])
    notes += said
    tensors = {
        name: _tensor(part, info, layout) for part in parts for name, info in part.tensors.items()
    }
    if architecture == "qwen35":
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        fold = read_gguf_fold(metadata, shapes, str(path))
        tensors, left_out = from_gguf(tensors, config, fold)
        notes += left_out
    return SourceModel(
        kind="gguf",
        path=path,
        files=tuple(part.path for part in parts),
        architecture=architecture,
        config=config,
        tensors=tensors,
        extras=tokenizer_files(tokenizer_keys, str(path)),
        warnings=(*warnings, *notes),
    )


def _i2_s_layout(parts: list[GGUFFile], chosen: str | None) -> tuple[str, list[str]]:
    """The layout of I2_S tensors, if there are some, and what to tell the user about it."""
    tensors = [info for part in parts for info in part.tensors.values() if info.type is I2_S]
    if chosen is not None or not tensors:
        return chosen or USUAL_LAYOUT, []
    where, architecture = parts[0].path, parts[0].metadata["general.architecture"]
    if architecture not in OF_BITNET_CPP:
        raise UnsupportedModel(
            f"{where}: {tensors[0].name} has type {I2_S.id}, which is I2_S in files of bitnet.cpp "
            f"only, and the architecture {architecture!r} does not say that this is one",
            hint=f"if it is: --from {USUAL_LAYOUT} (written by its converter, or on x86), "
            "i2_s-arm or i2_s-rows; the wrong one gives nonsense",
        )
    note = f"{where}: I2_S tensors are read in blocks of 128, as published files have them"
    return USUAL_LAYOUT, [note]


def _with_cutting(metadata: Mapping[str, Any], vocab: int) -> tuple[Mapping[str, Any], list[str]]:
    """The metadata, with the key that bitnet.cpp leaves out of models with Llama 3's vocabulary."""
    known = metadata["general.architecture"] not in OF_BITNET_CPP or vocab != LLAMA3_VOCAB
    if known or metadata.get(CUTTING, "default") != "default":
        return metadata, []
    note = f"{CUTTING} is not in the file: text is cut as Llama 3 does, whose vocabulary it has"
    return {**metadata, CUTTING: "llama-bpe"}, [note]


def _tensor(file: GGUFFile, info: TensorInfo, layout: str) -> SourceTensor:
    raw, columns = file.rows(info.name), info.dims[0]
    release = partial(file.release, info.name)
    if info.type is I2_S:
        return i2_s_tensor(info.name, raw, file.tail(info.name), columns, layout, release)

    def read(rows: Rows) -> Matrix:
        return info.type.read(info.name, raw[rows], columns)

    return SourceTensor(info.name, info.shape, info.type.name, read, release)
