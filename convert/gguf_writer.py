"""Writing GGUF 3: header and metadata, then one tensor after another as its rows come.

Knows the container (little-endian, aligned to 32 bytes). Does not know what keys or blocks mean.
The counterpart of `gguf`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bonsai.convert.blocks import BlockType
from bonsai.convert.gguf import ARRAY, MAGIC, STRING

__all__ = ["F32", "I32", "U32", "OutTensor", "Typed", "write_gguf"]

VERSION = 3
ALIGNMENT = 32
U32, I32, F32, BOOL = 4, 5, 6, 7
FORMATS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}


class Typed(NamedTuple):
    """A metadata value of a type that Python does not tell apart: U32, I32 or F32."""

    type: int
    value: Any


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write: its `shape` in the usual order, and its bytes, made as they are asked for.

    `data` yields uint8 arrays that are together the whole tensor.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    data: Iterable[np.ndarray] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.weights * self.type.nbytes


def write_gguf(
    file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[OutTensor]
) -> Iterable[OutTensor]:
    """Write a file; each tensor is yielded when it is written. Exhaust the iterator.

    Values are str, bool, `Typed`, or lists of one of these (int is I32; an empty list is of str).
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(value)
        parts += [_string(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        record = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        parts += [_string(tensor.name), record, struct.pack("<IQ", tensor.type.id, offset)]
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    head = b"".join(parts)
    file.write(head + bytes(-len(head) % ALIGNMENT))
    for tensor in tensors:
        written = 0
        for part in tensor.data:
            file.write(np.ascontiguousarray(part).data)
            written += part.nbytes
        assert written == tensor.nbytes, f"{tensor.name}: {written} of {tensor.nbytes} bytes"
        file.write(bytes(-written % ALIGNMENT))
        yield tensor


def _value(value: Any) -> tuple[int, bytes]:
    """(type, bytes) of a metadata value."""
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, bool):
        return BOOL, struct.pack(FORMATS[BOOL], value)
    if isinstance(value, Typed):
        return value.type, struct.pack(FORMATS[value.type], value.value)
    items = [Typed(I32, v) if type(v) is int else v for v in value]
    kind = _value(items[0])[0] if items else STRING
    data = b"".join(_value(item)[1] for item in items)
    return ARRAY, struct.pack("<IQ", kind, len(items)) + data


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
