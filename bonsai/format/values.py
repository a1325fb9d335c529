"""Values of dense planes and scales: are they finite, and how float32 is rounded to 16 bits."""

from __future__ import annotations

import numpy as np

from bonsai.matrix import DENSE

__all__ = ["finite", "narrow"]

BLOCK = 1 << 20  # elements looked at together: planes are large, temporaries need not be
_EXPONENT = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}


def finite(values: np.ndarray, packing: str = "f16") -> bool:
    """Whether all are finite; `packing` is the dense one, scales and biases of others are f16."""
    kind = packing if packing in DENSE else "f16"
    dtype = np.dtype("<u4" if kind == "f32" else "<u2")
    mask = dtype.type(_EXPONENT[kind])
    flat = values.reshape(-1).view(dtype)
    for start in range(0, flat.size, BLOCK):
        if (flat[start : start + BLOCK] & mask).max() == mask:
            return False
    return True


def narrow(values: np.ndarray, packing: str) -> np.ndarray:
    """float32 as f32, f16 or bf16 bits, to nearest, ties to even; too large becomes infinite."""
    if packing != "bf16":
        with np.errstate(over="ignore"):
            return values.astype(DENSE[packing])
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> np.uint32(16) & 1)) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
