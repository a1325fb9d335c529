"""Block types: golden bytes from outside, and every type against a dequantizer of one weight."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from bonsai import ternary
from bonsai.convert.blocks import LEGACY_Q2_0, TYPES, BlockType
from bonsai.matrix import PackedMatrix

# Computed outside: the weights (i mod 3) - 1 with d = 1 (see docs/convert.md).
CYCLE = {
    "Q2_0": "003c24499224499224499224499224499224" + "003c49922449922449922449922449922449",
    "Q2_0 of 128": "003c" + "2449922449922449922449922449922449922449922449922449922449922449",
    "PQ2_0": "003c" + "2449922449922449922449922449922449922449922449922449922449922449",
    "TQ2_0": "186186" * 21 + "18" + "003c",
    "PTQ1_0": "3194bb3194bb3194bb3194bb3194bb31cf456ccf456ccf45" + "436c" + "003c",
    "TQ1_0": "456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456ccf456c"
    + "94bb3194bb3194bb3194bb3194bb3194"
    + "3092bb30"
    + "003c",
}
SIGNS = "5039" + "b66ddbb66ddbb66ddbb66ddbb66ddbb6"  # Q1_0: 0 is +, d = 85/128
ALL = {kind.name: kind for kind in (*TYPES.values(), LEGACY_Q2_0)}


def half(data: bytes) -> float:
    return struct.unpack("<e", data)[0]


def f32(x: float) -> np.float32:
    return np.float32(x)


def scalar_q2_0(block: bytes, j: int) -> np.float32:
    return f32(half(block[:2])) * f32(((block[2 + j // 4] >> (2 * (j % 4))) & 3) - 1)


def scalar_tq2_0(block: bytes, e: int) -> np.float32:
    h, lane, m = e // 128, e % 128 // 32, e % 32
    return f32(half(block[64:])) * f32(((block[32 * h + m] >> (2 * lane)) & 3) - 1)


def scalar_base_3(group: int):
    """The element map of each block, written out: byte and digit of every weight."""
    places = {
        128: [(e % 16, e // 16) for e in range(80)]
        + [(16 + (e - 80) % 8, (e - 80) // 8) for e in range(80, 120)]
        + [(24 + (e - 120) % 2, (e - 120) // 2) for e in range(120, 128)],
        256: [(e % 32, e // 32) for e in range(160)]
        + [(32 + (e - 160) % 16, (e - 160) // 16) for e in range(160, 240)]
        + [(48 + (e - 240) % 4, (e - 240) // 4) for e in range(240, 256)],
    }[group]

    def scalar(block: bytes, e: int) -> np.float32:
        at, digit = places[e]
        trit = (block[at] * 3**digit % 256 * 3 >> 8) - 1
        return f32(half(block[-2:])) * f32(trit)

    return scalar


def scalar_q1_0(block: bytes, e: int) -> np.float32:
    return f32(half(block[:2])) * f32(1 if block[2 + e // 8] >> e % 8 & 1 else -1)


def nibble(data: bytes, j: int) -> int:
    return data[j] & 15 if j < 16 else data[j - 16] >> 4


def scalar_q4_0(block: bytes, j: int) -> np.float32:
    return f32(nibble(block[2:], j) - 8) * f32(half(block[:2]))


def scalar_q4_1(block: bytes, j: int) -> np.float32:
    return f32(nibble(block[4:], j)) * f32(half(block[:2])) + f32(half(block[2:4]))


def scalar_q8_0(block: bytes, j: int) -> np.float32:
    return f32(struct.unpack_from("<b", block, 2 + j)[0]) * f32(half(block[:2]))


def scalar_q6_k(block: bytes, e: int) -> np.float32:
    h, j, m = e // 128, e % 128 // 32, e % 32
    low = (block[64 * h + 32 * (j % 2) + m] >> (4 * (j // 2))) & 15
    high = (block[128 + 32 * h + m] >> (2 * j)) & 3
    (scale,) = struct.unpack_from("<b", block, 192 + e // 16)
    return f32(half(block[208:])) * f32(scale) * f32((low | high << 4) - 32)


def k_scales(block: bytes, g: int) -> tuple[np.float32, np.float32]:
    """(d s, dmin m) of group g of 32 weights of a Q4_K or Q5_K block."""
    q = block[4:16]
    if g < 4:
        s, m = q[g] & 63, q[g + 4] & 63
    else:
        s = (q[g + 4] & 15) | (q[g - 4] >> 6) << 4
        m = (q[g + 4] >> 4) | (q[g] >> 6) << 4
    return f32(half(block[:2])) * f32(s), f32(half(block[2:4])) * f32(m)


def scalar_q4_k(block: bytes, e: int) -> np.float32:
    g = e // 32
    scale, low = k_scales(block, g)
    return scale * f32(block[16 + 32 * (g // 2) + e % 32] >> 4 * (g % 2) & 15) - low


def scalar_q5_k(block: bytes, e: int) -> np.float32:
    g = e // 32
    scale, low = k_scales(block, g)
    code = block[48 + 32 * (g // 2) + e % 32] >> 4 * (g % 2) & 15
    return scale * f32(code + 16 * (block[16 + e % 32] >> g & 1)) - low


def scalar_bf16(block: bytes, e: int) -> np.float32:
    return f32(struct.unpack("<f", b"\0\0" + block)[0])


SCALAR = {
    "F32": lambda block, e: f32(struct.unpack("<f", block)[0]),
    "F16": lambda block, e: f32(half(block)),
    "BF16": scalar_bf16,
    "Q4_0": scalar_q4_0,
    "Q4_1": scalar_q4_1,
    "Q8_0": scalar_q8_0,
    "Q6_K": scalar_q6_k,
    "Q4_K": scalar_q4_k,
    "Q5_K": scalar_q5_k,
    "TQ1_0": scalar_base_3(256),
    "TQ2_0": scalar_tq2_0,
    "Q1_0": scalar_q1_0,
    "PTQ1_0": scalar_base_3(128),
    "Q2_0": scalar_q2_0,
    "Q2_0 of 128": scalar_q2_0,
    "PQ2_0": scalar_q2_0,
}
HALVES = {
    "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "PTQ1_0": (26,),
}  # fmt: skip


def random_blocks(kind: BlockType, rows: int, blocks: int) -> np.ndarray:
    """Random bytes with scales of many sizes (1 among none of them) and, for ternary, no code 3."""
    rng = np.random.default_rng(kind.id + kind.nbytes)
    raw = rng.integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    if kind.packing == "t2":
        codes = rng.integers(0, 3, (rows, blocks, kind.nbytes, 4)).astype(np.uint8)
        raw = codes @ np.array([1, 4, 16, 64], np.uint8)
    if kind.packing == "t5":
        numbers = rng.integers(0, 243, raw.shape)
        tail = kind.weights // 64 + 2  # the bytes of four trits, and d
        numbers[:, :, -tail:] = numbers[:, :, -tail:] // 3 * 3
        raw = ((256 * numbers + 242) // 243).astype(np.uint8)
    if kind.weights == 1:
        values = rng.normal(size=(rows, blocks)).astype(np.float32)
        kinds = {"F32": "<f4", "F16": "<f2"}
        if kind.name == "BF16":
            raw = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        else:
            raw = values.astype(kinds[kind.name]).view(np.uint8)
        return raw.reshape(rows, -1)
    for at in HALVES.get(kind.name, (0,)):
        scales = rng.normal(size=(rows, blocks)) * 10.0 ** rng.integers(-4, 2, (rows, blocks))
        raw[:, :, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(rows, blocks, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", ALL)
def test_blocks_equal_a_scalar_dequantizer(name):
    kind = ALL[name]
    raw = random_blocks(kind, rows=3, blocks=2)
    matrix = kind.read("w", raw, 2 * kind.weights)
    blocks = raw.reshape(3, 2, kind.nbytes)
    expected = [
        [SCALAR[name](blocks[r, b].tobytes(), e) for b in range(2) for e in range(kind.weights)]
        for r in range(3)
    ]
    assert matrix.packing == kind.packing
    assert matrix.shape == (3, 2 * kind.weights)
    assert np.array_equal(matrix.rows(), np.array(expected, np.float32))


@pytest.mark.parametrize("name", CYCLE)
def test_golden_bytes(name):
    kind = ALL[name]
    raw = np.frombuffer(bytes.fromhex(CYCLE[name]), np.uint8)[None]
    columns = raw.shape[1] // kind.nbytes * kind.weights
    matrix = kind.read("w", raw, columns)
    expected = np.arange(columns) % 3 - 1
    assert np.array_equal(matrix.rows()[0], expected.astype(np.float32))
    assert np.array_equal(ternary.pack(expected[None], kind.packing, matrix.group), matrix.codes)


def test_golden_bytes_of_signs():
    raw = np.frombuffer(bytes.fromhex(SIGNS), np.uint8)[None]
    matrix = ALL["Q1_0"].read("w", raw, 128)
    signs = np.where(np.arange(128) % 3 == 0, -1, 1)
    assert np.array_equal(matrix.rows()[0], signs * np.float32(85 / 128))
    assert np.array_equal(ternary.pack(signs[None], "b1", 128), matrix.codes)


@pytest.mark.parametrize("name", ["PTQ1_0", "TQ1_0"])
def test_five_consecutive_trits_in_a_byte_would_be_seen(name):
    """The negative control of the element map."""
    raw = np.frombuffer(bytes.fromhex(CYCLE[name]), np.uint8)
    digits = [int(b) * 3**n % 256 * 3 >> 8 for b in raw[:-2] for n in range(5)]
    assert digits[:30] != [i % 3 for i in range(30)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("PQ2_0", slice(2, 34)),
        ("Q1_0", slice(2, 18)),
        ("PTQ1_0", slice(0, 26)),
        ("TQ1_0", slice(0, 52)),
    ],
)
def test_codes_of_a_row_are_copied_as_they_lie(name, part):
    kind = ALL[name]
    raw = random_blocks(kind, rows=2, blocks=3)
    matrix = kind.read("w", raw, 3 * kind.weights)
    assert matrix.codes.tobytes() == raw.reshape(2, 3, kind.nbytes)[:, :, part].tobytes()


def test_the_scale_multiplies():
    """1.555 * {-1, 0, 1}, not a division by the scale."""
    block = struct.pack("<e", 1.555) + bytes([0b00100100]) + b"\x55" * 31
    values = ALL["PQ2_0"].read("w", np.frombuffer(block, np.uint8)[None], 128).rows()[0]
    scale = np.float32(np.float16(1.555))
    assert values[:3].tolist() == [-scale, 0, scale]


def test_q8_0_whose_bias_overflows_comes_back_as_float32():
    block = struct.pack("<e", 600.0) + bytes([1, 255] * 16)
    matrix = ALL["Q8_0"].read("w", np.frombuffer(block, np.uint8)[None], 32)
    assert matrix.packing == "f32"
    assert matrix.rows()[0, :2].tolist() == [600.0, -600.0]


def test_subnormal_scales_stay_exact():
    block = struct.pack("<e", 2.0**-24) + bytes(range(32))
    matrix = ALL["Q8_0"].read("w", np.frombuffer(block, np.uint8)[None], 32)
    assert isinstance(matrix, PackedMatrix)
    assert matrix.rows()[0].tolist() == [i * 2.0**-24 for i in range(32)]
