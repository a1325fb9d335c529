"""The cpu backend's attention to the last bit, its sampler against `choose`, what it refuses."""

from __future__ import annotations

import dense
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from tolerances import F32_REDUCTION, FP16_STATE

from bonsai import ternary
from bonsai.sampling import Sampling, choose

native = pytest.importorskip("bonsai.backends.cpu._native", reason="the native library is absent")
from bonsai.backends.cpu.ops import CpuOps  # noqa: E402  (needs the native library)


@pytest.fixture(params=native.supported())
def kernels(request: pytest.FixtureRequest):
    return native.kernels(request.param)


@pytest.fixture(params=["fp16", "exact"])
def ops(request: pytest.FixtureRequest, kernels) -> CpuOps:
    return CpuOps(kernels.name, exact=request.param == "exact")


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def attended(ops: CpuOps, q, k, v, counts) -> np.ndarray:
    """Attention over all rows, cut into calls of so many rows each."""
    state = ops.new_state(1, k.shape[1], k.shape[2], len(k))
    parts = []
    for count in counts:
        part = slice(state.position, state.position + count)
        parts.append(ops.attention(q[part], k[part], v[part], state, 0))
        state.advance(count)
    return np.concatenate(parts)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 5), (9, 3, 24), (17, 1, 8)])
def test_attention_does_not_depend_on_calls_or_threads(
    ops: CpuOps, heads: int, kv_heads: int, width: int
) -> None:
    """Over the border of a span of 256 rows; 17 queries per key head are more than a tile has."""
    rng = np.random.default_rng(0)
    total = 290
    q, k = gaussian(rng, total, heads, width), gaussian(rng, total, kv_heads, width)
    v, before = gaussian(rng, total, kv_heads, width), native.threads()
    native.set_threads(1)
    whole = attended(ops, q, k, v, [total])
    bound = F32_REDUCTION if ops.exact else FP16_STATE
    assert_allclose(whole, dense.attended(q, k, v, heads // kv_heads), **bound)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for counts in ([total], [1] * total, [255, 1, 1, 33], [3, 254, 33]):
            assert_array_equal(attended(ops, q, k, v, counts), whole)
    native.set_threads(before)


def test_what_is_not_finite_spoils_only_those_who_see_it(ops: CpuOps) -> None:
    rng = np.random.default_rng(1)
    q, k, v = gaussian(rng, 300, 2, 16), gaussian(rng, 300, 1, 16), gaussian(rng, 300, 1, 16)
    good = attended(ops, q, k, v, [300])
    for bad in (np.nan, np.inf):
        for spoilt, position in ((k, 5), (v, 270)):
            kept = spoilt[position, 0, 3]
            spoilt[position, 0, 3] = bad
            for counts in ([300], [200] + [1] * 100):
                y = attended(ops, q, k, v, counts)
                assert_array_equal(y[:position], good[:position])
                if np.isnan(bad) or spoilt is v:
                    assert not np.isfinite(y[position:, :, 3]).any()
            spoilt[position, 0, 3] = kept


def test_keys_and_values_are_kept_as_fp16_or_as_they_are(kernels) -> None:
    """One position: attention returns its value, so what is kept comes out."""
    rng = np.random.default_rng(2)
    v = np.concatenate(
        [
            rng.integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32).view(np.float32),
            np.float32([0, -0.0, 65504, 65519.99, 65520, 6e-8, 2.9e-8, 3.1e-8, 1e-40, 1 + 2**-11]),
            np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32),
        ]
    )
    v = np.where(np.isfinite(v), v, np.float32(1))
    v = np.pad(v, (0, -len(v) % 64)).reshape(1, -1, 64)
    zero = np.zeros_like(v)
    for exact in (False, True):
        cache = native.KvCache(1, v.shape[1], 64, 1, exact)
        cache.append(kernels, 0, 0, zero, v)
        out = np.empty_like(v)
        cache.attend(kernels, 0, 0, zero, out)
        with np.errstate(over="ignore"):
            expected = v if exact else v.astype(np.float16).astype(np.float32)
        assert_array_equal(out, expected)


def test_a_copy_holds_what_it_was_made_of(kernels) -> None:
    rng = np.random.default_rng(3)
    k, v, q = gaussian(rng, 600, 2, 24), gaussian(rng, 600, 2, 24), gaussian(rng, 1, 4, 24)

    def seen(cache, position: int) -> np.ndarray:
        out = np.empty_like(q)
        cache.attend(kernels, 0, position, q, out)
        return out

    cache = native.KvCache(1, 2, 24, 600, False)
    assert cache.nbytes == 0
    cache.append(kernels, 0, 0, k, v)
    for length in (1, 255, 256, 257, 600):
        copy, expected = cache.copy(length), seen(cache, length - 1)
        assert_array_equal(seen(copy, length - 1), expected)
        cache.append(kernels, 0, 0, -k[:length], -v[:length])
        assert_array_equal(seen(copy, length - 1), expected)
        cache.append(kernels, 0, 0, k[:length], v[:length])
    assert cache.copy(0).nbytes == 0
    for length in (-1, 769):
        with pytest.raises(ValueError, match="more positions than were stored"):
            cache.copy(length)


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    st.sampled_from([0.0, 1e-9, 0.3, 0.7, 1.0, 3.0, 1e9]),
    st.integers(0, 45),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.5, 1.0, 1.3, 100.0]),
    st.sets(st.integers(0, 39)),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_the_sampler_is_choose(halves, temperature, k, p, min_p, penalty, seen, uniform) -> None:
    """Logits are multiples of 1/2, so that many are equal."""
    logits = np.array(halves, np.float32) / 2
    seen = np.array(sorted(i for i in seen if i < len(logits)), np.int64)
    sampling = Sampling(temperature, k, p, min_p, penalty)
    expected = choose(logits, sampling, seen, uniform)
    assert CpuOps("portable").sample(logits, sampling, seen, uniform) == expected


@given(st.integers(0, 2**32), st.floats(0.1, 2), st.floats(0.01, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_sampler_is_choose_for_many_ids(seed, temperature, p, min_p) -> None:
    rng = np.random.default_rng(seed)
    logits = (4 * rng.standard_normal(5000)).astype(np.float32)
    logits[rng.integers(0, 5000, 50)] = -np.inf
    sampling = Sampling(temperature, int(rng.integers(0, 100)), p, min_p, 1.1)
    seen = np.unique(rng.integers(0, 5000, 300))
    for uniform in (0.0, rng.random(), 1 - 2**-53):
        expected = choose(logits, sampling, seen, uniform)
        assert CpuOps("portable").sample(logits, sampling, seen, uniform) == expected


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def packed(packing="t2", rows=3, columns=100, group=64, codes=(3, 32), scales=(3, 4), **other):
    """A matrix of zeros, right unless something is passed; planes by their shapes in bytes."""
    planes = [zeros(*codes, dtype=np.uint8), scales and zeros(*scales, dtype=np.uint8)]
    planes.append(zeros(*other["biases"], dtype=np.uint8) if "biases" in other else None)
    signs = other.get("signs")
    return native.PackedMatrix(packing, rows, columns, group, *planes, signs, other.get("block", 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"packing": "t3"},
        {"rows": 4},
        {"rows": 0},
        {"columns": 0},
        {"columns": 129},
        {"columns": 64},
        {"rows": 2**40},
        {"columns": 2**62},
        {"group": 0},
        {"group": -64},
        {"group": 48},
        {"group": 32},
        {"codes": (3, 31)},
        {"codes": (2, 32)},
        {"scales": (3, 3)},
        {"scales": None},
        {"packing": "q4", "codes": (3, 64)},
        {"packing": "q4", "codes": (3, 64), "biases": (3, 2)},
        {"packing": "f16", "codes": (3, 199), "group": 0},
        {"signs": np.ones(99, np.int8), "block": 4},
        {"signs": np.ones(100, np.int8), "block": 3},
        {"signs": np.ones(100, np.int8), "block": 64},
        {"signs": np.ones(100, np.int8), "block": 0},
    ],
)
def test_matrices_whose_planes_do_not_fit_are_refused(wrong) -> None:
    packed()
    with pytest.raises(ValueError):
        packed(**wrong)


def test_arrays_of_other_shapes_and_types_are_refused(kernels) -> None:
    table = packed()
    linear = native.PackedLinear(kernels, [table], False)
    linear.run(zeros(2, 100), zeros(2, 3), zeros(2, 3))
    assert native.PackedLinear(kernels, [table, table], False).rows == 6
    narrow = packed(columns=64, codes=(3, 16), scales=(3, 2))
    for matrices in ([], [table, narrow]):
        with pytest.raises(ValueError):
            native.PackedLinear(kernels, matrices, False)
    good = (zeros(2, 100), zeros(2, 3), zeros(2, 3))
    for i, wrong in (
        *((0, zeros(2, n)) for n in (99, 101)),
        *((0, a) for a in (zeros(3, 100), zeros(100), zeros(2, 200)[:, ::2])),
        (0, zeros(2, 100, dtype=np.float64)),
        (1, zeros(2, 4)),
        (1, zeros(2, 3, dtype=np.float16)),
        (1, zeros(2, 6)[:, ::2]),
        (2, zeros(1, 3)),
        (2, zeros(2, 3, dtype=np.float64)),
    ):
        with pytest.raises((ValueError, TypeError)):
            linear.run(*(wrong if i == j else a for j, a in enumerate(good)))
    for ids in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match="not a row of the table"):
            native.embed(kernels, table, np.array(ids, np.int32), zeros(len(ids), 100))
    with pytest.raises(ValueError):
        native.embed(kernels, table, np.array([1], np.int32), zeros(1, 99))


def test_rows_and_logits_of_other_shapes_are_refused(kernels) -> None:
    x = zeros(2, 3, 8)
    for gain, out in ((zeros(7), x), (zeros(8), zeros(2, 3, 7)), (zeros(8), zeros(2, 2, 8))):
        with pytest.raises(ValueError):
            native.rms_norm(kernels, x, gain, 1e-6, out)
    for cos, sin in ((zeros(2, 5), zeros(2, 5)), (zeros(1, 4), zeros(2, 4))):
        with pytest.raises(ValueError):
            native.rope(kernels, x, cos, sin, zeros(2, 3, 8))
    with pytest.raises(ValueError):
        native.swiglu(kernels, zeros(2, 9), zeros(2, 5))
    for seen in ([8], [-1]):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            native.sample(zeros(8), 1.0, 0, 1.0, 0.0, 1.1, np.array(seen, np.int64), 0.5)
    assert native.sample(zeros(0), 1.0, 0, 1.0, 0.0, 1.0, np.array([], np.int64), 0.5) == -1


def test_states_of_other_shapes_are_refused(kernels) -> None:
    for sizes in ((0, 1, 8, 9), (1, 0, 8, 9), (1, 1, 0, 9), (1, 1, 8, 0), (1, 1, 8, 2**40)):
        with pytest.raises(ValueError):
            native.KvCache(*sizes, False)
    cache = native.KvCache(2, 1, 8, 9, False)
    rows = zeros(3, 1, 8)
    for layer, position in ((2, 0), (-1, 0), (0, 7), (0, -1)):
        with pytest.raises(ValueError):
            cache.append(kernels, layer, position, rows, rows)
    for k in (zeros(3, 2, 8), zeros(3, 1, 7), zeros(2, 1, 8)):
        with pytest.raises(ValueError):
            cache.append(kernels, 0, 0, k, rows)
    cache.append(kernels, 0, 0, rows, rows)
    for layer, position, q in ((1, 0, rows), (0, -1, rows), (0, 254, rows), (0, 0, zeros(3, 1, 7))):
        with pytest.raises(ValueError):
            cache.attend(kernels, layer, position, q, zeros(*q.shape))


def test_kernels_are_found_by_name() -> None:
    assert native.supported()[-1] == "portable"
    assert set(native.supported()) <= set(native.compiled())
    with pytest.raises(ValueError, match="no kernels are called 'mmx'"):
        native.kernels("mmx")
    assert set(ternary.PACKINGS) == {"t2", "t5", "b1"}  # a new packing needs kernels
