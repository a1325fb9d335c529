"""Rows of our packings as GGUF blocks: the way back from `blocks`, without rounding.

Knows which block type holds a matrix exactly, and why one does not. Does not know files. Works on
blocks of rows, so that only a few megabytes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bonsai import affine, ternary
from bonsai.convert.blocks import TYPES, BlockType
from bonsai.errors import ConversionError
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix

__all__ = ["TERNARY_TYPES", "Blocks", "blocks_of", "half_floats", "regrouped", "scales_at"]

BY_NAME = {kind.name: kind for kind in TYPES.values()}
TERNARY_TYPES = {name: BY_NAME[name] for name in ("PQ2_0", "PTQ1_0", "TQ2_0", "Q2_0")}
DENSE_TYPES = {"f32": BY_NAME["F32"], "f16": BY_NAME["F16"], "bf16": BY_NAME["BF16"]}


@dataclass(frozen=True, slots=True)
class Blocks:
    """`rows(index)` are those rows of a matrix in blocks of `type`: uint8 [n, bytes of a row]."""

    type: BlockType
    rows: Callable[[slice | np.ndarray], np.ndarray] = field(repr=False)


def blocks_of(matrix: Matrix, wanted: BlockType) -> Blocks:
    """The blocks that hold `matrix` exactly; `wanted` is the type of ternary matrices.

    Raises ConversionError naming the tensor when no type does.
    """
    if isinstance(matrix, DenseMatrix):
        values = matrix.values
        return Blocks(DENSE_TYPES[matrix.packing], lambda index: _bytes(values[index]))
    if matrix.packing in affine.BITS:
        return _affine(matrix)
    kind = BY_NAME["Q1_0"] if matrix.packing == "b1" else wanted
    problem = regrouped(matrix, kind.weights)
    if problem is not None:
        raise ConversionError(f"{matrix.name}: {kind.name} cannot hold it exactly: {problem}")
    if kind.name == "TQ2_0":
        return Blocks(kind, lambda index: _tq2_0(matrix, index))
    if kind.name == "PTQ1_0":
        return Blocks(kind, lambda index: _base_3(matrix, index, kind.weights))
    return Blocks(kind, lambda index: _bits(matrix, index, kind.weights))


def half_floats(matrix: PackedMatrix) -> Blocks:
    """A ternary matrix as F16, which is exact: its values are scales, their negatives and 0."""
    return Blocks(DENSE_TYPES["f16"], lambda index: _bytes(matrix.rows(index).astype("<f2")))


def regrouped(matrix: PackedMatrix, group: int) -> str | None:
    """Why the scales cannot be those of groups of `group` with the same codes, or None.

    Smaller groups repeat a scale; larger ones need scales that are equal bit for bit.
    """
    columns = matrix.shape[1]
    if columns % group:
        return f"rows of {columns} weights are not whole blocks of {group}"
    if group % matrix.group and matrix.group % group:
        return f"groups of {matrix.group} do not fit groups of {group}"
    if group <= matrix.group:
        return None
    for plane in (matrix.scales, matrix.biases):
        if plane is None:
            continue
        bits = plane.view(np.uint16).reshape(matrix.shape[0], -1, group // matrix.group)
        bad = (bits != bits[:, :, :1]).any(axis=(1, 2))
        if bad.any():
            return (
                f"row {int(bad.argmax())} has different scales within {group} weights "
                f"(its groups have {matrix.group})"
            )
    return None


def scales_at(matrix: PackedMatrix, plane: np.ndarray, group: int) -> np.ndarray:
    """Rows of `plane` (scales or biases of `matrix`) for groups of `group`; see `regrouped`."""
    if group > matrix.group:
        return np.ascontiguousarray(plane[:, :: group // matrix.group])
    repeated = np.repeat(plane, matrix.group // group, axis=1)
    return np.ascontiguousarray(repeated[:, : matrix.shape[1] // group])


def packed_bits(matrix: PackedMatrix, index: slice | np.ndarray) -> np.ndarray:
    """The bytes of the codes of those rows without padding, 2 bits a trit (b1: 1 bit)."""
    columns = matrix.shape[1]
    if matrix.packing == "t5":
        trits = ternary.unpack(matrix.codes[index], "t5", matrix.group, columns)
        return ternary.pack(trits, "t2", 32).view(np.uint8)[:, : columns // 4]
    per_byte = 8 if matrix.packing == "b1" else 4
    return _bytes(matrix.codes[index])[:, : columns // per_byte]


def _bits(matrix: PackedMatrix, index: slice | np.ndarray, group: int) -> np.ndarray:
    """d, then the bits of the codes as they lie in our planes: Q1_0, Q2_0, PQ2_0."""
    return _joined(_scales(matrix, index, group), packed_bits(matrix, index))


def _tq2_0(matrix: PackedMatrix, index: slice | np.ndarray) -> np.ndarray:
    """Two halves of 32 bytes, then d. In a half, bits 2 l of byte m are weight 32 l + m."""
    data = packed_bits(matrix, index)
    fields = data[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    halves = fields.reshape(len(data), -1, 2, 4, 32)
    out = halves[:, :, :, 0].copy()
    for i in range(1, 4):
        out |= halves[:, :, :, i] << np.uint8(2 * i)
    scales = _scales(matrix, index, 256)
    return _joined(out.reshape(len(data), -1), scales, blocks=scales.shape[1] // 2)


def _base_3(matrix: PackedMatrix, index: slice | np.ndarray, group: int) -> np.ndarray:
    """Bytes of trits, then d: a t5 plane as it lies."""
    codes = matrix.codes[index]
    if (matrix.packing, matrix.group) != ("t5", group):
        trits = ternary.unpack(codes, matrix.packing, matrix.group, matrix.shape[1])
        codes = ternary.pack(trits, "t5", group)
    scales = _scales(matrix, index, group)
    return _joined(codes, scales, blocks=scales.shape[1] // 2)


def _affine(matrix: PackedMatrix) -> Blocks:
    """Q4_0 or Q8_0 where each bias is that of a centred code, or Q4_1."""
    name, biases = matrix.name, matrix.biases
    assert biases is not None
    four = matrix.packing == "q4"
    with np.errstate(over="ignore"):
        centred = matrix.scales * np.float16(-8 if four else -128)
    is_centred = np.array_equal(centred.view(np.uint16), biases.view(np.uint16))
    if not four and not is_centred:
        raise ConversionError(
            f"{name}: no GGUF type holds 8-bit codes with a scale and a bias of their own",
            hint="convert the source again with --exact, which keeps such tensors as they are",
        )
    kind = BY_NAME["Q8_0" if not four else "Q4_0" if is_centred else "Q4_1"]
    problem = regrouped(matrix, kind.weights)
    if problem is not None:
        raise ConversionError(f"{name}: {kind.name} cannot hold it exactly: {problem}")
    return Blocks(kind, lambda index: _affine_rows(matrix, kind, index))


def _affine_rows(matrix: PackedMatrix, kind: BlockType, index: slice | np.ndarray) -> np.ndarray:
    """d, for Q4_1 m, then 32 codes: signed bytes, or low nibbles first and then the high ones."""
    columns = matrix.shape[1]
    codes = affine.unpack(matrix.codes[index], matrix.packing, matrix.group, columns)
    if kind.name == "Q8_0":
        return _joined(_scales(matrix, index, 32), codes ^ np.uint8(128))
    nibbles = codes.reshape(len(codes), -1, 2, 16)
    data = (nibbles[:, :, 0] | nibbles[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)
    parts = [_scales(matrix, index, 32)]
    if kind.name == "Q4_1":
        assert matrix.biases is not None
        parts.append(_bytes(scales_at(matrix, matrix.biases[index], 32)))
    return _joined(*parts, data)


def _scales(matrix: PackedMatrix, index: slice | np.ndarray, group: int) -> np.ndarray:
    """The bytes of the scales of those rows, [n, 2 * blocks]."""
    return _bytes(scales_at(matrix, matrix.scales[index], group))


def _joined(*parts: np.ndarray, blocks: int | None = None) -> np.ndarray:
    """Parts [n, blocks * size] as blocks that have a piece of each, one behind the other."""
    rows = len(parts[0])
    count = parts[0].shape[1] // 2 if blocks is None else blocks  # the first is fp16 by default
    pieces = [part.reshape(rows, count, -1) for part in parts]
    return np.concatenate(pieces, axis=2).reshape(rows, -1)


def _bytes(plane: np.ndarray) -> np.ndarray:
    """A plane [n, m] as uint8 [n, bytes of a row]."""
    return np.ascontiguousarray(plane).view(np.uint8).reshape(len(plane), -1)
