"""An uncompressed .npz file, its arrays mapped read-only where they lie in it.

Knows zip members and npy headers, as far as plain arrays need them: no pickles, no compression,
nothing evaluated. Does not know packings.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import zipfile
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bonsai.errors import FormatError
from bonsai.format.files import AGAIN, refuse_impostor, size_of
from bonsai.format.safetensors_io import (
    DTYPES,
    MAX_DIMS,
    MAX_NAME,
    Mapped,
    TensorInfo,
    map_file,
    shown_name,
)

__all__ = ["NpzFile"]

MAX_DIRECTORY = 2 << 20  # bytes, 10,000 planes; a hostile one of 45,000 members costs 30 MB to read
LOCAL_HEADER = 30
END_RECORD, ZIP64_LOCATOR, ZIP64_RECORD = 22, 20, 56
MAX_NPY_HEADER = 4096  # bytes; those of plain arrays have 118
_NPY = re.compile(
    rb"\{'descr': '([^'\\]{1,16})', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]{0,200})\), \} *\n"
)
_NAMES = {
    dtype.str: name for name, dtype in DTYPES.items() if name not in ("BF16", "F8_E4M3", "F8_E5M2")
}
# NumPy writes bf16 arrays of ml_dtypes as two-byte voids.
_NAMES |= {"<V2": "V2", "|V2": "V2"}
_ZIP_ERRORS: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, struct.error),
    *(NotImplementedError, OSError, ValueError, OverflowError, EOFError, LookupError),
)


class NpzFile(Mapped):
    """One .npz file. bf16 is stored as uint16 (or as NumPy's "V2"); only the manifest tells."""

    bf16: tuple[str, ...] = ("U16", "V2")
    dtypes = MappingProxyType({**DTYPES, "V2": np.dtype("<u2")})

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        size = size_of(path)
        members = _members(path, size)
        map_ = map_file(path)
        try:
            infos = [_array(path, map_, member) for member in members]
            infos.sort(key=lambda info: info.offset)
            for before, after in pairwise(infos):
                if before.offset + before.nbytes > after.offset:
                    raise FormatError(
                        f"{path}: {shown_name(after.name)} overlaps {shown_name(before.name)}"
                    )
        except BaseException:
            map_.close()
            raise
        super().__init__(path, {info.name: info for info in infos}, map_)


def _members(path: Path, size: int) -> list[zipfile.ZipInfo]:
    """The central directory, if it is that of a complete archive with unique names."""
    try:
        with open(path, "rb") as file:
            refuse_impostor(path, file.read(256))
            file.seek(max(size - END_RECORD - ZIP64_LOCATOR - ZIP64_RECORD, 0))
            end = file.read()
            if end[-END_RECORD:][:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
                raise FormatError(
                    f"{path}: {size} bytes that do not end like an .npz file: truncated, "
                    "or something follows it",
                    hint=AGAIN,
                )
            listed = _directory_bytes(end)
            if listed > MAX_DIRECTORY:
                raise FormatError(
                    f"{path}: its directory has {listed} bytes, at most {MAX_DIRECTORY} are read"
                )
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
    except _ZIP_ERRORS as error:
        raise FormatError(f"{path}: not an .npz file: {error}", hint=AGAIN) from None
    names = {member.filename for member in members}
    if not members or len(names) != len(members):
        raise FormatError(f"{path}: {len(members)} members with {len(names)} names")
    return members


def _directory_bytes(end: bytes) -> int:
    """The size of the central directory, by the records at the end of the file."""
    locator = end[-END_RECORD - ZIP64_LOCATOR :]
    if locator[:4] == b"PK\x06\x07" and end[:4] == b"PK\x06\x06":
        return int.from_bytes(end[40:48], "little")
    return int.from_bytes(end[12 - END_RECORD :][:4], "little")


def _array(path: Path, data: mmap.mmap, member: zipfile.ZipInfo) -> TensorInfo:
    """Where the array of a stored member lies; `data` is the whole file."""
    name = member.filename.removesuffix(".npy")
    where = f"{path}: {shown_name(member.filename)}"
    if (
        member.filename != member.orig_filename
        or name == member.filename
        or not name.isprintable()
        or not 0 < len(name) <= MAX_NAME
    ):
        raise FormatError(f"{where}: not the name of an array (NAME.npy)")
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise FormatError(
            f"{where}: compressed or encrypted; only stored arrays can be mapped",
            hint="write it with numpy.savez, not savez_compressed; or convert the model again",
        )
    start = _data_offset(where, data, member)
    stop = start + member.file_size
    if member.compress_size != member.file_size or stop > len(data):
        raise FormatError(
            f"{where}: ends at byte {stop}, the file has {len(data)} bytes", hint=AGAIN
        )
    dtype, shape, header = _read_npy(where, bytes(data[start : min(start + MAX_NPY_HEADER, stop)]))
    nbytes = math.prod(shape) * NpzFile.dtypes[dtype].itemsize
    if header + nbytes != member.file_size:
        raise FormatError(
            f"{where}: {member.file_size - header} bytes in the file, {dtype} "
            f"{list(shape)} needs {nbytes}"
        )
    return TensorInfo(name, dtype, shape, start + header, nbytes, path)


def _data_offset(where: str, data: mmap.mmap, member: zipfile.ZipInfo) -> int:
    """The byte after a member's local header."""
    begin = member.header_offset
    local = bytes(data[begin : begin + LOCAL_HEADER]) if 0 <= begin < len(data) else b""
    if len(local) < LOCAL_HEADER or local[:4] != b"PK\x03\x04":
        raise FormatError(f"{where}: its local header is not at byte {begin}", hint=AGAIN)
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    name = bytes(data[begin + LOCAL_HEADER : begin + LOCAL_HEADER + name_length])
    if name != member.orig_filename.encode("utf-8", "replace"):
        raise FormatError(f"{where}: its local header is that of {ascii(name)[:80]}", hint=AGAIN)
    return begin + LOCAL_HEADER + int(name_length) + int(extra_length)


def _read_npy(where: str, head: bytes) -> tuple[str, tuple[int, ...], int]:
    """(dtype, shape, bytes before the data) from the start of an npy member, evaluating nothing."""
    version = head[6:8]
    if head[:6] != b"\x93NUMPY" or version not in (b"\1\0", b"\2\0", b"\3\0"):
        raise FormatError(f"{where}: not an npy array (it starts with {head[:8]!r})")
    start = 10 if version == b"\1\0" else 12
    length = start + int.from_bytes(head[8:start], "little")
    match = _NPY.fullmatch(head[start:length]) if length <= len(head) else None
    if match is None:
        raise FormatError(f"{where}: not a plain array: its header is {head[start : start + 60]!r}")
    descr = match[1].decode("latin-1")
    if descr.endswith("O"):
        raise FormatError(
            f"{where}: an array of Python objects, which only a pickle can hold; refused",
            hint="pickles can run code when they are read; do not load this file elsewhere either",
        )
    if descr not in _NAMES or match[2] == b"True":
        raise FormatError(
            f"{where}: dtype {descr!a}, Fortran order {match[2].decode()}: not supported"
        )
    parts = [part.strip() for part in match[3].decode().split(",")]
    sizes = parts[:-1] if parts[-1] == "" else parts
    if len(sizes) > MAX_DIMS or not all(re.fullmatch(r"[1-9]\d{0,15}", size) for size in sizes):
        raise FormatError(
            f"{where}: shape ({match[3].decode()}) is not at most {MAX_DIMS} positive sizes"
        )
    return _NAMES[descr], tuple(map(int, sizes)), length
