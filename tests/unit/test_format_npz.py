"""The npz container: mapped in place, aligned, never unpickled, never guessed."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path

import mutate
import numpy as np
import pytest
import tiny

from bonsai.errors import BonsaiError, FormatError
from bonsai.format import Checkpoint
from bonsai.format.npz_io import MAX_DIRECTORY, NpzFile

BF16 = tiny.Tiny(layers=1, packing="bf16", vocab=40, container="npz")
VALUES = np.array([0x3F80, 0xC000, 0x3F00], "<u2")  # bf16 bits of 1, -2, 0.5


def archive(path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def npy(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=True)
    return out.getvalue()


def raw_npy(header: str, data: bytes, version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin-1").ljust(117) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def refused(path: Path) -> str:
    with pytest.raises(FormatError) as info:
        NpzFile(path)
    assert str(path) in str(info.value)
    assert info.value.__suppress_context__ or info.value.__context__ is None
    return str(info.value)


def test_numpy_writes_what_we_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b.codes": rng.integers(0, 2**32, (7, 2), dtype=np.uint32),
        "c": np.arange(5, dtype=np.int8),
        "d": np.float16(2.5),
        "e": VALUES,
    }
    np.savez(tmp_path / "x.npz", **arrays)
    file = NpzFile(tmp_path / "x.npz")
    assert file.names() == list(arrays)
    for name, values in arrays.items():
        assert np.array_equal(file.array(name), values)
        assert file.array(name).dtype == values.dtype and not file.array(name).flags.writeable
    assert file.info("e").dtype == "U16"
    file.close()


@pytest.mark.parametrize("packing", ["t2", "t5", "q4", "f32", "bf16"])
def test_numpy_reads_what_we_write_and_planes_are_aligned(tmp_path: Path, packing: str) -> None:
    spec = tiny.Tiny(layers=1, packing=packing, vocab=41, container="npz")
    path = tiny.write(tmp_path / "m", spec)
    store = NpzFile(path / "model.npz")
    with np.load(path / "model.npz") as arrays:
        assert sorted(arrays) == sorted(store.names())
        for name in store.names():
            assert np.array_equal(arrays[name], store.array(name))
            assert store.info(name).offset % 64 == 0
    with Checkpoint.open(path) as checkpoint:
        for matrix in tiny.weights(spec).matrices.values():
            assert np.array_equal(checkpoint.matrix(matrix.name).rows(), matrix.rows())


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_an_object_array_is_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "x.npz"
    np.savez(path, w=np.array([Payload(marker)], dtype=object))
    text = refused(path)
    assert "'w.npy': an array of Python objects" in text and "refused" in text
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker))).close()  # the payload is a live one
    assert marker.exists()


def test_compressed_members_are_refused_by_name(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", w=np.zeros(100, np.float32))
    assert "'w.npy': compressed or encrypted" in refused(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (npy(np.zeros((2, 3), order="F")), "Fortran order True"),
        (npy(np.zeros(2, ">f4")), "dtype '>f4'"),
        (npy(np.zeros(2, "<c8")), "dtype '<c8'"),
        (npy(np.zeros(2, "U3")), "dtype '<U3'"),
        (npy(np.zeros(2, [("a", "<f4")])), "not a plain array"),
        (npy(np.zeros((0, 3), "<f4")), "shape (0, 3) is not"),
        (raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", b""), "plain array"),
        (
            raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }", bytes(8)),
            "needs 36",
        ),
        (raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "8 bytes"),
        (
            raw_npy(
                "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999,), }", b""
            ),
            "is not at most 8 positive sizes",
        ),
        (
            raw_npy(
                "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }", b""
            ),
            "is not at most 8",
        ),
        (
            raw_npy("{'descr': __import__('os'), 'fortran_order': False, 'shape': (1,), }", b""),
            "plain",
        ),
        (raw_npy("[" * 110, b""), "not a plain array"),
        (b"\x93NUMPY\1\0\xff\xff" + b"{", "not a plain array"),
        (b"\x93NUMPY\4\0" + bytes(100), "not an npy array"),
        (b"hello", "not an npy array"),
        (b"", "not an npy array"),
    ],
)
def test_strange_members_are_refused_by_name(tmp_path: Path, data: bytes, expected: str) -> None:
    text = refused(archive(tmp_path / "x.npz", w=data))
    assert "'w.npy'" in text and expected in text


def test_other_members_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("../evil.py", b"x")
    assert "'../evil.py': not the name of an array" in refused(path)


def test_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "x.npz", "w") as f,
    ):
        f.writestr("w.npy", npy(VALUES))
        f.writestr("w.npy", npy(VALUES))
    assert "2 members with 1 names" in refused(tmp_path / "x.npz")


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", a=npy(VALUES), b=npy(VALUES))
    data = path.read_bytes()
    second = data.rfind(b"PK\x01\x02")  # its entry in the directory; the offset is at byte 42
    mutate.put(path, second + 42, bytes(4))
    assert "'b.npy': its local header is that of b'a.npy'" in refused(path)


@pytest.mark.parametrize("zip64", [False, True])
def test_a_directory_of_too_many_members_is_refused_unread(
    tmp_path: Path, zip64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("read")

    count = MAX_DIRECTORY // 46 + 1
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 6, 0, 0, 0, *[0] * 5, 0, 0)
    listed = entry * count
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, len(listed), 0, 0)
    if zip64:
        record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, count, count, len(listed), 0)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(listed), 1)
        last = record + locator + last.replace(struct.pack("<L", len(listed)), b"\xff" * 4)
    path = tmp_path / "x.npz"
    path.write_bytes(listed + last)
    monkeypatch.setattr(zipfile, "ZipFile", read)
    assert f"{len(listed)} bytes, at most {MAX_DIRECTORY}" in refused(path)


@pytest.mark.parametrize("count", [1, 22, 60, 200])
def test_every_cut_is_refused(tmp_path: Path, count: int) -> None:
    path = archive(tmp_path / "x.npz", w=npy(VALUES))
    mutate.cut(path, count)
    assert "truncated" in refused(path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", w=npy(VALUES))
    mutate.pad(path)
    assert "something follows it" in refused(path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (b"<html></html>", "a web page"),
        (b"PK\x05\x06" + bytes(18), "0 members"),
        (b"PK\x05\x06" + b"\xff" * 16 + b"\0\0", f"{2**32 - 1} bytes, at most {MAX_DIRECTORY}"),
        (b"PK\x05\x06" + bytes(8) + b"\x10" + bytes(9), "not an .npz file"),
    ],
)
def test_other_things_are_told_apart(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "x.npz").write_bytes(data)
    assert expected in refused(tmp_path / "x.npz")


def test_no_flipped_byte_breaks_more_than_the_file(tmp_path: Path) -> None:
    good = archive(tmp_path / "good.npz", a=npy(VALUES), b=npy(VALUES)).read_bytes()
    path = tmp_path / "flipped.npz"
    for offset in range(len(good)):
        for mask in (1, 0x80):
            data = bytearray(good)
            data[offset] ^= mask
            path.write_bytes(bytes(data))
            try:
                file = NpzFile(path)
            except BonsaiError as error:
                assert str(path) in str(error)
            else:
                for name in file.names():
                    file.array(name)
                file.close()


@pytest.mark.parametrize("descr", ["<V2", "|V2"])
def test_two_byte_voids_are_bf16_where_the_manifest_says_so(tmp_path: Path, descr: str) -> None:
    path = tiny.write(tmp_path / "m", BF16)
    with Checkpoint.open(path) as checkpoint:
        expected = checkpoint.matrix("embedding").rows()
    relabel(path, "embedding", "<u2", descr)
    with Checkpoint.open(path) as checkpoint:
        matrix = checkpoint.matrix("embedding")
        assert matrix.packing == "bf16" and matrix.values.dtype == np.uint16
        assert np.array_equal(matrix.rows(), expected)


@pytest.mark.parametrize("descr", ["<V2", "|V2", "<u2"])
def test_two_byte_voids_are_nothing_else(tmp_path: Path, descr: str) -> None:
    path = tiny.write(tmp_path / "m", tiny.Tiny(layers=1, packing="f16", vocab=40, container="npz"))
    relabel(path, "embedding", "<f2", descr)
    with pytest.raises(FormatError, match=r"embedding is (V2|U16) .*manifest.json needs F16"):
        Checkpoint.open(path)


def test_other_two_byte_types_are_not_bf16(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", BF16)
    relabel(path, "embedding", "<u2", "<f2")
    with pytest.raises(FormatError, match=r"embedding is F16 .*needs BF16"):
        Checkpoint.open(path)


def relabel(path: Path, name: str, old: str, new: str) -> None:
    """Change the dtype in the npy header of one array."""
    file = path / "model.npz"
    info = NpzFile(file).info(name)
    head = file.read_bytes()[info.offset - 128 : info.offset]
    assert head.count(old.encode()) == 1
    mutate.put(file, info.offset - 128, head.replace(old.encode(), new.encode()))
    mutate.reseal(path)
