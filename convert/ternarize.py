"""Float rows -> trits and one scale per group: exactly where they are ternary, else least squares.

Knows the mathematics of one block of rows. Does not know files, models or packings.
"""

from __future__ import annotations

import numpy as np

from bonsai.errors import ConversionError
from bonsai.ternary import padded

__all__ = ["exact_ternary", "least_squares"]


def exact_ternary(values: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(trits int8 [rows, K], scales fp16 [rows, groups]) if they give `values` back bit for bit.

    None if some group has two magnitudes, or one that fp16 does not hold. The scale is the largest
    magnitude; the mean would be wrong as soon as there is a zero.
    """
    blocks = _groups(np.abs(values), group)
    largest = blocks.max(axis=2)
    with np.errstate(over="ignore"):
        scales = largest.astype(np.float16)
    if not np.array_equal(scales.astype(np.float32), largest):
        return None
    if not ((blocks == 0) | (blocks == largest[:, :, None])).all():
        return None
    return np.sign(values).astype(np.int8), scales


def least_squares(
    name: str, values: np.ndarray, group: int, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """(trits int8 [rows, K], scales fp16 [rows, groups]) nearest to float32 `values` in each group.

    For a group with magnitudes a_1 >= a_2 >= ..., keeping the k largest with the scale s = mean(a_1
    .. a_k) leaves the error sum(a^2) - (a_1 + .. + a_k)^2 / k, so the best k makes the last term
    largest. A zero group gets scale 0. Raises ConversionError, naming the tensor and the row, where
    a scale does not fit in fp16.
    """
    blocks = _groups(np.abs(values), group)
    if not np.isfinite(blocks).all():
        _refuse(
            name, ~np.isfinite(blocks).all(axis=2), first_row, "has weights that are not finite"
        )
    ordered = -np.sort(-blocks, axis=2)
    # float32 sums are exact where the magnitudes are equal fp16 numbers: ternary input comes back.
    with np.errstate(over="ignore"):  # such a group needs a scale that is refused below
        sums = np.cumsum(ordered, axis=2)
        gain = np.square(sums) / np.arange(1, group + 1, dtype=np.float32)
    best = gain.argmax(axis=2)[:, :, None]
    smallest = np.take_along_axis(ordered, best, axis=2)  # the least magnitude that is kept
    exact = (np.take_along_axis(sums, best, axis=2) / (best + 1))[:, :, 0]
    with np.errstate(over="ignore"):
        scales = exact.astype(np.float16)
    lost = ~np.isfinite(scales) | ((scales == 0) & (exact > 0))
    if lost.any():
        value = exact[lost].flat[0]
        _refuse(name, lost, first_row, f"needs the scale {value:.3g}, which does not fit in fp16")
    kept = (blocks >= smallest).reshape(len(values), -1)[:, : values.shape[1]]
    return (kept & (values > 0)).view(np.int8) - (kept & (values < 0)).view(np.int8), scales


def _groups(values: np.ndarray, group: int) -> np.ndarray:
    """[rows, groups, group]; the last group of a row is filled with zeros."""
    rows, columns = values.shape
    missing = padded(columns, group) - columns
    if missing:
        values = np.pad(values, ((0, 0), (0, missing)))
    return values.reshape(rows, -1, group)


def _refuse(name: str, bad: np.ndarray, first_row: int, what: str) -> None:
    """`bad`: bool [rows, groups]."""
    row = int(bad.any(axis=1).argmax())
    raise ConversionError(
        f"{name}: row {first_row + row} {what}",
        hint="repair or rescale this tensor in the source, or convert without --quant ternary",
    )
