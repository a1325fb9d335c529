"""A Hugging Face folder as a source: safetensors, config.json and tokenizer files.

Knows how bitnet folders pack their linears (`mlx` knows the others), and which parts of a model for
images and text are its text. Does not know architectures. Nothing in the folder is ever run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from bonsai.convert.config_hf import read_hf_config
from bonsai.convert.config_qwen35 import split_pack
from bonsai.convert.encode import row_blocks
from bonsai.convert.hf_tensors import DENSE_DTYPES, WEIGHT, matrix_of
from bonsai.convert.mlx import mlx_tensor
from bonsai.convert.quantization import Quantization
from bonsai.convert.qwen35 import from_huggingface
from bonsai.convert.source import (
    Rows,
    SourceModel,
    SourceTensor,
    fp16_error,
    fp16_scale,
    refuse_rows,
)
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.format.files import child, read_small
from bonsai.format.safetensors_io import TensorInfo
from bonsai.format.shards import ShardedTensors
from bonsai.format.strict_json import parse_object
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix, widen
from bonsai.ternary import pack

__all__ = ["open_huggingface"]

TOKENIZER = "tokenizer.json"
# Models of images and text: where the text is, and what is left out.
TEXT_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
VISION = (
    "vision_tower.",
    "vision_model.",
    "model.vision_tower.",
    "model.visual.",
    "visual.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)
EXTRAS = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def open_huggingface(path: Path, group_size: int) -> SourceModel:
    """Open and check a folder; config.json first, so that an unsupported model fails early."""
    config_path = child(path, "config.json", str(path))
    raw = parse_object(read_small(config_path), str(config_path))
    raw, pack, first = split_pack(raw, str(config_path))
    architecture, config, quantization, warnings = read_hf_config(raw, str(config_path))
    extras = _extras(path)
    shards = ShardedTensors(path)
    names, notes = _text_names(shards.names(), str(path))
    tensors = {
        names[tensor.name]: tensor
        for tensor in _tensors(shards, list(names), quantization, group_size)
    }
    if architecture == "qwen35":
        is_mlx = quantization.method == "mlx"
        tensors, left_out = from_huggingface(tensors, config, pack, str(path), is_mlx)
        notes += left_out
    return SourceModel(
        kind="huggingface",
        path=path,
        files=tuple(shards.files),
        architecture=architecture,
        config=config,
        tensors=tensors,
        extras=extras,
        warnings=(*first, *warnings, *notes),
    )


def _extras(path: Path) -> dict[str, bytes]:
    if not child(path, TOKENIZER, str(path)).exists():
        raise ConversionError(
            f"{path}: there is no {TOKENIZER}",
            hint="save the tokenizer in that form first: AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(FOLDER)",
        )
    files = {name: child(path, name, str(path)) for name in (TOKENIZER, *EXTRAS)}
    return {name: read_small(file) for name, file in files.items() if file.exists()}


def _text_names(names: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Name in the file -> name in a model of text alone, and a line about the parts left out."""
    found: dict[str, str] = {}
    seen: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for name in names:
        vision = next((prefix for prefix in VISION if name.startswith(prefix)), None)
        if vision is not None:
            left_out[vision] += 1
            continue
        short = name
        for prefix, instead in TEXT_PREFIXES:
            if name.startswith(prefix):
                short = instead + name[len(prefix) :]
                break
        if short in seen:
            raise ConversionError(f"{where}: {seen[short]} and {name} are the same tensor")
        found[name], seen[short] = short, name
    shown = " and ".join(f"{count} of {prefix}*" for prefix, count in left_out.items())
    notes = [f"{where}: vision tensors are left out: {shown}"] if left_out else []
    return found, notes


def _tensors(
    shards: ShardedTensors, names: list[str], quantization: Quantization, group_size: int
) -> Iterator[SourceTensor]:
    """One tensor for each module: the parts of a packed one are taken together."""
    left = dict.fromkeys(names)
    packed = {"bitnet": ("U8", _bitnet), "mlx": ("U32", mlx_tensor)}.get(quantization.method)
    for name in list(left):
        info = shards.info(name)
        if packed and name.endswith(WEIGHT) and info.dtype == packed[0]:
            tensor, parts = packed[1](shards, info, quantization, group_size)
            for part in parts:
                left.pop(part, None)
            yield tensor
    for name in left:
        tensor = _dense(shards, shards.info(name))
        module = name.removesuffix(WEIGHT)
        if module.endswith("_proj") and quantization.rounds(module):
            tensor = _online(tensor, group_size)
        yield tensor


def _dense(shards: ShardedTensors, info: TensorInfo) -> SourceTensor:
    packing = DENSE_DTYPES.get(info.dtype)
    if packing is None:
        raise UnsupportedModel(
            f"{info.file}: {info.name} is {info}; supported: {', '.join(DENSE_DTYPES)}",
            hint="is 'quantization_config' missing from config.json?",
        )
    values = shards.array(info.name)
    rows = values.reshape(-1, info.shape[-1]) if info.shape else values.reshape(1, 1)

    def read(index: Rows) -> Matrix:
        block = rows[index]
        return DenseMatrix(info.name, packing, block.shape, block)

    release = partial(shards.release, info.name)
    return SourceTensor(info.name, info.shape, info.dtype, read, release)


def _bitnet(
    shards: ShardedTensors, info: TensorInfo, quantization: Quantization, group_size: int
) -> tuple[SourceTensor, list[str]]:
    """uint8 [out / 4, in]: bits 2 i of byte [r, c] are the code (trit + 1) of row i * out / 4 + r.

    One scale for the whole matrix, multiplied or divided by, becomes the scale of every group.
    """
    name, scale_name = info.name, info.name.removesuffix(WEIGHT) + ".weight_scale"
    data = matrix_of(shards, info)
    quarter, columns = data.shape
    exact = _bitnet_scale(shards, scale_name, quantization.divide)
    scale = fp16_scale(f"{scale_name}: the scale", exact)
    numbers = np.arange(4 * quarter)

    def read(index: Rows) -> Matrix:
        rows = numbers[index]
        shifts = (2 * (rows // quarter)).astype(np.uint8)[:, None]
        codes = (data[rows % quarter] >> shifts) & np.uint8(3)
        what = "has the code 3, which no ternary matrix has"
        refuse_rows(name, (codes == 3).any(axis=1), index, what)
        plane = pack(codes.astype(np.int8) - 1, "t2", group_size)
        scales = np.full((len(rows), -(-columns // group_size)), scale)
        return PackedMatrix(name, "t2", (len(rows), columns), group_size, plane, scales)

    shape = (4 * quarter, columns)
    release = partial(shards.release, name)
    error = fp16_error(exact)
    tensor = SourceTensor(name, shape, "bitnet", read, release, rounding=lambda: error)
    return tensor, [name, scale_name]


def _online(tensor: SourceTensor, group_size: int) -> SourceTensor:
    """Weights of training as they are used: clamp(round(w / m), -1, 1) m, with m the mean |w|.

    m is at least 1e-5. It becomes the fp16 scale of every group.
    """
    if len(tensor.shape) != 2:
        raise ConversionError(f"{tensor.name}: has {len(tensor.shape)} dimensions, expected 2")
    columns = tensor.shape[1]
    mean = cache(lambda: max(_mean_magnitude(tensor), 1e-5))

    def read(index: Rows) -> Matrix:
        scale = fp16_scale(f"{tensor.name}: the mean magnitude", mean())
        values = tensor.read(index).rows() * np.float32(1 / mean())
        trits = np.clip(np.rint(values), -1, 1).astype(np.int8)
        scales = np.full((len(trits), -(-columns // group_size)), scale)
        plane = pack(trits, "t2", group_size)
        return PackedMatrix(tensor.name, "t2", trits.shape, group_size, plane, scales)

    return replace(tensor, label="online", read=read, rounding=lambda: fp16_error(mean()))


def _mean_magnitude(tensor: SourceTensor) -> float:
    """The mean of |w| over the whole tensor."""
    total = 0.0
    for rows in row_blocks(tensor.shape[0], tensor.shape[1]):
        values = tensor.read(rows).rows()
        bad = ~np.isfinite(values).all(axis=1)
        refuse_rows(tensor.name, bad, rows, "has weights that are not finite")
        total += float(np.abs(values).sum(dtype=np.float64))
    return total / max(1, tensor.shape[0] * tensor.shape[1])


def _bitnet_scale(shards: ShardedTensors, name: str, divide: bool) -> float:
    info = shards.info(name)
    if info.dtype not in DENSE_DTYPES or info.nbytes > 4 or np.prod(info.shape) != 1:
        raise ConversionError(f"{info.file}: {name} is {info}, expected one float")
    value = float(widen(shards.array(name).reshape(-1), DENSE_DTYPES[info.dtype])[0])
    if not np.isfinite(value) or value == 0:
        raise ConversionError(f"{info.file}: {name} is {value}")
    return 1 / value if divide else value
