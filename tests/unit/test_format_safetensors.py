"""The safetensors reader: good files exactly, hostile ones with one error, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import mutate
import numpy as np
import pytest

from bonsai.errors import BonsaiError, FormatError, UnsupportedModel
from bonsai.format.safetensors_io import DTYPES, MAX_HEADER, SafetensorsFile
from bonsai.format.strict_json import MAX_DEPTH, MAX_MARKS, parse_object

W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
DATA = np.arange(6, dtype="<f4").tobytes()


def write(path: Path, header: dict | bytes, data: bytes = DATA, length: int | None = None) -> Path:
    return mutate.safetensors(path / "model.safetensors", header, data, length)


def refused(path: Path) -> BonsaiError:
    """The error of opening a file; it names the file, costs little, and has no cause to show."""
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, UnsupportedModel)) as info:
            SafetensorsFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50e6, peak
    assert str(path) in str(info.value) and len(str(info.value)) < 600 + len(str(path))
    assert info.value.__suppress_context__ or info.value.__context__ is None
    return info.value


def test_tensors_are_read_only_views_in_file_order(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
        "w": W,
        "scalar": {"dtype": "I8", "shape": [], "data_offsets": [30, 31]},
    }
    path = write(tmp_path, header, DATA + bytes.fromhex("803f00c0003f") + b"\xff")
    file = SafetensorsFile(path)
    assert file.names() == ["w", "b", "scalar"]
    assert file.metadata == {"format": "pt"}
    assert file.array("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.array("b").dtype == np.uint16 and file.array("b").tolist() == [
        0x3F80,
        0xC000,
        0x3F00,
    ]
    assert file.array("scalar").shape == () and file.array("scalar") == -1
    assert not file.array("w").flags.writeable
    assert str(file.info("w")) == "F32 [2, 3]" and file.info("b").nbytes == 6
    with pytest.raises(FormatError, match="there is no tensor 'x'"):
        file.info("x")


def test_arrays_outlive_the_file_and_nothing_is_read_after_close(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path, {"w": W}))
    values = file.array("w")
    file.close()
    file.close()
    assert values.sum() == 15
    with pytest.raises(ValueError, match="closed"):
        file.array("w")


def test_release_keeps_the_values(tmp_path: Path) -> None:
    count = 1 << 16
    header = {
        "a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]},
        "w": {"dtype": "U8", "shape": [count], "data_offsets": [100, 100 + count]},
    }
    file = SafetensorsFile(write(tmp_path, header, bytes(100) + b"\x07" * count))
    values = file.array("w")
    assert (values == 7).all()
    file.release("w")
    file.release("a")
    assert (values == 7).all()
    file.close()
    file.release("w")


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    size = 3 * DTYPES[name].itemsize
    header = {"w": {"dtype": name, "shape": [3], "data_offsets": [0, size]}}
    array = SafetensorsFile(write(tmp_path, header, bytes(size))).array("w")
    assert array.shape == (3,) and array.dtype == DTYPES[name]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data_offsets": [24, 0]}, ["'w'", "[24, 0]"]),
        ({"data_offsets": [0, 48], "shape": [4, 3]}, ["truncated", "describes"]),
        ({"data_offsets": [-4, 20]}, ["'w'", "[-4, 20]"]),
        ({"data_offsets": [0, 2**64]}, ["'w'", str(2**64), "24"]),
        ({"data_offsets": [0]}, ["'w'", "[0]"]),
        ({"data_offsets": [0, 24.0]}, ["'w'", "24.0"]),
        ({"data_offsets": [False, 24]}, ["'w'", "False"]),
        ({"data_offsets": "0,24"}, ["'w'", "0,24"]),
        ({"data_offsets": [4, 28]}, ["'w'", "byte 4", "expected 0", "gap"]),
        ({"shape": [2, 4]}, ["'w'", "24 bytes", "needs 32"]),
        ({"shape": [2, 0]}, ["'w'", "[2, 0]"]),
        ({"shape": [-2, -3]}, ["'w'", "[-2, -3]"]),
        ({"shape": [2.0, 3]}, ["'w'", "[2.0, 3]"]),
        ({"shape": [True, 6]}, ["'w'", "True"]),
        ({"shape": 6}, ["'w'", "shape 6"]),
        ({"shape": [1] * 9}, ["'w'", "at most 8"]),
        ({"shape": [2**33, 2**33]}, ["'w'", "24 bytes", str(2**68)]),
        ({"shape": [2**63, 2, 3]}, ["'w'", "24 bytes"]),
        ({"dtype": "F4"}, ["'w'", "'F4'", "supported: BOOL, U8"]),
        ({"dtype": None}, ["'w'", "None"]),
        ({"dtype": ["F32"]}, ["'w'", "['F32']"]),
        ({"extra": 1}, ["'w'", "exactly dtype, shape and data_offsets"]),
    ],
)
def test_a_bad_entry_is_refused_by_name(tmp_path: Path, change: dict, expected: list) -> None:
    text = str(refused(write(tmp_path, {"w": W | change})))
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"w": W, "v": W}, ["byte 0", "expected 24", "overlaps"]),
        ({"w": W, "v": W | {"data_offsets": [23, 47]}}, ["'v'", "byte 23", "overlaps"]),
        ({"w": W, "v": W | {"data_offsets": [28, 52]}}, ["'v'", "byte 28", "gap"]),
        ({"w": [1]}, ["'w'", "exactly"]),
        ({"w": None}, ["'w'", "exactly"]),
        ({}, ["no tensors"]),
        ({"__metadata__": {"a": 1}, "w": W}, ["__metadata__", "strings"]),
        ({"__metadata__": 3, "w": W}, ["__metadata__"]),
        ({"a\0b": W}, ["'a\\x00b'", "printable"]),
        ({"a\nb": W}, ["'a\\nb'", "printable"]),
        ({"\ud800": W}, ["\\ud800", "printable"]),
        ({"": W}, ["''", "1 to 512"]),
        ({"x" * 600: W}, ["1 to 512"]),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: dict, expected: list) -> None:
    text = str(refused(write(tmp_path, header, DATA * 2)))
    for part in expected:
        assert part in text


ENTRY = json.dumps(W).encode()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b'{"w":' + ENTRY + b',"w":' + ENTRY + b"}", "'w' appears twice"),
        (b'{"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', "appears twice"),
        (b'{"w":' * 10_000 + b"1" + b"}" * 10_000, f"nested more than {MAX_DEPTH}"),
        (b'{"w":' + b"[" * 10_000 + b"]" * 10_000 + b"}", f"nested more than {MAX_DEPTH}"),
        (b'{"w":' + b"[" * 200_000, f"nested more than {MAX_DEPTH}"),
        (b'{"' + b'\\"' * 1_000_000, "not valid JSON"),
        (b'{"w":' + b'"' * 1_000_001, "not valid JSON"),
        (b'{"w": NaN}', "NaN"),
        (b'{"w": Infinity}', "Infinity"),
        (b'{"w": ' + b"9" * 1_000_000 + b"}", "1000000 digits"),
        (b'{"w": 1', "not valid JSON"),
        (b"{'w': 1}", "not valid JSON"),
        (b'{"w\xff": 1}', "not UTF-8 text (byte 3)"),
        (b"[1]", "not a safetensors file"),
        (b" {}", "not a safetensors file"),
    ],
)
def test_hostile_json_is_refused(tmp_path: Path, header: bytes, expected: str) -> None:
    assert expected in str(refused(write(tmp_path, header)))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (2**64 - 1, f"{2**64 - 1} bytes, at most {MAX_HEADER}"),
        (101_000_000, f"101000000 bytes, at most {MAX_HEADER}"),
        (MAX_HEADER, "truncated: the header ends at byte"),
        (10_000, "truncated: the header ends at byte 10008, the file has"),
        (0, "not valid JSON"),
    ],
)
def test_a_false_header_length_is_refused(tmp_path: Path, length: int, expected: str) -> None:
    assert expected in str(refused(write(tmp_path, {"w": W}, length=length)))


def test_a_header_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": W}, length=200_000_000)
    with open(path, "r+b") as file:
        file.truncate(300_000_000)
    assert f"200000000 bytes, at most {MAX_HEADER}" in str(refused(path))


def test_the_largest_header_is_parsed(tmp_path: Path) -> None:
    text = json.dumps({"w": W}).encode().ljust(MAX_HEADER)
    assert SafetensorsFile(write(tmp_path, text)).names() == ["w"]


@pytest.mark.parametrize(
    "entry",
    [b'"%d":0', b'"%d":{}', b'"%d":[]', b'"%d":""', b'"%d":{"dtype":"U8"}'],
    ids=["number", "object", "list", "text", "tensor"],
)
def test_more_entries_than_a_model_has_are_refused_before_they_are_parsed(
    tmp_path: Path, entry: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("bonsai.format.strict_json.json.loads", parse)
    text = b"{" + b",".join(entry % i for i in range(MAX_MARKS // 2 + 1)) + b"}"
    assert len(text) < MAX_HEADER
    error = refused(write(tmp_path, text))
    assert "keys and values" in str(error) and f"at most {MAX_MARKS} are" in str(error)


def test_as_many_entries_as_are_accepted_take_little_memory(tmp_path: Path) -> None:
    text = b"{" + b",".join(b'"%d":0' % i for i in range(MAX_MARKS // 2 - 1)) + b"}"
    assert "exactly dtype, shape" in str(refused(write(tmp_path, text)))
    text = b'{"a":[' + b",".join(b'"ab"' for _ in range(MAX_MARKS - 10)) + b"]}"
    assert "exactly dtype, shape" in str(refused(write(tmp_path, text)))


def test_twenty_thousand_matrices_and_metadata_open(tmp_path: Path) -> None:
    """With long names, and with commas and brackets in the metadata, which do not count."""
    name = "language_model.model.layers.{}.self_attn.q_proj.weight"
    header = {
        name.format(i): {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]}
        for i in range(20_000)
    }
    header = {"__metadata__": {"notes": "[{,:}]" * 100_000}, **header}
    assert len(SafetensorsFile(write(tmp_path, header, bytes(20_000))).names()) == 20_000


@pytest.mark.parametrize("count", [1, 10, 23, 24, 25, 60, 100])
def test_every_cut_is_refused_with_both_sizes(tmp_path: Path, count: int) -> None:
    path = write(tmp_path, {"w": W})
    size = path.stat().st_size
    mutate.cut(path, count)
    text = str(refused(path))
    if size - count >= 10:
        assert "truncated" in text and str(size - count) in text


def test_trailing_bytes_are_refused_with_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": W})
    size = path.stat().st_size
    mutate.pad(path)
    text = str(refused(path))
    assert "7 bytes after the last tensor" in text
    assert f"{size + 7} bytes" in text and f"describes {size}" in text


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file is empty"),
        (POINTER, "looks like a git-LFS pointer"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "a web page"),
        (b"\n\n<html>Not found</html>", "a web page"),
        (b"GGUF\x03\0\0\0" + bytes(100), "not a safetensors file (it starts with b'GGUF"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
        (b"abc", "not a safetensors file"),
        (bytes(1000), "not a safetensors file"),
    ],
)
def test_other_things_are_told_apart(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    error = refused(path)
    assert expected in str(error) and error.hint


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none.safetensors: the file is missing"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(FormatError, match="the file is missing"):
        SafetensorsFile(tmp_path)


def test_no_flipped_header_byte_breaks_more_than_the_file(tmp_path: Path) -> None:
    """Whatever one byte of a header becomes, the file opens or is refused with our error."""
    good = write(tmp_path, {"w": W, "v": W | {"data_offsets": [24, 48]}}, DATA * 2).read_bytes()
    length = int.from_bytes(good[:8], "little")
    path = tmp_path / "flipped.safetensors"
    opened = 0
    for offset in range(8 + length):
        for mask in (1, 0x10, 0x80):
            data = bytearray(good)
            data[offset] ^= mask
            path.write_bytes(bytes(data))
            try:
                SafetensorsFile(path).close()
                opened += 1
            except BonsaiError as error:
                assert str(path) in str(error)
    assert 0 < opened < length  # names and letters of dtypes may change


def test_brackets_and_quotes_in_strings_do_not_count_as_nesting() -> None:
    value = {"a": '[{"' * 1000 + "\\", "b": "\\\\", "c": ["]]}}\\"]}
    assert parse_object(json.dumps(value).encode(), "x") == value
    deep = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(deep, "x")
    with pytest.raises(FormatError, match="nested"):
        parse_object(b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "x")


def test_the_library_reads_ours_and_we_read_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.standard_normal((5, 7)).astype(np.float32),
        "b": rng.integers(0, 255, (3,), dtype=np.uint8),
        "c.d": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "e": rng.integers(0, 2**32, (4, 4), dtype=np.uint32),
    }
    path = tmp_path / "theirs.safetensors"
    library.save_file(tensors, path, metadata={"format": "np"})
    file = SafetensorsFile(path)
    assert sorted(file.names()) == sorted(tensors) and file.metadata == {"format": "np"}
    for name, values in tensors.items():
        assert np.array_equal(file.array(name), values)
        assert file.array(name).dtype == values.dtype
