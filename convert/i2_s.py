"""I2_S, the ternary type of bitnet.cpp: two bits a weight in one of three orders, and one scale.

Knows the orders and the 32 bytes after the codes, which begin with the float32 scale. Nothing in a
file says which order it has: the caller chooses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bonsai.convert.source import Rows, SourceTensor, fp16_error, fp16_scale, refuse_rows
from bonsai.errors import ConversionError
from bonsai.matrix import Matrix, PackedMatrix
from bonsai.ternary import pack

__all__ = ["LAYOUTS", "i2_s_tensor"]

GROUP = 128  # of the checkpoint; the scale is one for the whole tensor


def _interleaved(block: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Blocks of `block` weights: bits 6 - 2 f of byte m are weight f * block / 4 + m, f < 4."""

    def codes(raw: np.ndarray, rows: np.ndarray) -> np.ndarray:
        fields = raw[rows].reshape(len(rows), -1, 1, block // 4)
        shifts = np.array([[6], [4], [2], [0]], np.uint8)
        return ((fields >> shifts) & np.uint8(3)).reshape(len(rows), -1)

    return codes


def _by_four_rows(raw: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One byte for each column of four rows, the first in the highest bits."""
    fours = raw.reshape(len(raw) // 4, -1)
    shifts = (6 - 2 * (rows % 4)).astype(np.uint8)[:, None]
    codes: np.ndarray = (fours[rows // 4] >> shifts) & np.uint8(3)
    return codes


# name -> (codes of rows, columns and rows must be multiples of these)
LAYOUTS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int, int]] = {
    "i2_s": (_interleaved(128), 128, 1),
    "i2_s-arm": (_interleaved(64), 64, 1),
    "i2_s-rows": (_by_four_rows, 1, 4),
}


def i2_s_tensor(
    name: str, raw: np.ndarray, tail: bytes, columns: int, layout: str, release: Callable[[], None]
) -> SourceTensor:
    """A tensor of codes `raw` [rows, columns / 4] and its `tail`, as t2 with equal scales."""
    codes_of, column_unit, row_unit = LAYOUTS[layout]
    shape = (len(raw), columns)
    if columns % column_unit or shape[0] % row_unit:
        raise ConversionError(
            f"{name}: {shape[0]} x {columns} weights cannot have the layout {layout}, which needs "
            f"multiples of {row_unit} x {column_unit}"
        )
    exact = float(np.frombuffer(tail, "<f4", 1)[0])
    if not np.isfinite(exact) or exact == 0:
        raise ConversionError(f"{name}: its I2_S scale is {exact}")
    scale = fp16_scale(f"{name}: the I2_S scale", exact)
    numbers = np.arange(shape[0])

    def read(index: Rows) -> Matrix:
        codes = codes_of(raw, numbers[index])
        what = "has the code 3, which no ternary matrix has"
        refuse_rows(name, (codes == 3).any(axis=1), index, what)
        plane = pack(codes.astype(np.int8) - 1, "t2", GROUP)
        scales = np.full((len(codes), -(-columns // GROUP)), scale)
        return PackedMatrix(name, "t2", codes.shape, GROUP, plane, scales)

    return SourceTensor(name, shape, "I2_S", read, release, lambda: fp16_error(exact))
