"""Writing tensors to disk one after another: safetensors shards, or one npz file.

Knows headers, padding and alignment. Does not know packings or the manifest. Nothing is kept in
memory but names: a header is reserved at the start of a shard and filled in when it is complete.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from bonsai.format.checkpoint import NPZ
from bonsai.format.planes import ALIGNMENT
from bonsai.format.safetensors_io import DTYPES
from bonsai.format.shards import INDEX, SINGLE

__all__ = ["NpzSink", "SafetensorsSink", "Sink", "sync"]

# Room for about 2,500 tensors; the next shard begins when it is used up.
RESERVED = 256 << 10
ENTRY = 200  # more bytes than an entry of any dtype, shape and offsets takes beside its name
CHUNK = 16 << 20  # bytes per write; also how long an interrupt may wait
ZIP_LOCAL = 30 + 20  # a local header without name and padding: fixed part and zip64 sizes
ZIP_PADDING_ID = 0x4250  # of an extra field that readers skip


class Sink(Protocol):
    """Takes arrays; `finish` returns the names of the files that it made."""

    def add(self, name: str, dtype: str, values: np.ndarray) -> None: ...

    def finish(self) -> list[str]: ...

    def close(self) -> None: ...


class SafetensorsSink:
    """model.safetensors, or shards of at most `shard_bytes` (or one tensor) and an index."""

    def __init__(self, folder: Path, shard_bytes: int | None) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._pads = 0
        self._shards: list[dict[str, dict[str, Any]]] = []
        self._file: BinaryIO | None = None
        self._size = 0  # data bytes in the current shard
        self._header = 0  # bytes of its header so far

    def add(self, name: str, dtype: str, values: np.ndarray) -> None:
        """Append one array, at a multiple of 64 bytes in its file."""
        data = np.ascontiguousarray(values, dtype=DTYPES[dtype])
        if self._file is None or self._full(name, data):
            self._next_shard()
        missing = -self._size % ALIGNMENT
        if missing:
            self._write(f"_pad.{self._pads}", "U8", np.zeros(missing, np.uint8))
            self._pads += 1
        self._write(name, dtype, data)

    def finish(self) -> list[str]:
        """Complete the last shard; name the shards and write the index if there are several."""
        self._end_shard()
        count = len(self._shards)
        if count == 1:
            os.replace(self._folder / _partial(0), self._folder / SINGLE)
            return [SINGLE]
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        places = {}
        for i, name in enumerate(names):
            os.replace(self._folder / _partial(i), self._folder / name)
            places.update(dict.fromkeys(self._shards[i], name))
        total = sum(entry["data_offsets"][1] for entry in map(_last, self._shards))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        with open(self._folder / INDEX, "wb") as file:
            file.write(json.dumps(index, indent=1).encode())
            sync(file)
        return [*names, INDEX]

    def close(self) -> None:
        """Let go of the open file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(
                OSError
            ):  # a flush that fails; whoever needs the bytes synced them before
                file.close()

    def _full(self, name: str, data: np.ndarray) -> bool:
        # Two entries to come: the tensor and its padding; and 64 bytes around all of them.
        too_long = self._header + len(name) + 2 * ENTRY > RESERVED - 64
        too_big = self._limit is not None and self._size + data.nbytes > self._limit
        return too_long or (too_big and self._size > 0)

    def _next_shard(self) -> None:
        self._end_shard()
        self._file = open(self._folder / _partial(len(self._shards)), "wb")
        self._shards.append({})
        self._size = self._header = 0
        self._file.write(bytes(RESERVED))

    def _write(self, name: str, dtype: str, data: np.ndarray) -> None:
        assert self._file is not None
        for chunk in _chunks(data):
            self._file.write(chunk)
        end = self._size + data.nbytes
        entry = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [self._size, end]}
        self._shards[-1][name] = entry
        self._header += len(_compact({name: entry}))
        self._size = end

    def _end_shard(self) -> None:
        file = self._file
        if file is None:
            return
        header = {"__metadata__": {"format": "bonsai"}, **self._shards[-1]}
        text = _compact(header).encode()
        size = RESERVED - 8
        assert len(text) <= size
        file.seek(0)
        file.write(size.to_bytes(8, "little") + text.ljust(size))
        sync(file)
        self.close()


class NpzSink:
    """model.npz: stored members, aligned with an extra field, that `numpy.load` opens."""

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = open(folder / NPZ, "wb")
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def add(self, name: str, dtype: str, values: np.ndarray) -> None:
        """Append one array whose data begin at a multiple of 64 bytes; bf16 as uint16."""
        data = np.ascontiguousarray(values, dtype=DTYPES[dtype])
        member = zipfile.ZipInfo(f"{name}.npy")
        used = self._file.tell() + ZIP_LOCAL + len(member.filename) + 4
        missing = -used % ALIGNMENT
        member.extra = ZIP_PADDING_ID.to_bytes(2, "little") + missing.to_bytes(2, "little")
        member.extra += bytes(missing)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": data.dtype.str, "fortran_order": False, "shape": data.shape}
        )
        with self._archive.open(member, "w", force_zip64=True) as out:
            out.write(header.getvalue())
            for chunk in _chunks(data):
                out.write(chunk)

    def finish(self) -> list[str]:
        self._archive.close()
        sync(self._file)
        self._file.close()
        return [NPZ]

    def close(self) -> None:
        """Let go of the open file."""
        # The archive ends with a directory even when it is abandoned; that may fail as writing did.
        with suppress(OSError, ValueError):
            self._archive.close()
        with suppress(OSError):
            self._file.close()


def sync(file: BinaryIO) -> None:
    """Everything written so far is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _partial(shard: int) -> str:
    return f"shard-{shard}.partial"


def _last(shard: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return list(shard.values())[-1]


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _chunks(data: np.ndarray) -> Iterator[memoryview]:
    flat = data.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK].data
