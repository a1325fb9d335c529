"""Groupwise affine packings `q4` and `q8`, for the linears that are not ternary.

A weight is scale * code + bias with an unsigned code, one fp16 scale and one fp16 bias per group.
Knows codes and their bytes, and how to quantize a float matrix. Does not know files or devices.
"""

from __future__ import annotations

import numpy as np

from bonsai.ternary import padded

__all__ = ["BITS", "GROUPS", "codes_shape", "pack", "quantize", "unpack"]

BITS = {"q4": 4, "q8": 8}
GROUPS = (32, 64, 128)


def codes_shape(packing: str, rows: int, columns: int, group: int) -> tuple[int, int]:
    """The shape of the uint8 codes plane of a [rows, columns] matrix."""
    return rows, padded(columns, group) * BITS[packing] // 8


def pack(codes: np.ndarray, packing: str, group: int) -> np.ndarray:
    """The uint8 plane of unsigned `codes` [rows, K], K padded with 0; q4: low nibble first.

    Raises ValueError on codes that need more bits.
    """
    top = 2 ** BITS[packing] - 1
    if codes.size and not 0 <= codes.min() <= codes.max() <= top:
        raise ValueError(f"{packing}: codes must be 0 to {top}")
    missing = padded(codes.shape[1], group) - codes.shape[1]
    data = np.pad(codes.astype(np.uint8), ((0, 0), (0, missing)))
    if BITS[packing] == 8:
        return data
    return data[:, 0::2] | (data[:, 1::2] << np.uint8(4))


def unpack(plane: np.ndarray, packing: str, group: int, columns: int) -> np.ndarray:
    """The uint8 codes [rows, columns] of a plane."""
    expected = codes_shape(packing, plane.shape[0], columns, group)
    if plane.shape != expected:
        raise ValueError(f"{packing}: codes are {plane.shape}, {columns} columns need {expected}")
    if BITS[packing] == 8:
        return np.ascontiguousarray(plane[:, :columns])
    halves = np.stack([plane & np.uint8(15), plane >> np.uint8(4)], axis=2)
    return np.ascontiguousarray(halves.reshape(plane.shape[0], -1)[:, :columns])


def quantize(
    values: np.ndarray, packing: str, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round float `values` [rows, K] to (codes plane, fp16 scales, fp16 biases), group by group.

    The range of each group is spread over all codes; a constant group gets scale 0 and its value as
    bias. Raises ValueError where a scale or bias is not finite in fp16.
    """
    rows, columns = values.shape
    top = 2 ** BITS[packing] - 1
    # Padding repeats the last column, so that it cannot widen the range of the last group.
    missing = padded(columns, group) - columns
    blocks = np.pad(values.astype(np.float32), ((0, 0), (0, missing)), mode="edge")
    blocks = blocks.reshape(rows, -1, group)
    low = blocks.min(axis=2)
    with np.errstate(over="ignore"):
        biases = low.astype(np.float16)
        scales = ((blocks.max(axis=2) - low) / top).astype(np.float16)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ValueError(f"{packing}: a scale or bias does not fit in fp16")
    step = scales.astype(np.float32)[:, :, None]
    shifted = blocks - biases.astype(np.float32)[:, :, None]
    codes = np.divide(shifted, step, out=np.zeros_like(blocks), where=step > 0)
    codes = np.clip(np.rint(codes), 0, top).astype(np.uint8).reshape(rows, -1)[:, :columns]
    return pack(codes, packing, group), scales, biases
