"""A weight matrix as it lies in a checkpoint, packed or dense, and what its values are.

Knows the planes of each packing and how to turn rows into float32. Does not know files or devices:
backends read the planes directly and only the reference and tools call `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bonsai import affine, ternary

__all__ = ["DENSE", "DenseMatrix", "Matrix", "PackedMatrix", "SignedHadamard", "widen"]

DENSE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True, eq=False)
class SignedHadamard:
    """T(x) = H (s * x): signs, then the orthonormal Sylvester transform of each `block` inputs.

    `signs` is int8 [in] of +-1. H[i, j] = (-1)^popcount(i & j) / sqrt(block), its own inverse.
    """

    block: int
    signs: np.ndarray

    def forward(self, x: np.ndarray) -> np.ndarray:
        """T(x) along the last axis."""
        return _hadamard(x * self.signs, self.block)

    def inverse(self, x: np.ndarray) -> np.ndarray:
        """s * H(x): what turns a stored row back into the row of the original matrix."""
        return _hadamard(x, self.block) * self.signs


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A [out, in] matrix of codes with one fp16 scale (q4, q8: and bias) per group along `in`.

    `packing` is "t2", "t5", "b1" (value = scale * trit) or "q4", "q8" (value = scale * code +
    bias). `codes` is laid out as `ternary` or `affine` say; `scales` and `biases` are float16
    [out, padded(in) / group]. `transform` is applied to the input of a linear, if there is one.
    """

    name: str
    packing: str
    shape: tuple[int, int]
    group: int
    codes: np.ndarray = field(repr=False)
    scales: np.ndarray = field(repr=False)
    biases: np.ndarray | None = field(default=None, repr=False)
    transform: SignedHadamard | None = field(default=None, repr=False)

    def rows(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The chosen rows as stored (transform not undone), float32 [n, in]."""
        columns = self.shape[1]
        codes, scales = self.codes[index], self.scales[index].astype(np.float32)
        if self.packing in ternary.PACKINGS:
            values = ternary.unpack(codes, self.packing, self.group, columns).astype(np.float32)
        else:
            values = affine.unpack(codes, self.packing, self.group, columns).astype(np.float32)
        values *= np.repeat(scales, self.group, axis=1)[:, :columns]
        if self.biases is not None:
            biases = self.biases[index].astype(np.float32)
            values += np.repeat(biases, self.group, axis=1)[:, :columns]
        return values

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        biases = 0 if self.biases is None else self.biases.nbytes
        return self.codes.nbytes + self.scales.nbytes + biases


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """A [out, in] matrix of plain values; `packing` is "f32", "f16" or "bf16" (bits as uint16)."""

    name: str
    packing: str
    shape: tuple[int, int]
    values: np.ndarray = field(repr=False)
    transform: SignedHadamard | None = field(default=None, repr=False)

    def rows(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The chosen rows as stored, float32 [n, in]."""
        return widen(self.values[index], self.packing)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


Matrix = PackedMatrix | DenseMatrix


def widen(values: np.ndarray, packing: str) -> np.ndarray:
    """Dense values of any kind as float32, exactly."""
    if packing == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _hadamard(x: np.ndarray, block: int) -> np.ndarray:
    y = np.array(x, copy=True).reshape(-1, block)
    stride = 1
    while stride < block:
        pairs = y.reshape(-1, block // (2 * stride), 2, stride)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        stride *= 2
    return (y.reshape(x.shape) / np.sqrt(block)).astype(x.dtype, copy=False)
