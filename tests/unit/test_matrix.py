"""What the values of packed and dense matrices are, and the signed Hadamard transform."""

from __future__ import annotations

import numpy as np
import pytest

from bonsai import affine, ternary
from bonsai.matrix import DenseMatrix, PackedMatrix, SignedHadamard, widen


def test_a_scale_multiplies() -> None:
    trits = np.zeros((1, 64), np.int8)
    trits[0, :3] = [-1, 0, 1]
    scales = np.array([[1.555]], np.float16)
    matrix = PackedMatrix("w", "t2", (1, 64), 64, ternary.pack(trits, "t2", 64), scales)
    assert matrix.rows()[0, :3].tolist() == [-float(scales[0, 0]), 0, float(scales[0, 0])]


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8"])
@pytest.mark.parametrize("columns", [64, 100, 192])
def test_rows_are_scale_times_code_plus_bias(packing: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    groups = ternary.padded(columns, 64) // 64
    scales = rng.uniform(0.1, 3, (4, groups)).astype(np.float16)
    biases = None
    if packing in affine.BITS:
        codes = rng.integers(0, 2 ** affine.BITS[packing], (4, columns))
        plane = affine.pack(codes, packing, 64)
        biases = rng.uniform(-2, 2, (4, groups)).astype(np.float16)
    else:
        codes = 2 * rng.integers(0, 2, (4, columns)) - 1
        plane = ternary.pack(codes, packing, 64)
    matrix = PackedMatrix("w", packing, (4, columns), 64, plane, scales, biases)
    for row in range(4):
        for k in range(columns):
            bias = 0 if biases is None else np.float32(biases[row, k // 64])
            expected = np.float32(scales[row, k // 64]) * np.float32(codes[row, k]) + bias
            assert matrix.rows()[row, k] == np.float32(expected)
    assert np.array_equal(matrix.rows(np.array([2, 0])), matrix.rows()[[2, 0]])
    parts = (plane, scales) if biases is None else (plane, scales, biases)
    assert matrix.nbytes == sum(part.nbytes for part in parts)


def test_zero_groups_are_exact_zeros() -> None:
    codes = ternary.pack(np.ones((2, 128), np.int8), "t5", 64)
    scales = np.array([[0, 0.5], [0.25, 0]], np.float16)
    rows = PackedMatrix("w", "t5", (2, 128), 64, codes, scales).rows()
    assert not rows[0, :64].any() and not rows[1, 64:].any() and (rows[0, 64:] == 0.5).all()


@pytest.mark.parametrize(
    ("packing", "values"),
    [
        ("f32", np.array([[1, -2, 0.5]], np.float32)),
        ("f16", np.array([[1, -2, 0.5]], np.float16)),
        ("bf16", np.array([[0x3F80, 0xC000, 0x3F00]], np.uint16)),
    ],
)
def test_dense_values_widen_exactly(packing: str, values: np.ndarray) -> None:
    matrix = DenseMatrix("w", packing, (1, 3), values)
    assert matrix.rows().dtype == np.float32 and matrix.rows().tolist() == [[1, -2, 0.5]]
    assert widen(values, packing).tolist() == [[1, -2, 0.5]]


def sylvester(block: int) -> np.ndarray:
    """H[i, j] = (-1)^popcount(i & j) / sqrt(block), from the formula."""
    rows = [[(-1) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    return np.array(rows) / np.sqrt(block)


@pytest.mark.parametrize(("block", "width"), [(1, 3), (2, 6), (8, 24), (128, 256)])
def test_the_transform_is_signs_then_the_sylvester_matrix(block: int, width: int) -> None:
    rng = np.random.default_rng(block)
    signs = (2 * rng.integers(0, 2, width) - 1).astype(np.int8)
    x = rng.standard_normal((3, width))
    whole = np.kron(np.eye(width // block), sylvester(block))
    transform = SignedHadamard(block, signs)
    np.testing.assert_allclose(transform.forward(x), (x * signs) @ whole, atol=1e-12)
    np.testing.assert_allclose(transform.inverse(x), (x @ whole) * signs, atol=1e-12)
    np.testing.assert_allclose(transform.inverse(transform.forward(x)), x, atol=1e-12)


def test_the_transform_of_unit_vectors() -> None:
    transform = SignedHadamard(1024, np.ones(1024, np.int8))
    units = np.eye(1024, dtype=np.float32)[:3]
    turned = transform.forward(units)
    assert turned.dtype == np.float32
    assert (turned[0] == 1 / 32).all()
    assert turned[1, :4].tolist() == [1 / 32, -1 / 32, 1 / 32, -1 / 32]
    assert turned[2, :4].tolist() == [1 / 32, 1 / 32, -1 / 32, -1 / 32]


def test_a_folded_matrix_gives_the_product_of_the_original() -> None:
    rng = np.random.default_rng(3)
    signs = (2 * rng.integers(0, 2, 256) - 1).astype(np.int8)
    transform = SignedHadamard(128, signs)
    original, x = rng.standard_normal((5, 256)), rng.standard_normal(256)
    folded = transform.forward(original)  # each row: W diag(s) H
    np.testing.assert_allclose(folded @ transform.forward(x), original @ x, atol=1e-12)
    assert np.abs(folded @ x - original @ x).max() > 1
    unsigned = SignedHadamard(128, np.ones(256, np.int8))
    assert np.abs(folded @ unsigned.forward(x) - original @ x).max() > 1
