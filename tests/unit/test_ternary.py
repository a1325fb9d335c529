"""Packings against vectors from outside, against a scalar decoder, and round trips of any size.

The hex strings are blocks that other programs write for w[i] = (i mod 3) - 1: PQ2_0 and Q2_0 (t2),
PTQ1_0 and TQ1_0 (t5, groups 128 and 256), Q1_0 (b1; its encoder turns 0 into +1).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai import ternary

CYCLE = [(i % 3) - 1 for i in range(256)]
IMPOSSIBLE = (1, 20, 40, 60, 79, 99, 119, 138, 158, 178, 197, 217, 237)
GOLDEN = (
    ("t2", 128, "2449922449922449922449922449922449922449922449922449922449922449"),
    ("t2", 64, "2449922449922449922449922449922449922449922449922449922449922449"),
    ("t5", 128, "3194bb3194bb3194bb3194bb3194bb31cf456ccf456ccf45" + "436c"),
    (
        "t5",
        256,
        "456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456c"
        "94bb3194bb3194bb3194bb3194bb3194" + "3092bb30",
    ),
    ("b1", 128, "b66ddbb66ddbb66ddbb66ddbb66ddbb6"),
)
SUPPORTED = [(name, group) for name, kind in ternary.PACKINGS.items() for group in kind.groups]


def trits_of(packing: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = rng.integers(-1, 2, shape).astype(np.int8)
    return np.where(values == 0, 1, values).astype(np.int8) if packing == "b1" else values


@pytest.mark.parametrize(("packing", "group", "expected"), GOLDEN)
def test_packing_makes_the_bytes_that_others_make(packing: str, group: int, expected: str) -> None:
    columns = 256 if group == 256 else 128
    trits = np.array([CYCLE[:columns]], np.int8)
    if packing == "b1":
        trits = np.where(trits == 0, 1, trits)
    codes = ternary.pack(trits, packing, group)
    assert codes.tobytes().hex() == expected
    assert np.array_equal(ternary.unpack(codes, packing, group, columns), trits)


def test_t2_words_are_little_endian_with_the_lowest_bits_first() -> None:
    codes = ternary.pack(np.array([CYCLE[:128]], np.int8), "t2", 128)
    assert codes.dtype == np.dtype("<u4") and codes[0, 0] == 0x24924924


@pytest.mark.parametrize(
    ("digits", "byte"),
    [("00000", 0), ("11111", 128), ("22222", 255), ("20120", 187), ("01201", 49)],
)
def test_five_trits_in_one_byte(digits: str, byte: int) -> None:
    group = np.zeros((1, 64), np.int8)
    group[0, 0:40:8] = [int(digit) - 1 for digit in digits]  # the five digits of byte 0 of 8
    assert ternary.pack(group, "t5", 64)[0, 0] == byte


def test_the_last_bytes_of_a_t5_group_hold_four_trits() -> None:
    group = np.zeros((1, 128), np.int8)
    group[0, 120:128:2] = [-1, 0, 1, 0]
    assert ternary.pack(group, "t5", 128)[0, 24] == 51


def test_t5_decodes_all_243_bytes_and_no_other() -> None:
    every = np.stack(np.meshgrid(*[[-1, 0, 1]] * 5, indexing="ij"), axis=-1).reshape(-1, 5)
    groups = np.zeros((243, 64), np.int8)
    groups[:, 0:40:8] = every
    codes = ternary.pack(groups, "t5", 64)
    assert sorted({*range(256)} - set(codes[:, 0].tolist())) == list(IMPOSSIBLE)
    assert np.array_equal(ternary.unpack(codes, "t5", 64, 64), groups)


def scalar_trit(data: bytes, packing: str, group: int, element: int) -> int:
    """One trit of one group, by the element map of docs/format.md."""
    if packing == "t2":
        return (data[element // 4] >> 2 * (element % 4) & 3) - 1
    if packing == "b1":
        return 2 * (data[element // 8] >> element % 8 & 1) - 1
    first, second, third = group // 8, group // 16, group // 64
    if element < 5 * first:
        byte, digit = element % first, element // first
    elif element < 5 * (first + second):
        rest = element - 5 * first
        byte, digit = first + rest % second, rest // second
    else:
        rest = element - 5 * (first + second)
        byte, digit = first + second + rest % third, rest // third
    return (data[byte] * 3**digit % 256 * 3 >> 8) - 1


@pytest.mark.parametrize(("packing", "group"), SUPPORTED)
def test_unpack_equals_a_scalar_decoder(packing: str, group: int) -> None:
    trits = trits_of(packing, np.random.default_rng(group), (3, 2 * group))
    codes = ternary.pack(trits, packing, group)
    for row in range(3):
        data = codes[row].tobytes()
        half = len(data) // 2
        parts = (data[:half], data[half:])
        decoded = [scalar_trit(p, packing, group, e) for p in parts for e in range(group)]
        assert decoded == trits[row].tolist()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(SUPPORTED),
    rows=st.integers(1, 5),
    columns=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpack_undoes_pack(kind: tuple[str, int], rows: int, columns: int, seed: int) -> None:
    packing, group = kind
    trits = trits_of(packing, np.random.default_rng(seed), (rows, columns))
    codes = ternary.pack(trits, packing, group)
    assert codes.shape == ternary.PACKINGS[packing].codes_shape(rows, columns, group)
    assert codes.dtype == ternary.PACKINGS[packing].dtype
    assert np.array_equal(ternary.unpack(codes, packing, group, columns), trits)
    zeros = 0 if packing == "b1" else int((trits == 0).sum())
    assert ternary.census(codes, packing, group, columns) == (zeros, 0)


@pytest.mark.parametrize(("packing", "filler"), [("t2", 0), ("t5", 0), ("b1", -1)])
def test_padding_is_the_smallest_code_that_means_nothing(packing: str, filler: int) -> None:
    codes = ternary.pack(np.ones((2, 192), np.int8), packing, 128)
    whole = ternary.unpack(codes, packing, 128, 256)
    assert (whole[:, :192] == 1).all() and (whole[:, 192:] == filler).all()


@pytest.mark.parametrize("byte", range(256))
def test_census_knows_every_byte(byte: int) -> None:
    digits = [(byte * 3**n % 256 * 3 >> 8) for n in range(5)]
    t5 = ternary.pack(np.ones((1, 64), np.int8), "t5", 64)
    t5[0, 0] = byte
    assert ternary.census(t5, "t5", 64, 64) == (digits.count(1), int(byte in IMPOSSIBLE))
    fields = [byte >> shift & 3 for shift in (0, 2, 4, 6)]
    t2 = ternary.pack(np.ones((1, 64), np.int8), "t2", 64)
    t2.view(np.uint8)[0, 5] = byte
    assert ternary.census(t2, "t2", 64, 64) == (fields.count(1), fields.count(3))


def test_census_of_the_bytes_of_four_trits() -> None:
    t5 = ternary.pack(np.ones((1, 64), np.int8), "t5", 64)
    valid = {-(-256 * 3 * value // 243) for value in range(81)}
    for byte in range(256):
        t5[0, 12] = byte
        assert ternary.census(t5, "t5", 64, 64)[1] == int(byte not in valid)


def test_census_of_a_matrix_larger_than_its_block() -> None:
    trits = trits_of("t2", np.random.default_rng(5), (5000, 1000))
    codes = ternary.pack(trits, "t2", 128)
    codes[4999, 3] |= 3
    expected = int((trits == 0).sum()) - int(trits[4999, 48] == 0)
    assert ternary.census(codes, "t2", 128, 1000) == (expected, 1)


@pytest.mark.parametrize(
    ("trits", "packing", "group", "message"),
    [
        ([[2, 0]], "t2", 64, "-1, 0 and 1"),
        ([[-2, 0]], "t5", 64, "-1, 0 and 1"),
        ([0, 1], "t2", 64, "matrix"),
        ([[0, 1]], "b1", 128, "no zero"),
        ([[0, 1]], "t5", 32, "group 32 is not one of"),
        ([[0, 1]], "t2", 100, "group 100 is not one of"),
    ],
)
def test_pack_refuses_what_it_cannot_hold(trits, packing, group, message) -> None:
    with pytest.raises(ValueError, match=message):
        ternary.pack(np.array(trits), packing, group)


def test_pack_refuses_values_that_an_int8_would_wrap() -> None:
    with pytest.raises(ValueError, match="-1, 0 and 1"):
        ternary.pack(np.array([[257, 0]]), "t2", 64)


def test_unpack_refuses_a_plane_of_another_width() -> None:
    codes = ternary.pack(np.zeros((2, 128), np.int8), "t2", 128)
    with pytest.raises(ValueError, match=r"\(2, 8\), 200 columns need \(2, 16\)"):
        ternary.unpack(codes, "t2", 128, 200)
