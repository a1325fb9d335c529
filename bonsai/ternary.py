"""What a packed ternary matrix is: the packings `t2`, `t5` and `b1`, packed and unpacked exactly.

Knows trits {-1, 0, +1} and their bytes. Does not know scales, files, models or devices.
Each row of K trits is padded to whole groups; docs/format.md shows the layouts byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["PACKINGS", "TernaryPacking", "census", "faulty_rows", "pack", "padded", "unpack"]

T2_PER_WORD = 16
B1_PER_WORD = 32
CENSUS_BYTES = 1 << 17  # of codes at a time; counting takes eight times as much memory


@dataclass(frozen=True, slots=True)
class TernaryPacking:
    """One way to store trits.

    `groups` are the group sizes it supports; `units_per_group(group)` counts elements of `dtype`.
    """

    name: str
    dtype: type
    groups: tuple[int, ...]
    units_per_group: Callable[[int], int]
    pack: Callable[[np.ndarray, int], np.ndarray]
    unpack: Callable[[np.ndarray, int], np.ndarray]

    def codes_shape(self, rows: int, columns: int, group: int) -> tuple[int, int]:
        """The shape of the codes plane of a [rows, columns] matrix."""
        return rows, padded(columns, group) // group * self.units_per_group(group)


def padded(columns: int, group: int) -> int:
    """`columns` rounded up to whole groups."""
    return -(-columns // group) * group


def pack(trits: np.ndarray, packing: str, group: int) -> np.ndarray:
    """Codes of int8 `trits` [rows, K] in {-1, 0, 1}; K is padded (t2, t5: with 0; b1: with -1).

    Raises ValueError on other values, and on zeros where the packing has none (b1).
    """
    kind = _packing(packing, group)
    given = np.asarray(trits)
    if given.ndim != 2 or (given.size and (given.min() < -1 or given.max() > 1)):
        raise ValueError(f"{packing}: trits must be a matrix of -1, 0 and 1")
    values = given.astype(np.int8)
    if packing == "b1" and not values.all():
        raise ValueError("b1 has no zero; use t2 or t5")
    missing = padded(values.shape[1], group) - values.shape[1]
    filler = -1 if packing == "b1" else 0
    values = np.pad(values, ((0, 0), (0, missing)), constant_values=filler)
    return kind.pack(values, group)


def unpack(codes: np.ndarray, packing: str, group: int, columns: int) -> np.ndarray:
    """The int8 trits [rows, columns] of a codes plane. A t2 code 3, which none may have, is 2."""
    kind = _packing(packing, group)
    expected = kind.codes_shape(codes.shape[0], columns, group)
    if codes.shape != expected:
        raise ValueError(f"{packing}: codes are {codes.shape}, {columns} columns need {expected}")
    return np.ascontiguousarray(kind.unpack(codes, group)[:, :columns])


def census(codes: np.ndarray, packing: str, group: int, columns: int) -> tuple[int, int]:
    """(zero trits, t2 codes 3 or t5 bytes that no packer makes) in a codes plane.

    Padding is taken to be as `pack` makes it, and is not counted. Needs little memory.
    """
    rows = len(codes)
    if _packing(packing, group).name == "b1":
        return 0, 0
    stages = _t5_stages(group) if packing == "t5" else ((group // 4, 4),)
    zeros, impossible, start = -rows * (padded(columns, group) - columns), 0, 0
    width = sum(count for count, _ in stages)
    step = max(1, (1 << 20) // max(1, codes.nbytes // max(1, rows)))  # rows in about 1 MiB
    for count, digits in stages:
        zeros_in, impossible_in = _byte_facts(packing, digits)
        for first in range(0, rows, step):
            block = np.ascontiguousarray(codes[first : first + step]).view(np.uint8)
            part = block.reshape(-1, width)[:, start : start + count]
            seen = np.bincount(part.reshape(-1), minlength=256)
            zeros += int(seen @ zeros_in)
            impossible += int(seen @ impossible_in)
        start += count
    return zeros, impossible


def faulty_rows(codes: np.ndarray, packing: str, group: int) -> np.ndarray:
    """bool [rows]: the rows with a t2 code 3 or a t5 byte that no packer makes."""
    _packing(packing, group)
    if packing == "b1":
        return np.zeros(len(codes), bool)
    if packing == "t2":
        return (codes & (codes >> np.uint32(1)) & np.uint32(0x55555555)).any(axis=1)
    data = codes.reshape(len(codes), -1, _t5_bytes(group))
    tail = _t5_stages(group)[2][0]  # the bytes of four trits come last
    bad = [
        (_byte_facts(packing, digits)[1] > 0)[part].any(axis=(1, 2))
        for digits, part in ((5, data[:, :, :-tail]), (4, data[:, :, -tail:]))
    ]
    return bad[0] | bad[1]


def _byte_facts(packing: str, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Per byte value: zero trits in it, and codes 3 (t2) or 1 where it is impossible (t5)."""
    values = np.arange(256)
    if packing == "t2":
        fields = values[:, None] >> np.arange(0, 8, 2) & 3
        return (fields == 1).sum(axis=1), (fields == 3).sum(axis=1)
    fractions = values[:, None] * 3 ** np.arange(digits) & 255
    possible = -(-256 * 3 ** (5 - digits) * np.arange(3**digits) // 243)
    return (fractions * 3 >> 8 == 1).sum(axis=1), (~np.isin(values, possible)).astype(np.int64)


def _packing(name: str, group: int) -> TernaryPacking:
    kind = PACKINGS[name]
    if group not in kind.groups:
        raise ValueError(f"{name}: group {group} is not one of {kind.groups}")
    return kind


def _pack_t2(trits: np.ndarray, group: int) -> np.ndarray:
    """16 codes (trit + 1) per little-endian uint32, lowest bits first."""
    return _pack_bits((trits + 1).astype(np.uint8), 2)


def _unpack_t2(codes: np.ndarray, group: int) -> np.ndarray:
    return _unpack_bits(codes, 2).astype(np.int8) - 1


def _pack_b1(trits: np.ndarray, group: int) -> np.ndarray:
    """32 bits per little-endian uint32, lowest first; 1 is +1 and 0 is -1."""
    return _pack_bits((trits > 0).astype(np.uint8), 1)


def _unpack_b1(codes: np.ndarray, group: int) -> np.ndarray:
    return 2 * _unpack_bits(codes, 1).astype(np.int8) - 1


def _pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    per_byte = 8 // bits
    fields = codes.reshape(len(codes), -1, per_byte)
    out = np.zeros(fields.shape[:2], np.uint8)
    for i in range(per_byte):
        out |= fields[:, :, i] << np.uint8(bits * i)
    return out.view("<u4")


def _unpack_bits(words: np.ndarray, bits: int) -> np.ndarray:
    data = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (data[:, :, None] >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(len(words), -1)


def _t5_stages(group: int) -> tuple[tuple[int, int], ...]:
    """(bytes, digits) of the three stages of a group: 13 * group / 64 bytes in all.

    Group 128 is the payload of a PTQ1_0 block and group 256 that of a TQ1_0 block, so importing
    either is a copy.
    """
    return (group // 8, 5), (group // 16, 5), (group // 64, 4)


def _t5_bytes(group: int) -> int:
    return 13 * group // 64


def _pack_t5(trits: np.ndarray, group: int) -> np.ndarray:
    """Base 3, most significant digit first, as the fraction ceil(256 v / 243) of a byte.

    In a stage of n bytes, digit d of byte b is element d * n + b of the stage.
    """
    digits = (trits + 1).astype(np.uint16).reshape(len(trits), -1, group)
    stages, start = [], 0
    for count, length in _t5_stages(group):
        part = digits[:, :, start : start + count * length]
        part = part.reshape(*part.shape[:2], length, count)
        value = np.zeros((*part.shape[:2], count), np.uint16)
        for digit in range(5):
            value = 3 * value + (part[:, :, digit] if digit < length else 0)
        stages.append(((256 * value.astype(np.uint32) + 242) // 243).astype(np.uint8))
        start += count * length
    return np.concatenate(stages, axis=2).reshape(len(trits), -1)


def _unpack_t5(codes: np.ndarray, group: int) -> np.ndarray:
    data = codes.reshape(len(codes), -1, _t5_bytes(group))
    parts, start = [], 0
    for count, length in _t5_stages(group):
        stage = data[:, :, start : start + count].astype(np.uint16)
        powers = 3 ** np.arange(length, dtype=np.uint16)
        fraction = (stage[:, :, None, :] * powers[:, None]) & 255
        parts.append(((fraction * 3) >> 8).reshape(*stage.shape[:2], -1))
        start += count
    return (np.concatenate(parts, axis=2).reshape(len(codes), -1)).astype(np.int8) - 1


PACKINGS = {
    "t2": TernaryPacking(
        "t2", np.uint32, (32, 64, 128, 256), lambda g: g // T2_PER_WORD, _pack_t2, _unpack_t2
    ),
    "t5": TernaryPacking("t5", np.uint8, (64, 128, 256), _t5_bytes, _pack_t5, _unpack_t5),
    "b1": TernaryPacking(
        "b1", np.uint32, (32, 64, 128, 256), lambda g: g // B1_PER_WORD, _pack_b1, _unpack_b1
    ),
}
