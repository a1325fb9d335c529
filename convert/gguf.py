"""A strict reader of GGUF files: header, metadata and the exact place of every tensor.

Knows the container (version 2 and 3, little-endian). Does not know what block bytes mean
(`blocks`), nor which keys or tensors an architecture has (`config_gguf`, `recipes`).
Every count is checked against the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bonsai.convert.blocks import I2_S, LEGACY_Q2_0, Q2_0_ID, TYPES, BlockType, supported_types
from bonsai.errors import FormatError, UnsupportedModel

__all__ = ["GGUFFile", "TensorInfo", "read_gguf"]

MAGIC = b"GGUF"
READABLE = {**TYPES, I2_S.id: I2_S}
VERSIONS = (2, 3)  # 3 only added big-endian files; the little-endian layout is the same
MAX_STRING = 1 << 24  # bytes; the longest strings in real files are chat templates
MAX_ELEMENTS = 3 << 19  # of all arrays together; a vocabulary of 262,144 with its merges has 1.3 M
MAX_RECORDS = 25_000  # tensors, and metadata; each costs a Python object
MAX_ALIGNMENT = 1 << 16
MAX_KEY, MAX_NAME, MAX_DIMS = 65535, 63, 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Fewest bytes of one record: length, type, a one-byte value; length, n_dims, one dim, type, offset.
MIN_KV, MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `dims` as in the file (fastest first), `start` and `nbytes` within the file."""

    name: str
    type: BlockType
    dims: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The usual order: [rows, columns]."""
        return self.dims[::-1]


class GGUFFile:
    """An opened file: metadata, tensors by name and their mapped bytes."""

    def __init__(self, path: Path, data: mmap.mmap, metadata: dict, tensors: dict) -> None:
        self.path = path
        self.metadata: dict[str, Any] = metadata
        self.tensors: dict[str, TensorInfo] = tensors
        self._map = data

    def rows(self, name: str) -> np.ndarray:
        """The raw bytes of a tensor, uint8 [rows, bytes per row], read-only and mapped."""
        info = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, info.nbytes - info.type.tail, info.start)
        return data.reshape(prod(info.dims[1:]), -1)

    def tail(self, name: str) -> bytes:
        """The bytes after the blocks of a tensor, where its type has some."""
        info = self.tensors[name]
        end = info.start + info.nbytes
        return self._map[end - info.type.tail : end]

    def release(self, name: str) -> None:
        """Tell the system that the pages of a tensor may leave memory."""
        info = self.tensors[name]
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor record as written, with its type id not yet resolved."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Reads little-endian fields in order; an error names the file and the field."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0
        self.elements = MAX_ELEMENTS  # that may still come

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}")

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, field: str) -> bytes:
        if size > self.left:
            raise self.error(f"{field}: needs {size} bytes, the file has {self.left} left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str, field: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), field))[0]

    def string(self, field: str, limit: int = MAX_STRING) -> str:
        length = self.number("Q", f"{field}: length")
        if length > limit:
            raise self.error(f"{field}: a string of {length} bytes, the limit is {limit}")
        try:
            return self.take(length, field).decode()
        except UnicodeDecodeError:
            raise self.error(f"{field}: the string is not UTF-8") from None

    def count(self, field: str, smallest: int, most: int) -> int:
        """A number of records of at least `smallest` bytes each, at most `most`."""
        count = self.number("Q", field)
        if count > most:
            raise self.error(f"{field}: {count}, at most {most} are accepted")
        if count * smallest > self.left:
            raise self.error(
                f"{field}: {count} records of at least {smallest} bytes, the file has "
                f"{self.left} bytes left"
            )
        return count


def read_gguf(path: Path) -> GGUFFile:
    """Open and check a file. Raises FormatError (damaged) or UnsupportedModel (a type we lack)."""
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise FormatError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, path)
    cursor.at = len(MAGIC)
    _read_version(cursor)
    tensor_count = cursor.count("tensor count", MIN_TENSOR, MAX_RECORDS)
    kv_count = cursor.count("metadata count", MIN_KV, MAX_RECORDS)
    metadata = _read_metadata(cursor, kv_count)
    alignment = _alignment(cursor, metadata)
    records = _read_records(cursor, tensor_count, alignment)
    blob = -(-cursor.at // alignment) * alignment
    return GGUFFile(path, data, metadata, _place(cursor, records, blob, alignment))


def _read_version(cursor: _Cursor) -> None:
    version = cursor.number("I", "version")
    if version in VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise UnsupportedModel(
            f"{cursor.path}: version: a big-endian GGUF file; only little-endian is supported"
        )
    raise UnsupportedModel(
        f"{cursor.path}: version: GGUF version {version}; supported: {_listed(VERSIONS)}"
    )


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = cursor.string(f"metadata key {i}", MAX_KEY)
        if key in metadata:
            raise cursor.error(f"metadata key '{key}' appears twice")
        kind = cursor.number("I", f"{key}: value type")
        metadata[key] = (
            _read_array(cursor, key) if kind == ARRAY else _read_value(cursor, key, kind)
        )
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind == STRING:
        return cursor.string(key)
    if kind not in SCALARS:
        raise cursor.error(f"{key}: value type {kind} is not one of 0 to 12")
    return cursor.number(SCALARS[kind], key)


def _read_array(cursor: _Cursor, key: str) -> list[Any]:
    kind = cursor.number("I", f"{key}: element type")
    if kind == ARRAY:
        raise cursor.error(f"{key}: an array of arrays; nested arrays are not supported")
    if kind != STRING and kind not in SCALARS:
        raise cursor.error(f"{key}: element type {kind} is not one of 0 to 12")
    size = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind])
    count = cursor.count(f"{key}: element count", size, cursor.elements)
    cursor.elements -= count
    if kind == STRING:
        return [cursor.string(f"{key}[{i}]") for i in range(count)]
    return list(struct.unpack(f"<{count}{SCALARS[kind]}", cursor.take(count * size, key)))


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    valid = type(value) is int and 8 <= value <= MAX_ALIGNMENT and not value & (value - 1)
    if not valid:
        raise cursor.error(
            f"general.alignment is {value!r}, expected a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return value


def _read_records(cursor: _Cursor, count: int, alignment: int) -> list[_Record]:
    records: dict[str, _Record] = {}
    for i in range(count):
        name = cursor.string(f"name of tensor {i}", MAX_NAME)
        if name in records:
            raise cursor.error(f"{name}: two tensors have this name")
        n_dims = cursor.number("I", f"{name}: number of dimensions")
        if not 1 <= n_dims <= MAX_DIMS:
            raise cursor.error(f"{name}: {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        dims = tuple(cursor.number("q", f"{name}: dimension {d}") for d in range(n_dims))
        if min(dims) < 1 or prod(dims) >= 1 << 62:
            raise cursor.error(f"{name}: impossible dimensions {list(dims)}")
        type_id = cursor.number("I", f"{name}: type")
        offset = cursor.number("Q", f"{name}: offset")
        if offset % alignment:
            raise cursor.error(f"{name}: offset {offset} is not a multiple of {alignment}")
        records[name] = _Record(name, dims, type_id, offset)
    return sorted(records.values(), key=lambda record: record.offset)


def _place(
    cursor: _Cursor, records: list[_Record], blob: int, alignment: int
) -> dict[str, TensorInfo]:
    """Resolve the types and demand that tensors follow each other with padding only between."""
    size = len(cursor.data)
    if records and records[0].offset != 0:
        raise cursor.error(f"{records[0].name}: the first tensor is at {records[0].offset}, not 0")
    types = _resolve_types(cursor, records, blob, alignment)
    tensors: dict[str, TensorInfo] = {}
    for i, (record, kind) in enumerate(zip(records, types, strict=True)):
        nbytes = _nbytes(cursor, record, kind)
        if blob + record.offset + nbytes > size:
            raise cursor.error(
                f"{record.name}: needs the file to have {blob + record.offset + nbytes} bytes, "
                f"it has {size}: the file is cut off"
            )
        found = _room(records, i, size - blob)
        last = i + 1 == len(records)
        if found != _aligned(nbytes, alignment) and not (last and found == nbytes):
            raise _misplaced(cursor, record, kind, nbytes, found, last)
        tensors[record.name] = TensorInfo(
            record.name, kind, record.dims, blob + record.offset, nbytes
        )
    return tensors


def _misplaced(
    cursor: _Cursor, record: _Record, kind: BlockType, nbytes: int, found: int, last: bool
) -> FormatError:
    what = f"{record.name} ({kind.name}, {list(record.dims[::-1])}) takes {nbytes} bytes"
    if last:
        return cursor.error(f"{what}, and {found} bytes are left in the file")
    return cursor.error(f"{what}, but the next tensor starts {found} bytes after it")


def _resolve_types(
    cursor: _Cursor, records: list[_Record], blob: int, alignment: int
) -> list[BlockType]:
    """The block type of each record; id 42 means groups of 64, or of 128 in older files.

    The two sizes of id 42 differ, so the distance to the next tensor tells which one it is. All
    tensors of a file must agree; small ones, where padding hides the difference, have no say.
    """
    for record in records:
        if record.type_id not in READABLE:
            raise UnsupportedModel(
                f"{cursor.path}: {record.name}: tensor type {record.type_id} is not supported; "
                f"supported: {supported_types()}"
            )
    votes: dict[bool, str] = {}
    for i, record in enumerate(records):
        if record.type_id == Q2_0_ID:
            legacy = _is_legacy(
                cursor, record, _room(records, i, len(cursor.data) - blob), alignment
            )
            if legacy is not None:
                votes.setdefault(legacy, record.name)
    if len(votes) == 2:
        raise cursor.error(
            f"{votes[False]} has groups of 64 weights and {votes[True]} has groups of 128, "
            f"both under type {Q2_0_ID}"
        )
    if not votes and any(record.type_id == Q2_0_ID for record in records):
        raise cursor.error(
            f"the tensors of type {Q2_0_ID} are too small to tell groups of 64 from groups of 128"
        )
    q2_0 = LEGACY_Q2_0 if True in votes else TYPES[Q2_0_ID]
    return [q2_0 if r.type_id == Q2_0_ID else READABLE[r.type_id] for r in records]


def _is_legacy(cursor: _Cursor, record: _Record, found: int, alignment: int) -> bool | None:
    """Whether a tensor of id 42 has groups of 128; None when both sizes fit."""
    columns, weights = record.dims[0], prod(record.dims)
    sizes = {}
    for kind in (TYPES[Q2_0_ID], LEGACY_Q2_0):
        if columns % kind.weights == 0:
            sizes[kind.weights] = weights // kind.weights * kind.nbytes
    fitting = [group for group, n in sizes.items() if found in (n, _aligned(n, alignment))]
    if len(fitting) == 2:
        return None
    if fitting:
        return fitting[0] == LEGACY_Q2_0.weights
    needs = "; ".join(f"group {group} needs {n}" for group, n in sizes.items())
    raise cursor.error(
        f"{record.name} (type {Q2_0_ID}, {list(record.dims[::-1])}): {found} bytes up to the next "
        f"tensor; {needs or f'rows of {columns} are not whole groups of 64'}"
    )


def _nbytes(cursor: _Cursor, record: _Record, kind: BlockType) -> int:
    if record.dims[0] % kind.weights:
        raise cursor.error(
            f"{record.name}: rows of {record.dims[0]} weights are not whole {kind.name} blocks "
            f"of {kind.weights}"
        )
    return prod(record.dims) // kind.weights * kind.nbytes + kind.tail


def _room(records: list[_Record], i: int, blob_size: int) -> int:
    """Bytes from the start of tensor i to the next one, or to the end of the file."""
    end = records[i + 1].offset if i + 1 < len(records) else blob_size
    return end - records[i].offset


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _listed(values: tuple[int, ...]) -> str:
    return " and ".join(map(str, values))
