"""Matrices as MLX keeps them, linears over them, and rows of tables.

Knows which of MLX's matrix formats holds which packing exactly: t2, b1, q4 and q8 are its affine
formats of 2, 1, 4 and 8 bits as they lie in the file; t5 is unpacked to 2 bits; groups of 256 are
two of 128. What the kernels of this package read themselves stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from bonsai import ternary
from bonsai.affine import BITS
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix, SignedHadamard

__all__ = ["Affine", "Dense", "MlxLinear", "Part", "Rotation", "Table", "part_of"]

LARGEST_GROUP = 128
"""Of MLX's affine formats."""
WIDENED = 1 << 22
"""Values of a block of rows that is widened at a time."""
BLOCK_BYTES = 1 << 22
"""Of a block of rows that is copied at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The signed block Hadamard transform of inputs."""

    block: int
    signs: mx.array = field(repr=False)

    @classmethod
    def of(cls, transform: SignedHadamard, dtype: Any) -> Rotation:
        return cls(transform.block, mx.array(transform.signs.astype(np.float32)).astype(dtype))

    def forward(self, x: mx.array) -> mx.array:
        """H (s * x) along the last axis."""
        return self._hadamard(x * self.signs)

    def inverse(self, x: mx.array) -> mx.array:
        """s * H(x)."""
        return self._hadamard(x) * self.signs

    def _hadamard(self, x: mx.array) -> mx.array:
        blocks = x.reshape(*x.shape[:-1], -1, self.block)
        return mx.hadamard_transform(blocks).reshape(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """Rows of codes with a scale and a bias per group, in MLX's own format."""

    rows: int
    columns: int
    bits: int
    group: int
    codes: mx.array = field(repr=False)
    scales: mx.array = field(repr=False)
    biases: mx.array = field(repr=False)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.codes, self.scales, self.biases]

    def product(self, x: mx.array) -> mx.array:
        """x [T, in] @ W^T, in the type of x and accumulated in float32."""
        x = _padded(x, self.codes.shape[1] * 32 // self.bits)
        kind = x.dtype
        if not mx.metal.is_available():
            x = x.astype(mx.float32)  # the CPU's kernel would add in the type of x
        y = mx.quantized_matmul(
            x, self.codes, self.scales, self.biases, group_size=self.group, bits=self.bits
        )
        return y.astype(kind)

    def take(self, ids: mx.array) -> mx.array:
        """The rows of `ids`, float32 [T, in]."""
        values = mx.dequantize(
            self.codes[ids],
            self.scales[ids].astype(mx.float32),
            self.biases[ids].astype(mx.float32),
            group_size=self.group,
            bits=self.bits,
        )
        return values[:, : self.columns]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Plain values [out, in]."""

    values: mx.array = field(repr=False)

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def arrays(self) -> list[mx.array]:
        return [self.values]

    def product(self, x: mx.array) -> mx.array:
        """x [T, in] @ W^T in the type of x; in float32 where the two types differ.

        16-bit values are then widened a block of rows at a time, never all at once.
        """
        kind, step = self.values.dtype, max(1, WIDENED // self.values.shape[1])
        if kind in (x.dtype, mx.float32):
            return (x.astype(kind) @ self.values.T).astype(x.dtype)
        wide = x.astype(mx.float32)
        parts = [
            wide @ self.values[start : start + step].astype(mx.float32).T
            for start in range(0, self.rows, step)
        ]
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)).astype(x.dtype)

    def take(self, ids: mx.array) -> mx.array:
        """The rows of `ids`, float32 [T, in]."""
        return self.values[ids].astype(mx.float32)


Part = Affine | Dense


class Table:
    """A matrix as `embed` reads it. Its part is shared with a head that is the same matrix."""

    def __init__(self, matrix: Matrix, part: Part, dtype: Any) -> None:
        self.matrix, self.part = matrix, part
        self._dtype = dtype
        transform = matrix.transform
        self._rotation = None if transform is None else Rotation.of(transform, mx.float32)

    def rows(self, ids: mx.array) -> mx.array:
        found = self.part.take(ids)
        if self._rotation is not None:
            found = self._rotation.inverse(found)
        return found.astype(self._dtype)


class MlxLinear:
    """y = T(x) @ W^T (+ residual) for several matrices side by side.

    Neighbours of one format and transform are one matrix: fewer launches, and one transform.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Part, SignedHadamard | None]],
        dtype: Any,
        hand_over: Callable[[mx.array], None],
    ) -> None:
        rotations: list[tuple[SignedHadamard, Rotation]] = []
        self._parts: list[tuple[Part, Rotation | None]] = []
        for part, transform in parts:
            rotation = None if transform is None else _known(transform, rotations, dtype)
            self._parts.append((part, rotation))
        self._parts = _joined(self._parts)
        self._hand_over = hand_over

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that must be computed once, at load."""
        found = []
        for part, rotation in self._parts:
            found += part.arrays
            found += [] if rotation is None else [rotation.signs]
        return found

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        rotated: dict[int, mx.array] = {}
        found = []
        for part, rotation in self._parts:
            given = x
            if rotation is not None:
                if id(rotation) not in rotated:
                    rotated[id(rotation)] = rotation.forward(x)
                given = rotated[id(rotation)]
            found.append(part.product(given))
        y = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
        if residual is None:
            return y
        y = residual + y
        self._hand_over(y)
        return y


def part_of(matrix: Matrix, copied: Callable[[], None] = lambda: None) -> Part:
    """The matrix in a format that MLX multiplies with; a copy of its planes.

    `copied` is called whenever the pages read so far are not needed any more.
    """
    if isinstance(matrix, DenseMatrix):
        values = _copy(matrix.values.shape, matrix.values.dtype, copied, matrix.values.__getitem__)
        return Dense(values.view(mx.bfloat16) if matrix.packing == "bf16" else values)
    rows, columns = matrix.shape
    bits = 1 if matrix.packing == "b1" else BITS.get(matrix.packing, 2)
    width = ternary.padded(columns, matrix.group) * bits // 32

    def words(part: slice) -> np.ndarray:
        codes = matrix.codes[part]
        if matrix.packing == "t5":
            trits = ternary.unpack(codes, "t5", matrix.group, columns)
            return ternary.pack(trits, "t2", matrix.group)
        return np.ascontiguousarray(codes).view("<u4")

    codes = _copy((rows, width), np.dtype(np.uint32), copied, words)
    scales, biases = _scales(matrix)
    group = min(matrix.group, LARGEST_GROUP)
    if group < matrix.group:
        scales, biases = (mx.repeat(p, matrix.group // group, axis=1) for p in (scales, biases))
    mx.eval(scales, biases)
    copied()
    return Affine(rows, columns, bits, group, codes, scales, biases)


def _copy(
    shape: tuple[int, ...],
    kind: np.dtype,
    copied: Callable[[], None],
    read: Callable[[slice], np.ndarray],
) -> mx.array:
    """An array of `read(rows)`, a block of rows at a time, so that no second copy is ever whole."""
    made = mx.zeros(shape, getattr(mx, kind.name))
    mx.eval(made)
    view = np.asarray(made)  # MLX's own memory
    step = max(1, BLOCK_BYTES // (shape[1] * kind.itemsize))
    for start in range(0, shape[0], step):
        view[start : start + step] = read(slice(start, start + step))
        copied()
    return made


def _scales(matrix: PackedMatrix) -> tuple[mx.array, mx.array]:
    """Scale and bias of each group, so that scale * code + bias is the weight exactly."""
    scales = mx.array(np.ascontiguousarray(matrix.scales))
    if matrix.biases is not None:
        return scales, mx.array(np.ascontiguousarray(matrix.biases))
    if matrix.packing != "b1":
        return scales, -scales
    if float(np.abs(matrix.scales).max(initial=0)) > 32752:  # twice as much is no float16
        scales = scales.astype(mx.float32)
    return 2 * scales, -scales


def _known(
    transform: SignedHadamard, made: list[tuple[SignedHadamard, Rotation]], dtype: Any
) -> Rotation:
    """The rotation of a transform; one for equal ones."""
    for other, rotation in made:
        if other.block == transform.block and np.array_equal(other.signs, transform.signs):
            return rotation
    made.append((transform, Rotation.of(transform, dtype)))
    return made[-1][1]


def _joined(parts: list[tuple[Part, Rotation | None]]) -> list[tuple[Part, Rotation | None]]:
    """Neighbours that can be one matrix, as one."""
    found: list[tuple[Part, Rotation | None]] = []
    for part, rotation in parts:
        if found and found[-1][1] is rotation and (both := _stacked(found[-1][0], part)):
            found[-1] = (both, rotation)
        else:
            found.append((part, rotation))
    return found


def _stacked(a: Part, b: Part) -> Part | None:
    """The rows of two matrices of one format, or None where they are not."""
    if isinstance(a, Dense) and isinstance(b, Dense):
        same = a.values.dtype == b.values.dtype
        return Dense(mx.concatenate([a.values, b.values])) if same else None
    if isinstance(a, Affine) and isinstance(b, Affine):
        same = (a.bits, a.group, a.scales.dtype) == (b.bits, b.group, b.scales.dtype)
        planes = ((a.codes, b.codes), (a.scales, b.scales), (a.biases, b.biases))
        joined = (mx.concatenate(list(pair)) for pair in planes)
        return Affine(a.rows + b.rows, a.columns, a.bits, a.group, *joined) if same else None
    return None


def _padded(x: mx.array, width: int) -> mx.array:
    """x with zeros up to `width` columns."""
    missing = width - x.shape[1]
    return mx.pad(x, [(0, 0), (0, missing)]) if missing else x
