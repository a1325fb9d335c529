"""A small GGUF writer for tests: metadata, tensors of raw blocks, and blocks from known values.

Written from the layout rules, apart from the reader, so that neither can hide the other's fault.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30, "TQ1_0": 34,
    "TQ2_0": 35, "Q1_0": 41, "Q2_0": 42, "PQ2_0": 142, "PTQ1_0": 143,
}  # fmt: skip


class Tensor(NamedTuple):
    """`shape` in the usual order [rows, columns]; `data` its bytes."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> tuple[int, bytes]:
    """(type, bytes) of a metadata value; numbers by Python type, or by NumPy dtype."""
    if isinstance(item, bool):
        return 7, struct.pack("<?", item)
    if isinstance(item, int):
        return (4, struct.pack("<I", item)) if item >= 0 else (5, struct.pack("<i", item))
    if isinstance(item, float):
        return 6, struct.pack("<f", item)
    if isinstance(item, str):
        return 8, string(item)
    kinds = {value(entry)[0] for entry in item}
    (kind,) = ({5} if 5 in kinds else kinds) or {8}  # one negative number makes all of them int32
    return 9, struct.pack("<IQ", kind, len(item)) + b"".join(value(entry)[1] for entry in item)


def header(version: int, tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def record(name: str | bytes, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    fields = struct.pack(f"<I{len(dims)}q", len(dims), *dims)
    return string(name) + fields + struct.pack("<IQ", type_id, offset)


def encode(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3, alignment=32
) -> bytes:
    """The bytes of a file; the last tensor is padded like the others."""
    parts = [header(version, len(tensors), len(metadata))]
    for key, item in metadata.items():
        kind, data = value(item)
        parts.append(string(key) + struct.pack("<I", kind) + data)
    offset, blob = 0, []
    for name, tensor in tensors.items():
        parts.append(record(name, tensor.shape[::-1], tensor.type_id, offset))
        padded = tensor.data + b"\0" * (-len(tensor.data) % alignment)
        blob.append(padded)
        offset += len(padded)
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % alignment) + b"".join(blob)


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], **kw: Any
) -> Path:
    path.write_bytes(encode(metadata, tensors, **kw))
    return path


def dense(values: np.ndarray, kind: str = "F32") -> Tensor:
    """A tensor of plain values; BF16 must hold them exactly."""
    if kind == "BF16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        assert not (bits & 0xFFFF).any()
        data = (bits >> 16).astype("<u2").tobytes()
    else:
        data = values.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    return Tensor(values.shape, TYPE_IDS[kind], data)


def ternary(
    trits: np.ndarray, scales: np.ndarray, group: int, type_id: int | None = None
) -> Tensor:
    """Blocks of d, then 2-bit codes with the first weight lowest: Q2_0 (64) or PQ2_0 (128)."""
    rows, columns = trits.shape
    out = bytearray()
    for r in range(rows):
        for g in range(columns // group):
            out += np.float16(scales[r, g]).tobytes()
            codes = trits[r, g * group : (g + 1) * group].astype(int) + 1
            for j in range(0, group, 4):
                out.append(sum(int(codes[j + i]) << (2 * i) for i in range(4)))
    chosen = {64: 42, 128: 142}[group] if type_id is None else type_id
    return Tensor(trits.shape, chosen, bytes(out))


def base_3(trits: np.ndarray, scales: np.ndarray, group: int) -> Tensor:
    """Blocks of trits in base 3, then d: PTQ1_0 (128) or TQ1_0 (256).

    Stages of `n` bytes of up to five trits each: trit t of byte b is weight t * n + b of the stage.
    """
    rows, columns = trits.shape
    stages = {128: ((16, 5), (8, 5), (2, 4)), 256: ((32, 5), (16, 5), (4, 4))}[group]
    out = bytearray()
    for r in range(rows):
        for g in range(columns // group):
            left = [int(t) + 1 for t in trits[r, g * group : (g + 1) * group]]
            for n, length in stages:
                stage, left = left[: n * length], left[n * length :]
                for b in range(n):
                    digits = stage[b::n] + [0] * (5 - length)
                    number = sum(d * 3 ** (4 - i) for i, d in enumerate(digits))
                    out.append(-(-256 * number // 243))
            out += np.float16(scales[r, g]).tobytes()
    return Tensor(trits.shape, {128: 143, 256: 34}[group], bytes(out))


def binary(signs: np.ndarray, scales: np.ndarray) -> Tensor:
    """Q1_0: blocks of d, then one bit for each of 128 weights, the first lowest; 1 is +d."""
    rows, columns = signs.shape
    out = bytearray()
    for r in range(rows):
        for g in range(columns // 128):
            out += np.float16(scales[r, g]).tobytes()
            for j in range(128 * g, 128 * g + 128, 8):
                out.append(sum(1 << i for i in range(8) if signs[r, j + i] > 0))
    return Tensor(signs.shape, TYPE_IDS["Q1_0"], bytes(out))


def q4_1(codes: np.ndarray, scales: np.ndarray, minimums: np.ndarray) -> Tensor:
    """Blocks of d, m and 16 bytes: weight j is the low nibble of byte j, j + 16 the high one."""
    rows, columns = codes.shape
    out = bytearray()
    for r in range(rows):
        for g in range(columns // 32):
            block = codes[r, 32 * g : 32 * g + 32].astype(int)
            out += np.float16(scales[r, g]).tobytes() + np.float16(minimums[r, g]).tobytes()
            out += bytes(int(block[j]) | int(block[j + 16]) << 4 for j in range(16))
    return Tensor(codes.shape, TYPE_IDS["Q4_1"], bytes(out))


def q8_0(codes: np.ndarray, scales: np.ndarray) -> Tensor:
    """Blocks of d and 32 signed bytes."""
    rows, columns = codes.shape
    out = bytearray()
    for r in range(rows):
        for g in range(columns // 32):
            out += np.float16(scales[r, g]).tobytes()
            out += codes[r, 32 * g : 32 * g + 32].astype(np.int8).tobytes()
    return Tensor(codes.shape, TYPE_IDS["Q8_0"], bytes(out))
