"""Every kernel of every instruction set of this machine, at the sizes where kernels go wrong.

`exact_case` makes numbers whose float arithmetic is exact, so that a sum is right or wrong, without
a tolerance; `rounded` says what a linear may make of any activations before it multiplies them.
"""

from __future__ import annotations

from dataclasses import replace

import dense
import numpy as np
import pytest
import tiny
from numpy.testing import assert_array_equal
from tolerances import F32_REDUCTION

from bonsai import affine, ternary
from bonsai.matrix import DENSE, Matrix, PackedMatrix

native = pytest.importorskip("bonsai.backends.cpu._native", reason="the native library is absent")
from bonsai.backends.cpu.ops import CpuOps  # noqa: E402  (needs the native library)

PACKED = [(name, group) for name, kind in ternary.PACKINGS.items() for group in kind.groups]
PACKED += [(name, group) for name in affine.BITS for group in affine.GROUPS]
ALL = PACKED + [(name, 0) for name in DENSE]

ROWS = (1, 2, 5, 33)
OUTPUTS = (1, 3, 32, 33, 96, 100)
INPUTS = (64, 96, 160, 192, 384, 576, 1536, 5120)


@pytest.fixture(params=native.supported())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """The ops on each instruction set that runs here."""
    return CpuOps(request.param)


@pytest.fixture(params=["rounded", "exact"])
def either(request: pytest.FixtureRequest, ops: CpuOps) -> CpuOps:
    """The same, with activations rounded and with activations as they are."""
    return CpuOps(ops.kernels.name, exact=request.param == "exact")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (1.7 * rng.standard_normal(shape)).astype(np.float32)


def exact_case(
    rng: np.random.Generator, rows: int, outputs: int, inputs: int, packing: str, group: int
) -> tuple[np.ndarray, PackedMatrix]:
    """Integer activations and scales that are powers of 2: no sum or product needs rounding.

    Every 32nd activation is the largest that is stored, so that all of them are stored as they are.
    """
    made = tiny.matrix(rng, outputs, inputs, packing, group)
    scales = (0.5 ** rng.integers(0, 3, made.scales.shape)).astype(np.float16)
    if packing in ternary.PACKINGS:
        x = rng.integers(-127, 128, (rows, inputs))
        x[:, ::32] = rng.choice([-127, 127], x[:, ::32].shape)
        return x.astype(np.float32), replace(made, scales=scales)
    # The largest sum stays below 2^24: the largest activations meet codes next to the middle.
    bits = affine.BITS[packing]
    middle = 2 ** (bits - 1)
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    codes[:, ::32] = middle + rng.integers(-1, 2, codes[:, ::32].shape)
    x = rng.integers(-15, 16, (rows, inputs))
    x[:, ::32] = rng.choice([-32767, 32767], x[:, ::32].shape)
    biases = rng.choice([-0.5, 0, 0.5], scales.shape) - middle * scales
    plane = affine.pack(codes, packing, group)
    return x.astype(np.float32), replace(
        made, codes=plane, scales=scales, biases=biases.astype(np.float16)
    )


def rounded(x: np.ndarray, packing: str, group: int) -> np.ndarray:
    """Activations as the kernels see them, float64: integers times one scale per chunk."""
    chunk, top = (min(group, 128), 127) if packing in ternary.PACKINGS else (32, 32767)
    whole = np.pad(x, ((0, 0), (0, -x.shape[1] % chunk)))
    chunks = whole.reshape(len(x), -1, chunk)
    peak = np.abs(chunks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(top), peak, out=np.zeros_like(peak), where=peak > 0)
    scale = (peak / np.float32(top)).astype(np.float64)
    return (scale * np.rint(chunks * inverse)).reshape(len(x), -1)[:, : x.shape[1]]


def close(y: np.ndarray, expected: np.ndarray, where: str = "") -> None:
    """Equal but for the order of float32 sums, relative to the size of the outputs."""
    size = np.sqrt(np.mean(expected**2)) or 1.0
    np.testing.assert_allclose(y / size, expected / size, **F32_REDUCTION, err_msg=where)


@pytest.mark.parametrize(("packing", "group"), PACKED)
def test_integer_sums_are_exact(ops: CpuOps, packing: str, group: int) -> None:
    """The same bits on every instruction set: there is only one right answer."""
    rng = np.random.default_rng(0)
    for inputs in INPUTS:
        x, matrix = exact_case(rng, max(ROWS), max(OUTPUTS), inputs, packing, group)
        expected = x.astype(np.float64) @ dense.dequantized(matrix).T
        for outputs in OUTPUTS if inputs < 5120 else (3, 100):
            linear = ops.linear(first_rows(matrix, outputs))
            for rows in ROWS:
                y = linear(x[:rows])
                where = f"{linear.routes[0]}: {rows} x {inputs} -> {outputs}"
                assert_array_equal(y, expected[:rows, :outputs], err_msg=where)


@pytest.mark.parametrize(("packing", "group"), PACKED)
def test_nothing_but_the_activations_is_rounded(ops: CpuOps, packing: str, group: int) -> None:
    rng = np.random.default_rng(1)
    for inputs in (4, 100, *INPUTS):
        matrix = tiny.matrix(rng, 33, inputs, packing, group)
        linear, x = ops.linear(matrix), gaussian(rng, 33, inputs)
        expected = rounded(x, packing, group) @ dense.dequantized(matrix).T
        for rows in ROWS:
            close(linear(x[:rows]), expected[:rows], f"{linear.routes[0]}: {rows} x {inputs}")


@pytest.mark.parametrize(("packing", "group"), ALL)
def test_exact_ops_round_nothing(ops: CpuOps, packing: str, group: int) -> None:
    rng = np.random.default_rng(2)
    exact = CpuOps(ops.kernels.name, exact=True)
    for inputs in (1, 4, 100, 576, 5120):
        matrix = tiny.matrix(rng, 33, inputs, packing, group or 128)
        linear, x = exact.linear(matrix), gaussian(rng, 33, inputs)
        expected = x @ dense.dequantized(matrix).T
        for rows in ROWS:
            close(linear(x[:rows]), expected[:rows], f"{packing}: {rows} x {inputs}")


@pytest.mark.parametrize(("packing", "group"), ALL)
def test_a_row_is_the_same_alone_and_among_others(either: CpuOps, packing: str, group: int) -> None:
    """So decoding continues prefill, and the size of a chunk does not matter, to the last bit."""
    rng = np.random.default_rng(3)
    for outputs, inputs in ((33, 576), (3, 100), (9, 480), (9, 1536)):
        matrix = tiny.matrix(rng, outputs, inputs, packing, group or 128)
        linear = either.linear(matrix)
        x, residual = gaussian(rng, 33, inputs), gaussian(rng, 33, outputs)
        whole, added = linear(x), linear(x, residual)
        for step in (1, 2, 3, 5, 7):
            for first in range(0, 33, step):
                part = slice(first, first + step)
                assert_array_equal(linear(x[part]), whole[part])
                assert_array_equal(linear(x[part], residual[part]), added[part])


@pytest.mark.parametrize(("packing", "group"), PACKED)
@pytest.mark.parametrize("inputs", [128, 256, 384])
def test_every_weight_meets_its_own_input(
    ops: CpuOps, packing: str, group: int, inputs: int
) -> None:
    """One input at a time, as large as it is stored, so that nothing is rounded."""
    rng = np.random.default_rng(4)
    top = 127 if packing in ternary.PACKINGS else 32767
    for outputs in (1, 3, 32, 33):
        _, matrix = exact_case(rng, 1, outputs, inputs, packing, group)
        y = ops.linear(matrix)(top * np.eye(inputs, dtype=np.float32))
        assert_array_equal(y.T, top * dense.dequantized(matrix))


@pytest.mark.parametrize(("packing", "group"), PACKED)
@pytest.mark.parametrize("inputs", [1024, 17408])
def test_extremes_do_not_wrap(ops: CpuOps, packing: str, group: int, inputs: int) -> None:
    """All weights and all activations at one end of their range: sums of 16 bits would overflow."""
    if packing in ternary.PACKINGS:
        cases = [(ternary.pack(np.full((5, inputs), s), packing, group), s, 127) for s in (-1, 1)]
        bias = None
    else:
        top = 2 ** affine.BITS[packing] - 1
        cases = [(affine.pack(np.full((5, inputs), c), packing, group), c, 32767) for c in (0, top)]
        bias = np.zeros((5, inputs // group), np.float16)
    scales = np.full((5, inputs // group), 0.75, np.float16)
    for codes, value, largest in cases:
        linear = ops.linear(PackedMatrix("w", packing, (5, inputs), group, codes, scales, bias))
        for sign in (-1, 1):
            for rows in (1, 2, 5, 33):
                y = linear(np.full((rows, inputs), sign * largest, np.float32))
                expected = np.full((rows, 5), 0.75 * value * sign * largest * inputs)
                if bias is None:
                    assert_array_equal(y, expected)
                else:  # codes are taken from the middle of their range, so 0 is a difference too
                    unit = 0.75 * (top + 1) / 2 * largest * inputs
                    np.testing.assert_allclose(y / unit, expected / unit, rtol=0, atol=3e-5)


@pytest.mark.parametrize(("packing", "group"), PACKED)
def test_rows_that_no_block_of_rows_divides(ops: CpuOps, packing: str, group: int) -> None:
    rng = np.random.default_rng(5)
    for outputs in (5, 7, 1001):
        x, matrix = exact_case(rng, 9, outputs, 256, packing, group)
        expected = x.astype(np.float64) @ dense.dequantized(matrix).T
        linear = ops.linear(matrix)
        for rows in (1, 2, 3, 9):
            assert_array_equal(linear(x[:rows]), expected[:rows])


@pytest.mark.parametrize(("packing", "group"), PACKED)
def test_subnormal_scales_are_not_lost(ops: CpuOps, packing: str, group: int) -> None:
    """fp16 below 6e-5 has fewer bits, and CPUs may be set to flush what is smaller than normal."""
    rng = np.random.default_rng(6)
    made = tiny.matrix(rng, 33, 300, packing, group)
    small = (rng.integers(1, 1024, made.scales.shape) * 2.0**-24).astype(np.float16)
    biases = None if made.biases is None else -small
    matrix = replace(made, scales=small, biases=biases)
    x = gaussian(rng, 5, 300)
    expected = rounded(x, packing, group) @ dense.dequantized(matrix).T
    for rows in (1, 2, 5):
        close(ops.linear(matrix)(x[:rows]), expected[:rows])


@pytest.mark.parametrize(("packing", "group"), ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_what_is_not_finite_stays_so_and_harms_no_other_row(
    either: CpuOps, packing: str, group: int, bad: float
) -> None:
    rng = np.random.default_rng(7)
    matrix = tiny.matrix(rng, 33, 300, packing, group or 128)
    linear = either.linear(matrix)
    for rows in (1, 2, 5, 33):
        x = gaussian(rng, rows, 300)
        good = linear(x)
        for column in (0, 155, 299):
            poisoned = x.copy()
            poisoned[rows // 2, column] = bad
            y = linear(poisoned)
            stored = dense.stored_values(matrix)[:, column] != 0
            quantized = group and not either.exact
            touched = np.ones(33, bool) if quantized else stored  # a chunk is spoilt as a whole
            assert not np.isfinite(y[rows // 2][touched]).any()
            y[rows // 2] = good[rows // 2]
            assert_array_equal(y, good)


@pytest.mark.parametrize(("packing", "group"), PACKED)
@pytest.mark.parametrize("size", [1e36, 1e30, 1e-29])  # sums of 32 must be finite in float32
def test_activations_of_any_size(ops: CpuOps, packing: str, group: int, size: float) -> None:
    rng = np.random.default_rng(8)
    matrix = tiny.matrix(rng, 5, 300, packing, group)
    x = np.clip(gaussian(rng, 2, 300), -3, 3) / 3
    weights = dense.dequantized(matrix)
    linear = ops.linear(replace(matrix, scales=matrix.scales / 64))
    if matrix.biases is not None:
        linear = ops.linear(replace(matrix, scales=matrix.scales / 64, biases=matrix.biases / 64))
    y = linear(x * np.float32(size)).astype(np.float64)
    np.testing.assert_allclose(64 * y / size, x @ weights.T, rtol=0, atol=0.1)
    assert_array_equal(linear(np.full((2, 300), 1e-38, np.float32)), 0)


@pytest.mark.parametrize(("packing", "group"), ALL)
def test_planes_lie_at_any_address(ops: CpuOps, packing: str, group: int) -> None:
    rng = np.random.default_rng(9)
    matrix = tiny.matrix(rng, 33, 192, packing, group or 128)
    x = gaussian(rng, 5, 192)
    expected = {rows: ops.linear(matrix)(x[:rows]) for rows in (1, 5)}
    tokens = np.array([32, 0, 7], np.int32)
    rows_of_table = np.asarray(ops.embed(ops.table(matrix), tokens))
    for offset in (1, 2, 3, 7, 33, 63):
        moved = displaced(matrix, offset)
        linear = native.PackedLinear(ops.kernels, [moved], False)
        for rows, y in expected.items():
            out = np.empty((rows, 33), np.float32)
            linear.run(x[:rows], out, None)
            assert_array_equal(out, y)
        out = np.empty((3, 192), np.float32)
        native.embed(ops.kernels, moved, tokens, out)
        assert_array_equal(out, rows_of_table)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8", "f16", "f32"])
def test_threads_do_not_change_a_bit(either: CpuOps, threads: int, packing: str) -> None:
    rng = np.random.default_rng(10)
    folded = tiny.signs(rng, 64, 384)
    matrices = [
        tiny.matrix(rng, n, 384, packing, 64, transform)
        for n, transform in ((1001, None), (33, folded))
    ]
    linear = either.linear(*matrices)
    x, residual = gaussian(rng, 33, 384), gaussian(rng, 33, 1034)
    native.set_threads(1)
    expected = [linear(x[:rows], residual[:rows]) for rows in ROWS]
    native.set_threads(threads)
    for _ in range(3):
        for rows, y in zip(ROWS, expected, strict=True):
            assert_array_equal(linear(x[:rows], residual[:rows]), y)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 32, 128, 1024])
def test_a_signed_transform_of_any_block(ops: CpuOps, block: int) -> None:
    """Small integers and a power of 2 as norm, or its root: rounded at most once."""
    rng = np.random.default_rng(11)
    width = max(block, 96 // block * block)
    transform = tiny.signs(rng, block, width)
    matrix = tiny.matrix(rng, 7, width, "f32", transform=transform)
    x = rng.integers(-8, 9, (5, width)).astype(np.float32)
    weights = dense.dequantized(matrix)
    for rows in (1, 5):
        close(ops.linear(matrix)(x[:rows]), x[:rows] @ weights.T)
    tokens = np.array([6, 0, 6], np.int32)
    np.testing.assert_allclose(
        ops.embed(ops.table(matrix), tokens), weights[tokens], rtol=1e-6, atol=1e-6
    )


def test_every_packing_has_a_kernel_of_its_own(ops: CpuOps) -> None:
    rng = np.random.default_rng(12)
    for packing, group in PACKED:
        route = ops.linear(tiny.matrix(rng, 3, 300, packing, group)).routes[0]
        kind = "ternary_dot" if packing in ternary.PACKINGS else "affine_dot"
        assert route.startswith(f"{kind}_{packing}_")
    exact = CpuOps(ops.kernels.name, exact=True)
    assert exact.linear(tiny.matrix(rng, 3, 300, "t2", 128)).routes == ["exact"]
    assert ops.linear(tiny.matrix(rng, 3, 300, "f16")).routes == ["dense"]


def first_rows(matrix: PackedMatrix, count: int) -> PackedMatrix:
    biases = None if matrix.biases is None else matrix.biases[:count]
    return replace(
        matrix,
        shape=(count, matrix.shape[1]),
        codes=matrix.codes[:count],
        scales=matrix.scales[:count],
        biases=biases,
    )


def displaced(matrix: Matrix, offset: int):
    """The native matrix with every plane `offset` bytes behind a 64-byte boundary."""
    packed = isinstance(matrix, PackedMatrix)
    planes = [matrix.codes, matrix.scales, matrix.biases] if packed else [matrix.values, None, None]
    moved: list[np.ndarray | None] = []
    for plane in planes:
        if plane is None:
            moved.append(None)
            continue
        data = np.ascontiguousarray(plane).view(np.uint8)
        memory = np.zeros(data.size + 128, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        moved.append(memory[start : start + data.size].reshape(data.shape))
        moved[-1][:] = data
    group = matrix.group if packed else 0
    return native.PackedMatrix(matrix.packing, *matrix.shape, group, *moved, None, 0)
