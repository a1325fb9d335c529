"""q4 and q8: bytes, round trips of any size, and what rounding may cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai import affine

KINDS = [(packing, group) for packing in affine.BITS for group in affine.GROUPS]


def test_q4_has_the_low_nibble_first() -> None:
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    plane = affine.pack(codes, "q4", 32)
    assert plane.tobytes().hex() == "1032547698badcfe" * 2


def test_q8_is_the_codes() -> None:
    codes = np.arange(32, dtype=np.uint8)[None] + 224
    assert affine.pack(codes, "q8", 32).tobytes() == bytes(range(224, 256))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 4),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpack_undoes_pack(kind: tuple[str, int], rows: int, columns: int, seed: int) -> None:
    packing, group = kind
    codes = np.random.default_rng(seed).integers(0, 2 ** affine.BITS[packing], (rows, columns))
    plane = affine.pack(codes, packing, group)
    assert plane.dtype == np.uint8
    assert plane.shape == affine.codes_shape(packing, rows, columns, group)
    assert np.array_equal(affine.unpack(plane, packing, group, columns), codes)


def values_of(planes, packing: str, group: int, columns: int) -> np.ndarray:
    """Scalar decoder: scale * code + bias, element by element."""
    plane, scales, biases = planes
    out = np.empty((len(plane), columns))
    for row in range(len(plane)):
        for k in range(columns):
            code = plane[row, k] if packing == "q8" else plane[row, k // 2] >> 4 * (k % 2) & 15
            out[row, k] = float(scales[row, k // group]) * code + float(biases[row, k // group])
    return out


@pytest.mark.parametrize(("packing", "group"), KINDS)
@pytest.mark.parametrize("columns", [4, 100, 256])
def test_quantize_is_off_by_half_a_step(packing: str, group: int, columns: int) -> None:
    values = np.random.default_rng(columns).standard_normal((3, columns)).astype(np.float32)
    planes = affine.quantize(values, packing, group)
    step = np.repeat(planes[1].astype(np.float64), group, axis=1)[:, :columns]
    # Scale and bias are rounded to 11 bits; a code may then be clipped at the far end.
    slack = np.abs(values).max() * (2.0**-10 + 2.0**-11)
    error = np.abs(values_of(planes, packing, group, columns) - values)
    assert (error <= step / 2 + slack).all()


@pytest.mark.parametrize("packing", ["q4", "q8"])
def test_constant_groups_are_exact(packing: str) -> None:
    values = np.repeat(np.array([[0.0, -1.5, 0.375, 0.0]], np.float32), 32, axis=1)
    plane, scales, biases = affine.quantize(values, packing, 32)
    assert (scales == 0).all() and not plane.any()
    assert np.array_equal(values_of((plane, scales, biases), packing, 32, 128), values)


def test_padding_does_not_widen_the_range_of_the_last_group() -> None:
    values = np.linspace(5, 6, 40, dtype=np.float32)[None]
    _, scales, _ = affine.quantize(values, "q8", 32)
    assert float(scales[0, 1]) < 0.3 / 255


@pytest.mark.parametrize("bad", [-7e4, 1e38, np.inf, np.nan])
def test_a_scale_that_fp16_cannot_hold_is_refused(bad: float) -> None:
    values = np.ones((2, 64), np.float32)
    values[1, 3] = bad
    with pytest.raises(ValueError, match="fp16"), np.errstate(invalid="ignore"):
        affine.quantize(values, "q8", 32)


@pytest.mark.parametrize(("packing", "code"), [("q4", 16), ("q8", 256), ("q4", -1)])
def test_codes_that_need_more_bits_are_refused(packing: str, code: int) -> None:
    with pytest.raises(ValueError, match="codes must be 0 to"):
        affine.pack(np.full((1, 32), code), packing, 32)


def test_unpack_refuses_a_plane_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"\(1, 16\), 64 columns need \(1, 32\)"):
        affine.unpack(np.zeros((1, 16), np.uint8), "q4", 32, 64)
