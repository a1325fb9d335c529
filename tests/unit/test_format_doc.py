"""docs/format.md says what the code does, as far as a table can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bonsai import affine, ternary
from bonsai.format import TensorEntry, containers, safetensors_io, strict_json, verification
from bonsai.format.manifest import groups
from bonsai.format.planes import ALIGNMENT, planes

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
VECTORS = re.findall(
    r"^\| (t2|t5|b1|q4) \| (\d+) \| .*?(\d+)\]?(?:, 0 as \+1)? \| `(\w+)` \|$", TEXT, re.M
)
PLANES = re.findall(
    r"^\| (\w\w) \| ([\d ]+) \| (\w+) \[out, ([\w /]+)\] \| F16 \[out, G\] \|", TEXT, re.M
)


def test_the_tables_are_found() -> None:
    assert len(VECTORS) == 6 and len(PLANES) == 5


@pytest.mark.parametrize(("packing", "group", "last", "expected"), VECTORS)
def test_vectors_are_what_we_pack(packing: str, group: str, last: str, expected: str) -> None:
    k = np.arange(int(last) + 1)[None]
    if packing == "q4":
        assert affine.pack(k % 16, "q4", int(group)).tobytes().hex() == expected
        return
    trits = k % 3 - 1
    if packing == "b1":
        trits = np.where(trits == 0, 1, trits)
    assert ternary.pack(trits, packing, int(group)).tobytes().hex() == expected


@pytest.mark.parametrize(("packing", "sizes", "dtype", "width"), PLANES)
def test_planes_are_what_we_store(packing: str, sizes: str, dtype: str, width: str) -> None:
    assert tuple(map(int, sizes.split())) == groups(packing)
    for group in groups(packing):
        found = planes("w", TensorEntry(packing, (5, 300), group))
        columns = ternary.padded(300, group)
        factor, _, divisor = width.replace("K", str(columns)).partition(" / ")
        units = int(np.prod([int(part) for part in factor.split()])) // int(divisor or 1)
        assert found["w.codes"] == (dtype, (5, units))
        assert found["w.scales"] == ("F16", (5, columns // group))
        assert ("w.biases" in found) == (packing in affine.BITS)


def test_numbers_are_those_of_the_code() -> None:
    flat = " ".join(TEXT.split())
    for words in (
        f"N is at most {safetensors_io.MAX_HEADER >> 20} MiB",
        f"at most {strict_json.MAX_MARKS:,} commas, colons and opening brackets outside strings",
        f"nests at most {strict_json.MAX_DEPTH} deep",
        f"more than {strict_json.MAX_DIGITS} digits",
        f"Names have 1 to {safetensors_io.MAX_NAME} printable characters",
        f"dtype is one of {' '.join(safetensors_io.DTYPES)}",
        f"at most {safetensors_io.MAX_DIMS} dimensions",
        f"the first {containers.RESERVED >> 10} KiB of a file",
        f"a multiple of {ALIGNMENT} bytes in its file",
        f"extra field (id 0x{containers.ZIP_PADDING_ID:x})",
        f"within {verification.PROOF_TOLERANCE:.0e} of the largest".replace("e-04", "e-4"),
    ):
        assert words in flat, words
