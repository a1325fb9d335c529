"""Every block type that the gguf package can dequantize, on random blocks, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from bonsai.convert.blocks import TYPES

pytestmark = pytest.mark.oracle
gguf = pytest.importorskip("gguf", reason="needs the gguf package")
HALVES = {
    "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
KNOWN = {kind.value for kind in gguf.GGMLQuantizationType} - {41}  # Q1_0: an id without a decoder


@pytest.mark.parametrize("kind", [k for k in TYPES.values() if k.id in KNOWN], ids=lambda k: k.name)
def test_rows_equal_gguf(kind):
    rng = np.random.default_rng(kind.id)
    rows, columns = 7, 1024
    blocks = columns // kind.weights
    raw = rng.integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    if kind.packing == "t2":
        codes = rng.integers(0, 3, (rows, blocks, kind.nbytes, 4)).astype(np.uint8)
        raw = codes @ np.array([1, 4, 16, 64], np.uint8)
    if kind.packing == "t5":
        numbers = rng.integers(0, 243, raw.shape)
        numbers[:, :, 48:] = numbers[:, :, 48:] // 3 * 3  # the bytes of four trits
        raw = ((256 * numbers + 242) // 243).astype(np.uint8)
    if kind.weights > 1:
        for at in HALVES.get(kind.name, (0,)):
            scales = rng.normal(size=(rows, blocks)).astype("<f2")
            raw[:, :, at : at + 2] = scales.view(np.uint8).reshape(rows, blocks, 2)
    raw = raw.reshape(rows, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    found = kind.read("w", raw, columns).rows()
    assert np.array_equal(found, expected, equal_nan=True)
