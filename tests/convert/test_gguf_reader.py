"""GGUF headers: good files placed exactly, hostile ones refused by field, in little memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import Tensor, dense, encode, header, record, string, ternary, value, write

from bonsai.convert.gguf import MAX_ELEMENTS, MAX_RECORDS, read_gguf
from bonsai.errors import BonsaiError, FormatError, UnsupportedModel

META = {"general.architecture": "llama", "a.list": [1, 2, 3], "a.words": ["x", "ü"], "a.f": 0.5}


def parsed(tmp_path: Path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def random_ternary(rows: int, columns: int, group: int, type_id: int | None = None) -> Tensor:
    rng = np.random.default_rng(rows + columns)
    trits = rng.integers(-1, 2, (rows, columns))
    return ternary(trits, rng.uniform(0.1, 2, (rows, columns // group)), group, type_id)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(tmp_path, version):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {"a": dense(values), "b": dense(values[0], "F16"), "c": dense(values, "BF16")}
    file = parsed(tmp_path, encode(META, tensors, version=version))
    assert file.metadata == META
    assert file.tensors["a"].shape == (3, 4)
    assert np.array_equal(file.rows("a").view("<f4"), values)
    assert np.array_equal(file.rows("b").view("<f2"), values[:1])
    file.release("a")
    assert np.array_equal(file.rows("a").view("<f4"), values)


def test_every_scalar_type_is_read(tmp_path):
    kinds = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60000),
        3: ("h", -9),
        4: ("I", 2**31),
        5: ("i", -7),
    }
    kinds |= {6: ("f", 0.25), 7: ("?", True), 10: ("Q", 2**60), 11: ("q", -(2**60)), 12: ("d", 0.1)}
    body = b"".join(
        string(f"k{kind}") + struct.pack("<I", kind) + struct.pack("<" + code, item)
        for kind, (code, item) in kinds.items()
    )
    file = parsed(tmp_path, header(3, 0, len(kinds)) + body)
    assert file.metadata == {f"k{kind}": item for kind, (_, item) in kinds.items()}


def with_metadata(key: bytes, kind: int, data: bytes) -> bytes:
    return header(3, 0, 1) + key + struct.pack("<I", kind) + data


def with_record(*records: bytes, body: bytes = b"\0" * 4096) -> bytes:
    head = header(3, len(records), 0) + b"".join(records)
    return head + b"\0" * (-len(head) % 32) + body


ARRAY_OF_ARRAYS = struct.pack("<IQ", 9, 1) * 2000
HOSTILE = {
    "magic": (b"GGML" + header(3, 0, 0)[4:], "GGUF"),
    "version 1": (header(1, 0, 0), "version 1"),
    "version 99": (header(99, 0, 0), "version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut in the header": (header(3, 0, 0)[:20], "metadata count"),
    "tensor count 2^63": (header(3, 2**63, 0), "tensor count"),
    "tensor count 2^32": (header(3, 2**32, 0), "tensor count"),
    "metadata count 2^64-1": (header(3, 0, 2**64 - 1), "metadata count"),
    "key of 1 GiB": (with_metadata(struct.pack("<Q", 2**30), 4, b"\0" * 9), "metadata key 0"),
    "key of 2^64-1": (with_metadata(struct.pack("<Q", 2**64 - 1), 4, b"\0" * 9), "metadata key 0"),
    "key not UTF-8": (with_metadata(string(b"\xff\xfe"), 4, b"\0" * 4), "UTF-8"),
    "value type 13": (with_metadata(string("key"), 13, b"\0" * 8), "key: value type 13"),
    "string beyond the file": (
        with_metadata(string("key"), 8, struct.pack("<Q", 1000)), "key: needs 1000 bytes"
    ),
    "string of 2^63": (with_metadata(string("key"), 8, struct.pack("<Q", 2**63)), "key: a string"),
    "array of 2^60": (
        with_metadata(string("key"), 9, struct.pack("<IQ", 4, 2**60)), "key: element count"
    ),
    "array of 2^60 strings": (
        with_metadata(string("key"), 9, struct.pack("<IQ", 8, 2**60)), "key: element count"
    ),
    "array of type 99": (
        with_metadata(string("key"), 9, struct.pack("<IQ", 99, 1)), "key: element type 99"
    ),
    "nested arrays": (with_metadata(string("key"), 9, ARRAY_OF_ARRAYS), "nested"),
    "a key twice": (
        header(3, 0, 2) + (string("key") + struct.pack("<II", 4, 1)) * 2, "'key' appears twice"
    ),
    "alignment 0": (encode({"general.alignment": 0}, {}), "general.alignment is 0"),
    "alignment 48": (encode({"general.alignment": 48}, {}), "general.alignment is 48"),
    "alignment 2^30": (
        encode({"general.alignment": 2**30}, {}, alignment=32), "general.alignment is 1073741824"
    ),
    "alignment a string": (encode({"general.alignment": "32"}, {}), "general.alignment is '32'"),
    "dimension 2^42+1": (with_record(record("t", (2**42 + 1, 1), 0, 0)), "t: needs"),
    "dimensions that wrap": (with_record(record("t", (2**62, 4), 0, 0)), "t: impossible"),
    "dimension 0": (with_record(record("t", (0, 4), 0, 0)), "t: impossible"),
    "dimension -1": (with_record(record("t", (-1, 4), 0, 0)), "t: impossible"),
    "no dimensions": (with_record(record("t", (), 0, 0)), "t: 0 dimensions"),
    "2^32-1 dimensions": (
        with_record(string("t") + struct.pack("<I", 2**32 - 1)), "t: 4294967295 dimensions"
    ),
    "5 dimensions": (with_record(record("t", (1,) * 5, 0, 0)), "t: 5 dimensions"),
    "name of 64 bytes": (with_record(record("n" * 64, (8,), 0, 0)), "name of tensor 0"),
    "a name twice": (
        with_record(record("t", (8,), 0, 0), record("t", (8,), 0, 32)), "t: two tensors"
    ),
    "offset 2^63": (with_record(record("t", (8,), 0, 2**63)), "t: the first tensor is at"),
    "offset 16": (with_record(record("t", (8,), 0, 16)), "t: offset 16 is not a multiple of 32"),
    "overlap": (
        with_record(record("a", (16,), 0, 0), record("b", (8,), 0, 32)),
        "a (F32, [16]) takes 64 bytes, but the next tensor starts 32",
    ),
    "a gap": (
        with_record(record("a", (8,), 0, 0), record("b", (8,), 0, 128)),
        "a (F32, [8]) takes 32 bytes, but the next tensor starts 128",
    ),
    "two at one place": (
        with_record(record("a", (8,), 0, 0), record("b", (8,), 0, 0)), "next tensor starts 0"
    ),
    "trailing bytes": (
        with_record(record("t", (8,), 0, 0), body=b"\0" * 39), "takes 32 bytes, and 39 bytes"
    ),
    "rows that split a block": (with_record(record("t", (100, 4), 8, 0)), "rows of 100 weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_in_little_memory(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "model.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises((FormatError, UnsupportedModel)) as caught:
        read_gguf(tmp_path / "model.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(caught.value)
    assert "model.gguf" in str(caught.value)
    assert peak < 50e6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(3, MAX_RECORDS + 1, 0), f"tensor count: {MAX_RECORDS + 1}, at most {MAX_RECORDS}"),
        (header(3, 0, MAX_RECORDS + 1), f"metadata count: {MAX_RECORDS + 1}, at most"),
        (
            header(3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, MAX_ELEMENTS + 1),
            f"k: element count: {MAX_ELEMENTS + 1}, at most {MAX_ELEMENTS}",
        ),
        (
            header(3, 0, 2)
            + string("a") + struct.pack("<IIQ", 9, 0, MAX_ELEMENTS - 5) + bytes(MAX_ELEMENTS - 5)
            + string("b") + struct.pack("<IIQ", 9, 0, 6),
            "b: element count: 6, at most 5",
        ),
    ],
    ids=["tensors", "metadata", "one array", "two arrays"],
)  # fmt: skip
def test_more_than_any_model_has_is_refused_unread(tmp_path, data, message):
    """Although the file has room for it."""
    (tmp_path / "model.gguf").write_bytes(data)
    with open(tmp_path / "model.gguf", "r+b") as file:
        file.truncate(64 << 20)
    with pytest.raises(FormatError, match=message):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_cut_file_is_refused_with_both_sizes(tmp_path, cut):
    data = encode(META, {"a": dense(np.ones((8, 64))), "b": dense(np.ones((8, 64)))})
    with pytest.raises(
        FormatError, match=rf"b: needs .* {len(data)} bytes, it has {len(data) - cut}"
    ):
        parsed(tmp_path, data[:-cut])


def test_every_cut_of_a_header_is_refused(tmp_path):
    data = encode(META, {"a": dense(np.ones((2, 8)))})
    for size in range(len(data)):
        with pytest.raises(BonsaiError):
            parsed(tmp_path, data[:size])


def test_last_tensor_may_lack_its_padding(tmp_path):
    data = encode({}, {"a": dense(np.ones(3))})
    assert parsed(tmp_path, data[:-20]).tensors["a"].nbytes == 12


@pytest.mark.parametrize("type_id", [255, 40, 39, 141, 2**32 - 1])
def test_unsupported_type_names_tensor_type_and_the_supported_ones(tmp_path, type_id):
    tensors = {"blk.0.attn_q.weight": Tensor((4, 256), type_id, b"\0" * 288)}
    with pytest.raises(UnsupportedModel) as caught:
        parsed(tmp_path, encode({}, tensors))
    for part in ("blk.0.attn_q.weight", f"type {type_id} ", "Q4_1 (3)", "PQ2_0 (142)"):
        assert part in str(caught.value)


def test_type_142_is_read(tmp_path):
    file = parsed(tmp_path, encode({}, {"t": random_ternary(4, 256, 128)}))
    assert file.tensors["t"].type.name == "PQ2_0"


@pytest.mark.parametrize(("group", "weights"), [(64, 64), (128, 128)])
def test_group_of_type_42_is_told_by_the_offsets(tmp_path, group, weights):
    tensors = {
        "a": random_ternary(16, 256, group, type_id=42),
        "small": random_ternary(1, 128, group, type_id=42),
        "z": random_ternary(16, 128, group, type_id=42),
    }
    file = parsed(tmp_path, encode({}, tensors))
    assert {info.type.weights for info in file.tensors.values()} == {weights}


def test_groups_of_type_42_must_agree(tmp_path):
    tensors = {
        "a": random_ternary(16, 256, 64, type_id=42),
        "b": random_ternary(16, 256, 128, type_id=42),
    }
    with pytest.raises(FormatError, match="a has groups of 64 weights and b has groups of 128"):
        parsed(tmp_path, encode({}, tensors))


def test_type_42_of_the_wrong_size_gives_both_sizes(tmp_path):
    tensors = {"t": Tensor((1000, 128), 42, b"\0" * 35_000), "u": dense(np.ones(8))}
    with pytest.raises(FormatError, match=r"t .*group 64 needs 36000; group 128 needs 34000"):
        parsed(tmp_path, encode({}, tensors))


def test_type_42_too_small_to_tell_is_refused(tmp_path):
    tensors = {"t": Tensor((1, 128), 42, b"\0" * 36), "u": dense(np.ones(8))}
    with pytest.raises(FormatError, match="too small to tell"):
        parsed(tmp_path, encode({}, tensors))


def test_offsets_of_the_27b_table(tmp_path):
    """The two sizes of a 248320 x 5120 table, in a sparse file of the real size."""
    for offset, weights in ((337_715_200, 128), (357_580_800, 64)):
        head = header(3, 2, 0) + record("t", (5120, 248_320), 42, 0)
        head += record("u", (8,), 0, offset)
        start = -(-len(head) // 32) * 32
        path = tmp_path / "sparse.gguf"
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(start + offset + 32)
        assert read_gguf(path).tensors["t"].type.weights == weights


def test_reading_a_header_does_not_load_the_tensors(tmp_path):
    resource = pytest.importorskip("resource")
    path = write(tmp_path / "big.gguf", {}, {"t": dense(np.zeros((4096, 4096)))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB on Linux


def test_value_types_of_the_writer():
    assert value(True)[0] == 7
    assert value([1.5])[0] == 9
