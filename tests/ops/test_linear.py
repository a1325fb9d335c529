"""`linear` and `embed` of every backend against float64, at the sizes where kernels go wrong."""

from __future__ import annotations

import dense
import numpy as np
import pytest
import tiny
import tolerances
from numpy.testing import assert_allclose
from runners import Runner

from bonsai import affine, ternary
from bonsai.matrix import DENSE, DenseMatrix, PackedMatrix

PACKED = [(name, group) for name, kind in ternary.PACKINGS.items() for group in kind.groups]
PACKED += [(name, group) for name in affine.BITS for group in affine.GROUPS]
ALL = PACKED + [(name, 0) for name in DENSE]

ROWS = (1, 2, 3, 5, 7, 8, 9, 33)
OUTPUTS = (1, 3, 5, 32, 33, 96, 100)
INPUTS = (4, 64, 96, 128, 160, 192, 384, 576, 1056)


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (1.7 * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize(("packing", "group"), ALL)
def test_linear_is_right_at_every_odd_size(runner: Runner, packing: str, group: int) -> None:
    rng = np.random.default_rng(1)  # faster than tiny.Random, and nothing here is golden
    for outputs in OUTPUTS:
        for inputs in INPUTS:
            matrix = tiny.matrix(rng, outputs, inputs, packing, group or 128)
            linear, x = runner.ops.linear(matrix), gaussian(rng, max(ROWS), inputs)
            expected = x @ dense.dequantized(matrix).T
            for rows in ROWS:
                y = np.asarray(linear(x[:rows]))
                where = f"{rows} x {inputs} -> {outputs}"
                assert y.shape == (rows, outputs), where
                assert_allclose(y, expected[:rows], **runner.linear, err_msg=where)


@pytest.mark.parametrize("packing", ["t2", "t5", "q4", "f16"])
def test_linear_takes_more_rows_than_16_bits_count(runner: Runner, packing: str) -> None:
    rng = np.random.default_rng(2)
    matrix = tiny.matrix(rng, 8, 64, packing, 64)
    x = gaussian(rng, 32769, 64)
    y = np.asarray(runner.ops.linear(matrix)(x))
    assert_allclose(y, x @ dense.dequantized(matrix).T, **runner.linear)


@pytest.mark.parametrize(("packing", "group"), [case for case in ALL if case[1] in (0, 64, 128)])
def test_every_weight_is_in_its_place(runner: Runner, packing: str, group: int) -> None:
    """One input at a time: a permuted or divided weight cannot hide in a sum."""
    rng = np.random.default_rng(3)
    for outputs, inputs in ((1, 128), (3, 256), (33, 384), (32, 200)):
        matrix = tiny.matrix(rng, outputs, inputs, packing, group or 128)
        columns = np.asarray(runner.ops.linear(matrix)(np.eye(inputs, dtype=np.float32)))
        assert_allclose(columns.T, dense.dequantized(matrix), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("inputs", [1024, 17408])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("packing", ["t2", "t5", "b1"])
def test_sums_of_one_sign_do_not_wrap(runner: Runner, packing: str, sign: int, inputs: int) -> None:
    """All weights +1 or -1, all activations 127: 16-bit sums overflow; the answer is an integer."""
    for rows in (1, 2, 5, 33):
        for outputs in (1, 5, 32):
            codes = ternary.pack(np.full((outputs, inputs), sign), packing, 128)
            scales = np.full((outputs, inputs // 128), 0.75, np.float16)
            matrix = PackedMatrix("w", packing, (outputs, inputs), 128, codes, scales)
            y = np.asarray(runner.ops.linear(matrix)(np.full((rows, inputs), 127, np.float32)))
            assert_allclose(y, np.full((rows, outputs), sign * 127 * inputs * 0.75), rtol=1e-6)


@pytest.mark.parametrize("packing", ["q4", "q8"])
def test_largest_codes_do_not_wrap(runner: Runner, packing: str) -> None:
    top = 2 ** affine.BITS[packing] - 1
    codes = affine.pack(np.full((5, 17408), top), packing, 32)
    scales = np.full((5, 17408 // 32), 0.75, np.float16)
    biases = np.full((5, 17408 // 32), -0.5, np.float16)
    matrix = PackedMatrix("w", packing, (5, 17408), 32, codes, scales, biases)
    for rows in (1, 2, 33):
        y = np.asarray(runner.ops.linear(matrix)(np.full((rows, 17408), 127, np.float32)))
        expected = np.full((rows, 5), 17408 * 127 * (0.75 * top - 0.5))
        assert_allclose(y, expected, rtol=runner.one_sign)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1"])
def test_the_scale_multiplies(runner: Runner, packing: str) -> None:
    trits = np.array([[-1, 0, 1]] if packing != "b1" else [[-1, 1, 1]])
    scales = np.array([[1.555]], np.float16)
    codes = ternary.pack(trits, packing, 64)
    matrix = PackedMatrix("w", packing, (1, 3), 64, codes, scales)
    y = np.asarray(runner.ops.linear(matrix)(np.eye(3, dtype=np.float32)))
    assert_allclose(y[:, 0], trits[0] * np.float64(np.float16(1.555)), rtol=1e-6)


@pytest.mark.parametrize(("packing", "group"), PACKED)
def test_groups_of_scale_zero_give_exact_zeros(runner: Runner, packing: str, group: int) -> None:
    rng = np.random.default_rng(4)
    made = tiny.matrix(rng, 9, 300, packing, group)
    scales = made.scales.copy()
    scales[4] = 0
    scales[:, -1] = 0
    biases = None if made.biases is None else np.where(scales == 0, 0, made.biases)
    matrix = PackedMatrix("w", packing, made.shape, group, made.codes, scales, biases)
    for rows in (1, 5, 33):
        x = gaussian(rng, rows, 300)
        y = np.asarray(runner.ops.linear(matrix)(x))
        assert_allclose(y[:, 4], 0, **tolerances.EXACT)
        assert_allclose(y, x @ dense.dequantized(matrix).T, **runner.linear)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8", "f16", "bf16"])
def test_rows_of_zeros_stay_zeros_and_harm_nobody(runner: Runner, packing: str) -> None:
    rng = np.random.default_rng(5)
    matrix = tiny.matrix(rng, 33, 200, packing, 64)
    for rows in (1, 2, 5, 33):
        x = gaussian(rng, rows, 200)
        x[rows // 2] = 0
        y = np.asarray(runner.ops.linear(matrix)(x))
        assert_allclose(y[rows // 2], 0, **tolerances.EXACT)
        assert_allclose(y, x @ dense.dequantized(matrix).T, **runner.linear)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8", "f16", "bf16", "f32"])
def test_activations_beyond_fp16_stay_finite(runner: Runner, packing: str) -> None:
    rng = np.random.default_rng(6)
    matrix = tiny.matrix(rng, 32, 256, packing, 128)
    for rows in (1, 5, 33):
        x = gaussian(rng, rows, 256)
        x[:, 3] = 7e4
        y = np.asarray(runner.ops.linear(matrix)(x))
        assert np.isfinite(y).all()
        bound = {**runner.linear, "atol": runner.linear["atol"] * 7e4}
        assert_allclose(y, x @ dense.dequantized(matrix).T, **bound)


@pytest.mark.parametrize("scale", [6e-8, 1e-6, 0.4, 6e4])
def test_scales_of_any_fp16_size_work(runner: Runner, scale: float) -> None:
    rng = np.random.default_rng(7)
    codes = ternary.pack(rng.integers(-1, 2, (5, 128)), "t2", 128)
    scales = np.full((5, 1), scale, np.float16)
    matrix = PackedMatrix("w", "t2", (5, 128), 128, codes, scales)
    assert scales.all()
    size = float(scales[0, 0]) * np.sqrt(128)
    for rows in (1, 5):
        x = gaussian(rng, rows, 128)
        y = np.asarray(runner.ops.linear(matrix)(x))
        assert_allclose(y / size, x @ dense.dequantized(matrix).T / size, **runner.linear)


def test_the_residual_is_added(runner: Runner) -> None:
    rng = np.random.default_rng(8)
    matrix = tiny.matrix(rng, 100, 192)
    for rows in (1, 2, 5, 33):
        x, residual = gaussian(rng, rows, 192), gaussian(rng, rows, 100)
        before = residual.copy()
        y = np.asarray(runner.ops.linear(matrix)(x, residual=residual))
        assert_allclose(y, before + x @ dense.dequantized(matrix).T, **runner.linear)


def test_matrices_side_by_side_may_differ_in_everything_but_their_input(runner: Runner) -> None:
    rng = np.random.default_rng(9)
    folded = tiny.signs(rng, 64, 192)
    parts = [
        tiny.matrix(rng, 33, 192, "t2", 128, folded),
        tiny.matrix(rng, 5, 192, "t5", 64),
        tiny.matrix(rng, 16, 192, "q8", 32, folded),
        tiny.matrix(rng, 1, 192, "bf16"),
        tiny.matrix(rng, 7, 192, "t2", 64, tiny.signs(rng, 32, 192)),
    ]
    weights = np.concatenate([dense.dequantized(part) for part in parts])
    linear = runner.ops.linear(*parts)
    for rows in (1, 2, 5, 33):
        x, residual = gaussian(rng, rows, 192), gaussian(rng, rows, 62)
        expected = residual + x @ weights.T
        assert_allclose(np.asarray(linear(x, residual=residual)), expected, **runner.linear)


@pytest.mark.parametrize(("packing", "block"), [("t2", 128), ("t5", 64), ("b1", 32), ("q4", 128)])
def test_a_folded_matrix_takes_its_input_rotated(runner: Runner, packing: str, block: int) -> None:
    rng = np.random.default_rng(10)
    matrix = tiny.matrix(rng, 33, 256, packing, 128, tiny.signs(rng, block, 256))
    weights = dense.dequantized(matrix)
    assert np.abs(weights - dense.stored_values(matrix)).max() > 0.05  # else it would prove nothing
    for rows in (1, 2, 5, 33):
        x = gaussian(rng, rows, 256)
        y = np.asarray(runner.ops.linear(matrix)(x))
        assert_allclose(y, x @ weights.T, **runner.linear)


@pytest.mark.parametrize(("packing", "group"), [case for case in ALL if case[1] in (0, 64, 128)])
def test_embed_takes_rows_in_any_order(runner: Runner, packing: str, group: int) -> None:
    rng = np.random.default_rng(11)
    for rows, columns in ((1001, 128), (1000, 192), (7, 4)):
        matrix = tiny.matrix(rng, rows, columns, packing, group or 128)
        table = runner.ops.table(matrix)
        for count in (1, 2, 33):
            tokens = rng.integers(0, rows, count).astype(np.int32)
            tokens[-1] = rows - 1
            y = np.asarray(runner.ops.embed(table, tokens))
            assert_allclose(y, dense.dequantized(matrix)[tokens], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q8", "f16"])
def test_embed_of_a_folded_table_gives_the_original_rows(runner: Runner, packing: str) -> None:
    rng = np.random.default_rng(12)
    matrix = tiny.matrix(rng, 50, 256, packing, 128, tiny.signs(rng, 128, 256))
    tokens = np.array([49, 0, 7, 7], np.int32)
    y = np.asarray(runner.ops.embed(runner.ops.table(matrix), tokens))
    assert_allclose(y, dense.dequantized(matrix)[tokens], **tolerances.F32_REDUCTION)


def test_read_only_planes_are_enough(runner: Runner) -> None:
    """The planes of a checkpoint are read-only memory maps, at any 64-byte boundary of a file."""
    rng = np.random.default_rng(13)
    made = tiny.matrix(rng, 33, 256, "t2", 128)
    codes, scales = made.codes.copy(), made.scales.copy()
    codes.flags.writeable = scales.flags.writeable = False
    packed = PackedMatrix("w", "t2", made.shape, 128, codes, scales)
    values = gaussian(rng, 5, 256).astype(np.float16)
    values.flags.writeable = False
    plain = DenseMatrix("d", "f16", (5, 256), values)
    x = gaussian(rng, 3, 256)
    expected = x @ np.concatenate([dense.dequantized(packed), dense.dequantized(plain)]).T
    bound = {**runner.linear, "atol": 20 * runner.linear["atol"]}  # outputs of size 1.7^2 * 16
    assert_allclose(np.asarray(runner.ops.linear(packed, plain)(x)), expected, **bound)
