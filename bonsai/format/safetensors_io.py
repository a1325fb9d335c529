"""A safetensors file, checked completely when it is opened, its tensors mapped read-only.

Knows the container: header, dtypes, offsets. Does not know packings or models, so the converter
reads foreign folders with it too. Stricter than most readers: see docs/format.md.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bonsai.errors import FormatError, UnsupportedModel
from bonsai.format.files import AGAIN, refuse_impostor, size_of
from bonsai.format.strict_json import parse_object

__all__ = ["DTYPES", "MAX_HEADER", "Mapped", "SafetensorsFile", "TensorInfo"]

MAX_HEADER = 4 << 20  # bytes: room for as many tensors as `strict_json.MAX_MARKS` allows
MAX_DIMS = 8
MAX_NAME = 512

# bf16 and the 8-bit floats are bits: NumPy has no such types.
DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` is absolute in `file`; `dtype` is a name of safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class Mapped:
    """Tensors in one memory-mapped file. Subclasses say where they lie."""

    dtypes: Mapping[str, np.dtype] = DTYPES

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo], map_: mmap.mmap) -> None:
        self.path = path
        self._infos = dict(infos)
        self._map: mmap.mmap | None = map_
        self._real = os.path.abspath(path)
        self._stamp = _stamp(self._real)

    def names(self) -> list[str]:
        """All tensors, in the order of their bytes."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Raises FormatError when there is no such tensor."""
        if name not in self._infos:
            raise FormatError(f"{self.path}: there is no tensor '{name}'")
        return self._infos[name]

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the file; bf16 as uint16, 8-bit floats as uint8."""
        info = self.info(name)
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        dtype = self.dtypes[info.dtype]
        flat = np.frombuffer(self._map, dtype, info.nbytes // dtype.itemsize, info.offset)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Tell the system that the pages of a tensor may leave memory; they come back when read."""
        info = self.info(name)
        # Whole pages only: a page shared with a neighbour stays.
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._advise("MADV_DONTNEED", start, stop)

    def prefetch(self, name: str) -> None:
        """Ask the system to read the pages of a tensor soon; returns at once."""
        info = self.info(name)
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._advise("MADV_WILLNEED", start, info.offset + info.nbytes)

    def check(self) -> None:
        """Raises FormatError where the file was written to or cut short since it was opened.

        One that was deleted, or replaced by another, still has its bytes as long as it is mapped.
        """
        now = _stamp(self._real)
        if now != self._stamp and now[:1] == self._stamp[:1]:
            raise FormatError(
                f"{self.path}: the file was changed while it was in use: "
                f"{self._stamp[1]} bytes when it was opened, {now[1]} now",
                hint="load the model again; copy a new one beside the old one, not over it",
            )

    def _advise(self, advice: str, start: int, stop: int) -> None:
        """Nothing where the system has no such advice, or the file is closed."""
        value = getattr(mmap, advice, None)
        if value is not None and self._map is not None and stop > start:
            self._map.madvise(value, start, stop - start)

    def close(self) -> None:
        """Close the file. Arrays that are still held keep the mapping alive until they go."""
        map_, self._map = self._map, None
        if map_ is not None:
            try:
                map_.close()
            except BufferError:
                pass


class SafetensorsFile(Mapped):
    """One .safetensors file. `metadata` is its `__metadata__`."""

    bf16: tuple[str, ...] = ("BF16",)

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        size = size_of(path)
        header, start = _read_header(path, size)
        self.metadata = _metadata(path, header.pop("__metadata__", {}))
        infos = [_tensor(path, name, value, start) for name, value in header.items()]
        infos.sort(key=lambda info: info.offset)
        _check_layout(path, infos, start, size)
        super().__init__(path, {info.name: info for info in infos}, map_file(path))


def _stamp(path: str) -> tuple[int, ...]:
    """Identity, size and time of a file; nothing where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be mapped: {error}") from None


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """(the JSON header, offset of the first data byte)."""
    try:
        with open(path, "rb") as file:
            head = file.read(256)
            refuse_impostor(path, head)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 10 or head[8:9] != b"{":
                raise FormatError(
                    f"{path}: this is not a safetensors file (it starts with {head[:12]!r})",
                    hint=AGAIN,
                )
            if length > MAX_HEADER:
                raise FormatError(
                    f"{path}: the header claims {length} bytes, at most {MAX_HEADER} are accepted"
                )
            if 8 + length > size:
                raise FormatError(
                    f"{path}: truncated: the header ends at byte {8 + length}, "
                    f"the file has {size} bytes",
                    hint=AGAIN,
                )
            file.seek(8)
            data = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_object(data, f"{path}: header"), 8 + length


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise FormatError(f"{path}: header: '__metadata__' is not an object of strings")
    return value


def _tensor(path: Path, name: str, value: Any, start: int) -> TensorInfo:
    where = f"{path}: tensor {shown_name(name)}"
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise FormatError(f"{where}: a name has 1 to {MAX_NAME} printable characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModel(
            f"{where}: dtype {dtype!r:.40} is not supported; supported: {', '.join(DTYPES)}"
        )
    if not _whole_numbers(shape) or len(shape) > MAX_DIMS or 0 in shape:
        raise FormatError(
            f"{where}: shape {shape!r:.80} is not a list of at most {MAX_DIMS} positive integers"
        )
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where}: data_offsets {offsets!r:.80} are not [begin, end]")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise FormatError(
            f"{where}: {offsets[1] - offsets[0]} bytes in the file, "
            f"{dtype} {shape!r:.80} needs {nbytes}"
        )
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], nbytes, path)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_layout(path: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    """Tensors follow one another from the first data byte to the last byte of the file."""
    if not infos:
        raise FormatError(f"{path}: there are no tensors in it")
    position = start
    for info in infos:
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a gap"
            raise FormatError(
                f"{path}: tensor {shown_name(info.name)} begins at byte {info.offset - start} of "
                f"the data, expected {position - start}: it {kind}"
            )
        position += info.nbytes
    if position > size:
        raise FormatError(
            f"{path}: truncated: {size} bytes, the header describes {position}", hint=AGAIN
        )
    if position < size:
        raise FormatError(
            f"{path}: {size - position} bytes after the last tensor: {size} bytes, "
            f"the header describes {position}",
            hint=AGAIN,
        )


def shown_name(name: str) -> str:
    """A tensor name of any content, quoted, ASCII and short."""
    text = ascii(name)
    return text if len(text) <= 80 else text[:77] + "...'"
