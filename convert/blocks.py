"""The block types of GGUF files, and rows of blocks as matrices of our own packings.

Knows the bytes of a block (docs/convert.md lists them). Does not know files or architectures.
A reader never rounds: what has no exact packing comes back as float32, or as codes whose scales
and biases are float32. It does not judge values (code 3, infinite scales): `encode` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bonsai import affine
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix

__all__ = ["I2_S", "LEGACY_Q2_0", "Q2_0_ID", "TYPES", "BlockType", "supported_types"]

Reader = Callable[[str, np.ndarray, int], Matrix]
Q2_0_ID = 42


@dataclass(frozen=True, slots=True)
class BlockType:
    """`weights` per block of `nbytes`; `read(name, raw, columns)` decodes uint8 [rows, row bytes].

    `packing` is what `read` gives for ordinary blocks. `rounds`: scales and biases come back as
    float32, because fp16 does not hold them. `tail` bytes follow the blocks of a whole tensor.
    """

    id: int
    name: str
    weights: int
    nbytes: int
    packing: str
    read: Reader
    rounds: bool = False
    tail: int = 0


def supported_types() -> str:
    """For error messages: the names and ids that can be read."""
    return ", ".join(f"{kind.name} ({kind.id})" for kind in TYPES.values())


def _dense(packing: str, dtype: str) -> Reader:
    def read(name: str, raw: np.ndarray, columns: int) -> Matrix:
        values = raw.view(dtype)
        return DenseMatrix(name, packing, (len(values), columns), values)

    return read


def _blocks(raw: np.ndarray, nbytes: int) -> np.ndarray:
    """uint8 [rows, blocks, bytes of a block]."""
    return raw.reshape(len(raw), -1, nbytes)


def _half(part: np.ndarray) -> np.ndarray:
    """The fp16 value in the two bytes of each block, [rows, blocks]."""
    return np.ascontiguousarray(part).view("<f2")[:, :, 0]


def _read_q2_0(group: int) -> Reader:
    """d, then codes of 2 bits, lowest first: the codes of a row are a t2 plane as they lie."""

    def read(name: str, raw: np.ndarray, columns: int) -> Matrix:
        blocks = _blocks(raw, 2 + group // 4)
        codes = np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(raw), -1)
        return PackedMatrix(
            name, "t2", (len(raw), columns), group, codes.view("<u4"), _half(blocks[:, :, :2])
        )

    return read


def _read_tq2_0(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """Two halves of 32 bytes, then d. In a half, bits 2 l of byte m are weight 32 l + m."""
    blocks = _blocks(raw, 66)
    halves = blocks[:, :, :64].reshape(len(raw), -1, 2, 1, 32)
    fields = (halves >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    fields = fields.reshape(len(raw), -1, 4)
    codes = fields[:, :, 0].copy()
    for i in range(1, 4):
        codes |= fields[:, :, i] << np.uint8(2 * i)
    scales = _half(blocks[:, :, 64:])
    return PackedMatrix(name, "t2", (len(raw), columns), 256, codes.view("<u4"), scales)


def _read_q1_0(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """d, then 128 sign bits, lowest first (1 is +d): a b1 plane as it lies."""
    blocks = _blocks(raw, 18)
    codes = np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(raw), -1)
    return PackedMatrix(
        name, "b1", (len(raw), columns), 128, codes.view("<u4"), _half(blocks[:, :, :2])
    )


def _read_base_3(group: int) -> Reader:
    """Bytes of trits, then d: the bytes of a row are a t5 plane as they lie."""

    def read(name: str, raw: np.ndarray, columns: int) -> Matrix:
        blocks = _blocks(raw, 13 * group // 64 + 2)
        codes = np.ascontiguousarray(blocks[:, :, :-2]).reshape(len(raw), -1)
        scales = _half(blocks[:, :, -2:])
        return PackedMatrix(name, "t5", (len(raw), columns), group, codes, scales)

    return read


def _nibbles(part: np.ndarray) -> np.ndarray:
    """The 32 codes of each block: the low nibbles of 16 bytes, then the high ones."""
    codes = np.concatenate([part & np.uint8(15), part >> np.uint8(4)], axis=2)
    return codes.reshape(len(part), -1)


def _affine(
    name: str, packing: str, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray
) -> PackedMatrix:
    plane = affine.pack(codes, packing, 32)
    return PackedMatrix(name, packing, codes.shape, 32, plane, scales, biases)


def _read_q4_0(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """(n - 8) d. -8 d is exact in fp16 unless it overflows: then the rows come back as float32."""
    blocks = _blocks(raw, 18)
    codes, scales = _nibbles(blocks[:, :, 2:]), _half(blocks[:, :, :2])
    return _centred(name, "q4", codes, scales, 8)


def _read_q4_1(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """n d + m."""
    blocks = _blocks(raw, 20)
    codes = _nibbles(blocks[:, :, 4:])
    return _affine(name, "q4", codes, _half(blocks[:, :, :2]), _half(blocks[:, :, 2:4]))


def _read_q8_0(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """q d with a signed byte q, which is the unsigned code q + 128."""
    blocks = _blocks(raw, 34)
    codes = (blocks[:, :, 2:] ^ np.uint8(128)).reshape(len(raw), -1)
    return _centred(name, "q8", codes, _half(blocks[:, :, :2]), 128)


def _centred(name: str, packing: str, codes: np.ndarray, scales: np.ndarray, centre: int) -> Matrix:
    """(code - centre) d: bias -centre d, or float32 where that overflows fp16."""
    with np.errstate(over="ignore"):
        biases = scales * np.float16(-centre)
    if np.isfinite(biases).all() or not np.isfinite(scales).all():
        return _affine(name, packing, codes, scales, biases)
    wide = np.repeat(scales.astype(np.float32), 32, axis=1)
    values = (codes.astype(np.float32) - np.float32(centre)) * wide
    return DenseMatrix(name, "f32", codes.shape, values)


def _read_q4_k(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """d, dmin, 12 bytes of scales and minimums, 128 bytes of nibbles: 8 groups of 32 weights."""
    blocks = _blocks(raw, 144)
    return _k_groups(name, "q4", blocks, _chunked_nibbles(blocks[:, :, 16:]), columns)


def _read_q5_k(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte m is in group g."""
    blocks = _blocks(raw, 176)
    high = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _chunked_nibbles(blocks[:, :, 48:]) | high << np.uint8(4)
    return _k_groups(name, "q8", blocks, codes, columns)


def _chunked_nibbles(part: np.ndarray) -> np.ndarray:
    """Codes [rows, blocks, 8, 32]: of each 32 bytes first the low nibbles, then the high ones."""
    chunks = part.reshape(*part.shape[:2], 4, 1, 32)
    codes = chunks >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    return codes.reshape(*part.shape[:2], 8, 32)


def _k_groups(
    name: str, packing: str, blocks: np.ndarray, codes: np.ndarray, columns: int
) -> PackedMatrix:
    """Weight = d s code - dmin m, with s and m of 6 bits for each group of 32.

    Of the 12 bytes, byte g < 4 has s and byte g + 4 has m of group g in its low 6 bits. Byte g + 8
    has the low 4 bits of s (low nibble) and m of group g + 4; their high bits are the upper two of
    bytes g and g + 4. d s and dmin m have up to 17 bits: exact in float32, not in fp16.
    """
    first, second, third = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    six, four = np.uint8(63), np.uint8(15)
    top = [part >> np.uint8(6) << np.uint8(4) for part in (first, second)]
    scales = np.concatenate([first & six, third & four | top[0]], axis=2)
    minimums = np.concatenate([second & six, third >> np.uint8(4) | top[1]], axis=2)
    d, dmin = (_half(blocks[:, :, at : at + 2]).astype(np.float32)[:, :, None] for at in (0, 2))
    rows = len(blocks)
    plane = affine.pack(codes.reshape(rows, -1), packing, 32)
    planes = (d * scales).reshape(rows, -1), -(dmin * minimums).reshape(rows, -1)
    return PackedMatrix(name, packing, (rows, columns), 32, plane, *planes)


def _read_q6_k(name: str, raw: np.ndarray, columns: int) -> Matrix:
    """256 weights: low nibbles [128], high bit pairs [64], signed scales of 16 weights [16], d.

    Weight 128 h + 32 j + m, j < 4, m < 32: low part = nibble j // 2 of byte 64 h + 32 (j % 2) + m,
    high part = bits 2 j of byte 32 h + m of the pairs; value = d * scale * (code - 32).
    """
    blocks = _blocks(raw, 210)
    shape = (len(raw), blocks.shape[1])
    low = blocks[:, :, :128].reshape(*shape, 2, 1, 64)
    low = (low >> np.array([[0], [4]], np.uint8)) & np.uint8(15)
    high = blocks[:, :, 128:192].reshape(*shape, 2, 1, 32)
    high = (high >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    codes = low.reshape(*shape, 256) | (high.reshape(*shape, 256) << np.uint8(4))
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    scales *= _half(blocks[:, :, 208:]).astype(np.float32)[:, :, None]
    values = (codes.astype(np.float32) - np.float32(32)).reshape(*shape, 16, 16)
    values *= scales[:, :, :, None]
    return DenseMatrix(name, "f32", (len(raw), columns), values.reshape(len(raw), -1))


def _in_no_order(name: str, raw: np.ndarray, columns: int) -> Matrix:
    raise AssertionError(f"{name}: bytes of I2_S do not say in which order they are")


# Of bitnet.cpp: 4 weights a byte, and 32 bytes with the scale of the tensor. `i2_s` reads it.
I2_S = BlockType(36, "I2_S", 4, 1, "t2", _in_no_order, tail=32)
LEGACY_Q2_0 = BlockType(Q2_0_ID, "Q2_0 of 128", 128, 34, "t2", _read_q2_0(128))

TYPES = {
    kind.id: kind
    for kind in (
        BlockType(0, "F32", 1, 4, "f32", _dense("f32", "<f4")),
        BlockType(1, "F16", 1, 2, "f16", _dense("f16", "<f2")),
        BlockType(2, "Q4_0", 32, 18, "q4", _read_q4_0),
        BlockType(3, "Q4_1", 32, 20, "q4", _read_q4_1),
        BlockType(8, "Q8_0", 32, 34, "q8", _read_q8_0),
        BlockType(12, "Q4_K", 256, 144, "q4", _read_q4_k, rounds=True),
        BlockType(13, "Q5_K", 256, 176, "q8", _read_q5_k, rounds=True),
        BlockType(14, "Q6_K", 256, 210, "f32", _read_q6_k),
        BlockType(30, "BF16", 1, 2, "bf16", _dense("bf16", "<u2")),
        BlockType(34, "TQ1_0", 256, 54, "t5", _read_base_3(256)),
        BlockType(35, "TQ2_0", 256, 66, "t2", _read_tq2_0),
        BlockType(41, "Q1_0", 128, 18, "b1", _read_q1_0),
        BlockType(Q2_0_ID, "Q2_0", 64, 18, "t2", _read_q2_0(64)),
        BlockType(142, "PQ2_0", 128, 34, "t2", _read_q2_0(128)),
        BlockType(143, "PTQ1_0", 128, 28, "t5", _read_base_3(128)),
    )
}
