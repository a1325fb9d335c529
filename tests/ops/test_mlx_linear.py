"""How matrices are kept on MLX: in its own formats, exactly, neighbours as one."""

from __future__ import annotations

import dense
import numpy as np
import pytest
import tiny
import tolerances
from numpy.testing import assert_allclose

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from bonsai import ternary  # noqa: E402
from bonsai.backends.mlx import linear  # noqa: E402
from bonsai.backends.mlx.ops import MlxOps  # noqa: E402
from bonsai.matrix import PackedMatrix  # noqa: E402


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize(
    ("packing", "group", "bits"), [("t2", 128, 2), ("t5", 64, 2), ("b1", 32, 1), ("q4", 64, 4)]
)
def test_planes_are_those_of_the_file(packing: str, group: int, bits: int) -> None:
    matrix = tiny.matrix(rng(), 40, 256, packing, group)
    part = linear.part_of(matrix)
    assert isinstance(part, linear.Affine)
    assert (part.bits, part.group, part.codes.shape) == (bits, group, (40, 256 * bits // 32))
    if packing != "t5":
        assert np.asarray(part.codes).tobytes() == np.ascontiguousarray(matrix.codes).tobytes()
    assert part.scales.dtype == mx.float16
    assert_allclose(part.take(mx.arange(40)), dense.dequantized(matrix), rtol=1e-6, atol=0)


def test_groups_of_256_are_two_of_128() -> None:
    matrix = tiny.matrix(rng(), 5, 512, "t2", 256)
    part = linear.part_of(matrix)
    assert (part.group, part.scales.shape) == (128, (5, 4))
    assert_allclose(part.take(mx.arange(5)), dense.dequantized(matrix), **tolerances.EXACT)


def test_binary_scales_that_cannot_be_doubled_in_float16() -> None:
    signs = np.where(rng().random((3, 128)) < 0.5, -1, 1)
    scales = np.full((3, 1), 60_000, np.float16)
    codes = ternary.pack(signs, "b1", 128)
    part = linear.part_of(PackedMatrix("w", "b1", (3, 128), 128, codes, scales))
    expected = signs * scales.astype(np.float32)
    assert_allclose(part.take(mx.arange(3)), expected, **tolerances.EXACT)


def test_neighbours_of_one_kind_are_one_matrix() -> None:
    r = rng()
    folded = tiny.signs(r, 64, 192)
    same = tiny.signs(rng(), 64, 192)  # equal signs in another object
    assert folded is not same
    assert (tiny.signs(rng(), 64, 192).signs == same.signs).all()
    parts = [
        tiny.matrix(r, 33, 192, "t2", 64, same),
        tiny.matrix(r, 5, 192, "t5", 64, tiny.signs(rng(), 64, 192)),
        tiny.matrix(r, 7, 192, "t2", 32, same),
        tiny.matrix(r, 6, 192, "t2", 64),
        tiny.matrix(r, 2, 192, "f32"),
        tiny.matrix(r, 3, 192, "f32"),
    ]
    made = MlxOps().linear(*parts)
    assert [part.rows for part, _ in made._parts] == [38, 7, 6, 5]
    assert made._parts[0][1] is made._parts[1][1]
    x = r.standard_normal((3, 192)).astype(np.float32)
    expected = x @ np.concatenate([dense.dequantized(m) for m in parts]).T
    assert_allclose(np.array(made(mx.array(x))), expected, **tolerances.F32_REDUCTION)


@pytest.mark.parametrize("packing", ["f16", "bf16", "f32", "t2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_the_result_and_nothing_before(packing: str, dtype: str) -> None:
    """Inputs that both types hold exactly; the sum is of 2,000 terms."""
    matrix = tiny.matrix(rng(), 40, 2048, packing)
    x = rng().integers(-8, 9, (3, 2048)).astype(np.float32) / 4
    expected = x @ dense.dequantized(matrix).T
    kind = getattr(mx, dtype)
    y = MlxOps(kind).linear(matrix)(mx.array(x).astype(kind))
    assert y.dtype == kind
    step = 2.0**-11 if dtype == "float16" else 2.0**-8
    found = np.array(y.astype(mx.float32))
    assert_allclose(found, expected, rtol=step, atol=2e-5)


def test_wide_values_are_widened_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WIDENED", 1000)
    matrix = tiny.matrix(rng(), 41, 192, "f16")
    x = rng().standard_normal((3, 192)).astype(np.float32)
    y = np.array(MlxOps().linear(matrix)(mx.array(x)))
    assert_allclose(y, x @ dense.dequantized(matrix).T, **tolerances.F32_REDUCTION)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q8", "bf16"])
def test_copies_in_blocks_are_the_matrix(monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    monkeypatch.setattr(linear, "BLOCK_BYTES", 300)
    matrix, told = tiny.matrix(rng(), 41, 192, packing, 64), []
    part = linear.part_of(matrix, lambda: told.append(1))
    assert len(told) >= 5
    assert_allclose(part.take(mx.arange(41)), dense.dequantized(matrix), rtol=1e-6, atol=0)
