"""A checkpoint as an MLX pack: config.json in the words of Hugging Face, and one safetensors file.

Knows the affine quantization of MLX (docs/convert.md) and the names of `llama` and `qwen3`. The
counterpart of `config_hf` and `mlx`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from bonsai import affine
from bonsai.convert.block_rows import packed_bits, regrouped, scales_at
from bonsai.convert.config_hf import ARCHITECTURES, read_hf_config
from bonsai.convert.encode import row_blocks
from bonsai.convert.recipes import recipe
from bonsai.errors import BonsaiError, ConversionError
from bonsai.format import Checkpoint
from bonsai.format.safetensors_io import DTYPES
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix

__all__ = ["MlxPack", "Part", "write_safetensors"]

GROUPS = (128, 64, 32)
TERNARY_BITS = 2
DENSE_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the file; `rows` yields its bytes, and `done` is called after them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Iterable[np.ndarray] = field(repr=False)
    done: Callable[[], None] = field(repr=False, default=lambda: None)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class MlxPack:
    """What the files will hold. Making one reads scales, and checks everything."""

    config: dict[str, Any]
    parts: list[Part]
    kinds: Counter[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, allow_f16: bool) -> MlxPack:
        """Raises ConversionError naming the first tensor or key that MLX cannot hold exactly."""
        parts: list[Part] = []
        modules: dict[str, tuple[int, int]] = {}
        kinds: Counter[str] = Counter()
        narrow = _vector_dtype(checkpoint)
        for name, out, role in _names(checkpoint):
            if role == "vector":
                parts.append(_vector(checkpoint, name, out, narrow))
                kinds[narrow] += 1
                continue
            matrix = checkpoint.matrix(name)
            made, setting = _matrix(checkpoint, matrix, out, allow_f16)
            if setting:
                modules[out.removesuffix(".weight")] = setting
            parts += made
            kinds[f"{setting[0]} bits" if setting else made[0].dtype] += 1
        return cls(_config(checkpoint, modules), sorted(parts, key=_alignment), kinds)


def write_safetensors(file: BinaryIO, parts: list[Part]) -> Iterator[Part]:
    """Write the parts in their order; each is yielded when it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for part in parts:
        end = start + part.nbytes
        shape = list(part.shape)
        header[part.name] = {"dtype": part.dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        written = 0
        for block in part.rows:
            file.write(np.ascontiguousarray(block).data)
            written += block.nbytes
        assert written == part.nbytes, f"{part.name}: {written} of {part.nbytes} bytes"
        part.done()
        yield part


def _alignment(part: Part) -> int:
    """Wide types first, so that every tensor is aligned without padding."""
    return -DTYPES[part.dtype].itemsize


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """(our name, the name in the pack, role) of every tensor."""
    for line in recipe(checkpoint.architecture, "huggingface").lines:
        for i in range(checkpoint.config["layers"]) if "{i}" in line.name else (0,):
            name = line.name.format(i=i)
            if not line.optional or checkpoint.has(name):
                yield name, line.source.format(i=i), line.role


# ---- tensors -------------------------------------------------------------------------------------


def _vector_dtype(checkpoint: Checkpoint) -> str:
    """F16 if that holds every norm: then the model computes in it. BF16, or else F32."""
    names = [name for name, _, role in _names(checkpoint) if role == "vector"]
    values = np.concatenate([checkpoint.vector(name).reshape(-1) for name in names])
    with np.errstate(over="ignore"):
        if np.array_equal(values.astype(np.float16).astype(np.float32), values):
            return "F16"
    return "F32" if (values.view(np.uint32) & 0xFFFF).any() else "BF16"


def _vector(checkpoint: Checkpoint, name: str, out: str, dtype: str) -> Part:
    values = checkpoint.vector(name)
    if dtype == "F16":
        values = values.astype("<f2")
    if dtype == "BF16":
        values = (values.view(np.uint32) >> np.uint32(16)).astype("<u2")
    return Part(out, dtype, values.shape, [values])


def _matrix(
    checkpoint: Checkpoint, matrix: Matrix, out: str, allow_f16: bool
) -> tuple[list[Part], tuple[int, int] | None]:
    """The parts of a matrix and its (bits, group); None where it is stored as plain values."""
    name = matrix.name

    def release() -> None:
        checkpoint.release(name)

    if matrix.transform is not None:
        raise ConversionError(
            f"{name}: its inputs are Hadamard-transformed, which is not exported yet"
        )
    if isinstance(matrix, DenseMatrix):
        dtype = DENSE_DTYPES[matrix.packing]
        return [Part(out, dtype, matrix.shape, _Rows(matrix, lambda i: matrix.values[i]),
                     release)], None  # fmt: skip
    group = _group(matrix)
    if group is None:
        if not (allow_f16 and matrix.biases is None):
            raise ConversionError(
                f"{name}: {regrouped(matrix, GROUPS[-1])}, and MLX has no other groups",
                hint="--allow-f16 stores ternary matrices like this one as F16, exactly",
            )
        rows = _Rows(matrix, lambda i: matrix.rows(i).astype("<f2"))
        return [Part(out, "F16", matrix.shape, rows, release)], None
    bits = affine.BITS.get(matrix.packing, TERNARY_BITS)
    module, (height, width) = out.removesuffix(".weight"), matrix.shape
    planes = (height, width // group)
    return [
        Part(out, "U32", (height, width * bits // 32), _Rows(matrix, _codes(matrix)), release),
        Part(f"{module}.scales", "F16", planes, _Rows(matrix, _scales(matrix, group)), release),
        Part(f"{module}.biases", "F16", planes, _Rows(matrix, _biases(matrix, group)), release),
    ], (bits, group)


def _group(matrix: PackedMatrix) -> int | None:
    """The largest group of MLX, at most our own, that the matrix fits exactly."""
    fitting = (g for g in GROUPS if g <= matrix.group and regrouped(matrix, g) is None)
    return next(fitting, None)


class _Rows:
    """Some rows at a time, in the order of the matrix."""

    def __init__(self, matrix: Matrix, rows: Callable[[Any], np.ndarray]) -> None:
        self._shape, self._rows = matrix.shape, rows

    def __iter__(self) -> Iterator[np.ndarray]:
        for index in row_blocks(*self._shape):
            yield self._rows(index)


def _codes(matrix: PackedMatrix) -> Callable[[Any], np.ndarray]:
    """Codes with the lowest bits first: our planes without their padding. b1 becomes 0 and 2."""

    def rows(index: Any) -> np.ndarray:
        if matrix.packing in affine.BITS:
            return matrix.codes[index][:, : matrix.shape[1] * affine.BITS[matrix.packing] // 8]
        data = packed_bits(matrix, index)
        if matrix.packing != "b1":
            return data
        bits = np.unpackbits(data, axis=1, bitorder="little")
        pairs = np.zeros((len(bits), 2 * bits.shape[1]), np.uint8)
        pairs[:, 1::2] = bits  # the code 2 is the upper bit
        return np.packbits(pairs, axis=1, bitorder="little")

    return rows


def _scales(matrix: PackedMatrix, group: int) -> Callable[[Any], np.ndarray]:
    return lambda index: scales_at(matrix, matrix.scales[index], group)


def _biases(matrix: PackedMatrix, group: int) -> Callable[[Any], np.ndarray]:
    """Of ternary codes 0, 1, 2 the bias is minus the scale."""
    biases = matrix.biases
    if biases is not None:
        return lambda index: scales_at(matrix, biases[index], group)
    return lambda index: -scales_at(matrix, matrix.scales[index], group)


# ---- config.json ---------------------------------------------------------------------------------


def _config(checkpoint: Checkpoint, modules: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    ours, architecture = checkpoint.config, checkpoint.architecture
    names = {
        "hidden_size": "hidden",
        "intermediate_size": "ffn",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab",
        "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "context",
        "tie_word_embeddings": "tied",
        "hidden_act": "activation",
    }
    eos = ours.get("eos", [])
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        **{key: ours[name] for key, name in names.items()},
        "attention_bias": False,
        "rope_theta": ours["rope"]["theta"],
    }
    if eos:
        config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    if ours["rope"].get("yarn"):
        config["rope_scaling"] = _yarn(ours["rope"]["yarn"], str(checkpoint.path))
    _check(checkpoint, config)
    if modules:
        config["quantization"] = config["quantization_config"] = _quantization(modules)
    return config


def _yarn(yarn: Mapping[str, Any], where: str) -> dict[str, Any]:
    factor = yarn["factor"]
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if not math.isclose(yarn["attention_factor"], usual, rel_tol=1e-6):
        raise ConversionError(
            f"{where}: the attention_factor of YaRN is {yarn['attention_factor']:.6g}; "
            f"MLX always uses {usual:.6g} for a factor of {factor:g}"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": yarn["original_context"],
        "beta_fast": yarn["beta_fast"],
        "beta_slow": yarn["beta_slow"],
    }


def _quantization(modules: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The most common setting, and the modules that have another."""
    (bits, group), _ = Counter(modules.values()).most_common(1)[0]
    found: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"}
    for module, (own_bits, own_group) in modules.items():
        if (own_bits, own_group) != (bits, group):
            found[module] = {"group_size": own_group, "bits": own_bits}
    return found


def _check(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Read the words back: each value must be the one of our config.json."""
    where = str(checkpoint.path)
    try:
        _, again, *_ = read_hf_config(config, where)
    except BonsaiError as error:
        raise ConversionError(f"{where}: the words of MLX do not fit: {error}") from None
    said = _comparable({**checkpoint.config, "eos": checkpoint.config.get("eos", [])})
    for key, value in _comparable(again).items():
        if value != said.get(key):
            raise ConversionError(
                f"{where}: MLX cannot say '{key}' exactly: {said.get(key)!r} would become {value!r}"
            )


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the order of end tokens, and the amplitude of YaRN, which `_yarn` has checked."""
    rope = dict(config["rope"])
    if "yarn" in rope:
        rope["yarn"] = {k: v for k, v in rope["yarn"].items() if k != "attention_factor"}
    return {**config, "rope": rope, "eos": sorted(config["eos"])}
