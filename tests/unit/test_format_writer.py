"""Writing checkpoints: the bytes, the atomicity, and what is refused before it is written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from bonsai import locks, ternary
from bonsai.errors import (
    BonsaiError,
    ConversionError,
    FormatError,
    InvalidRequest,
    UnsupportedModel,
)
from bonsai.format import Checkpoint, CheckpointWriter, containers, verify
from bonsai.format.safetensors_io import SafetensorsFile
from bonsai.format.values import narrow
from bonsai.matrix import DenseMatrix, PackedMatrix, SignedHadamard

SPEC = tiny.Tiny(layers=1, vocab=100)
CONFIG = tiny.config(SPEC)
CONTAINERS = ("safetensors", "npz")


def ternary_matrix(name: str = "w", rows: int = 6, columns: int = 192, **changes) -> PackedMatrix:
    rng = np.random.default_rng(rows)
    matrix = tiny.matrix(rng, rows, columns, name=name)
    assert isinstance(matrix, PackedMatrix)
    return replace(matrix, **changes)


def finished(writer: CheckpointWriter, **kwargs) -> Path:
    return writer.finish(architecture="qwen3", config=CONFIG, **kwargs)


def nothing_left(folder: Path, *but: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(but)


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.vector("norm", np.arange(5, dtype=np.float32))
        writer.matrix(ternary_matrix())
        path = finished(writer)
    assert path == tmp_path / "m"
    data = (path / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") == 256 * 1024 - 8
    file = SafetensorsFile(path / "model.safetensors")
    places = {name: (file.info(name).offset, file.info(name).nbytes) for name in file.names()}
    start = 256 * 1024
    assert places == {
        "norm": (start, 20),
        "_pad.0": (start + 20, 44),
        "w.codes": (start + 64, 6 * 2 * 32),
        "w.scales": (start + 64 + 384, 6 * 2 * 2),
    }
    assert data[start + 20 : start + 64] == bytes(44)
    assert len(data) == start + 64 + 384 + 24


def test_the_manifest_of_a_checkpoint(tmp_path: Path) -> None:
    matrix = ternary_matrix()
    source = {"kind": "gguf", "files": [{"name": "a", "bytes": 1, "sha256": "0" * 64}]}
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(matrix)
        writer.file("tokenizer.json", b"{}")
        finished(writer, source=source, sampling={"temperature": 0.5}, tokenizer_size=90)
    values = json.loads((tmp_path / "m" / "manifest.json").read_text())
    zeros = int((ternary.unpack(matrix.codes, "t2", 128, 192) == 0).sum())
    assert values["tensors"] == {
        "w": {"packing": "t2", "shape": [6, 192], "group": 128, "zeros": zeros / (6 * 192)}
    }
    assert sorted(values["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert values["source"] == source and values["sampling"] == {"temperature": 0.5}
    assert values["tokenizer"] == {"size": 90} and values["version"] == 1
    assert values["created_by"].startswith("bonsai-lm ")
    assert verify(tmp_path / "m").ok


def test_the_safetensors_library_opens_our_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    spec = tiny.Tiny(layers=1, vocab=41, ffn=192, packing="t5", shard_bytes=20_000)
    path = tiny.write(tmp_path / "m", spec)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        ours = SafetensorsFile(file)
        with library.safe_open(file, framework="numpy") as theirs:
            assert sorted(theirs.keys()) == sorted(ours.names())
            assert theirs.metadata() == {"format": "bonsai"}
            for name in ours.names():
                assert np.array_equal(theirs.get_tensor(name), ours.array(name))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    sizes = [file.stat().st_size - 256 * 1024 for file in files]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) < 20_000 + 64


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    spec = tiny.Tiny(layers=1, vocab=100, packing="f32", shard_bytes=1)
    path = tiny.write(tmp_path / "m", spec)
    made = tiny.weights(spec)
    assert len(list(path.glob("*.safetensors"))) == len(made.matrices) + len(made.vectors)
    assert verify(path).ok


def test_a_full_header_begins_the_next_shard(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(containers, "RESERVED", 1024)
    path = tiny.write(tmp_path / "m", SPEC)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert verify(path).ok


def test_memory_stays_below_one_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrices = [tiny.matrix(rng, 4096, 8192, name=f"w{i}") for i in range(3)]
    tracemalloc.start()
    with CheckpointWriter(tmp_path / "m") as writer:
        for matrix in matrices:
            writer.matrix(matrix)
        finished(writer)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert matrices[0].nbytes > 8_000_000
    assert peak < 1.3 * matrices[0].nbytes, peak


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt, None])
def test_leaving_without_finish_leaves_nothing(
    tmp_path: Path, container: str, problem: type[BaseException] | None
) -> None:
    def work() -> None:
        with CheckpointWriter(tmp_path / "m", container) as writer:
            writer.matrix(ternary_matrix())
            writer.file("tokenizer.json", b"{}")
            assert not nothing_left(tmp_path) and not (tmp_path / "m").exists()
            if problem is not None:
                raise problem

    if problem is None:
        work()
    else:
        with pytest.raises(problem):
            work()
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_full_disk_is_one_clear_error_at_any_step(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th flush to disk fails, for every n until the checkpoint is complete."""
    real, failures = os.fsync, 0

    def attempt(allowed: int) -> bool:
        calls = 0

        def fsync(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            tiny.write(
                tmp_path / "m", replace(SPEC, container=container), {"tokenizer.json": b"{}"}
            )
        except BonsaiError as error:
            assert f"no space left for {tmp_path / 'm'}" in str(error) and error.hint
            return False
        return True

    while not attempt(failures):
        assert nothing_left(tmp_path)
        failures += 1
        assert failures < 20
    assert failures >= 4  # tokenizer, tensors, config, manifest
    assert nothing_left(tmp_path, "m") and verify(tmp_path / "m").ok


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
sys.path.insert(0, sys.argv[1])
import tiny
tiny.write(__import__("pathlib").Path(sys.argv[2]), tiny.Tiny(container=sys.argv[4]))
"""
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tiny
from pathlib import Path
from bonsai.format import CheckpointWriter
from bonsai.format import writer
writer.sha256 = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
tiny.write(Path(sys.argv[2]), tiny.Tiny())
"""
TESTS = str(Path(__file__).parents[1])


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("limit", [1_000, 300_000])
def test_a_real_size_limit_is_one_clear_error(tmp_path: Path, limit: int, container: str) -> None:
    if container == "npz" and limit == 300_000:
        limit = 60_000  # there is no reserved header
    command = [sys.executable, "-c", LIMITED, TESTS, str(tmp_path / "m"), str(limit), container]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"BonsaiError: no space left for {tmp_path / 'm'}" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert nothing_left(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_leaves_nothing_that_loads(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, TESTS, str(tmp_path / "m")])
    assert done.returncode < 0
    assert not (tmp_path / "m").exists()
    partial, lock = sorted(tmp_path.iterdir())
    assert partial.name.startswith(".m.") and partial.name.endswith(".partial")
    assert lock.name == f"{partial.name}.lock"
    with pytest.raises(FormatError, match=r"no manifest.json"):
        Checkpoint.open(partial)
    tiny.write(tmp_path / "other", SPEC)  # what is left of "m" is not its business
    assert partial.is_dir()
    tiny.write(tmp_path / "m", SPEC)
    assert verify(tmp_path / "m").ok
    assert nothing_left(tmp_path, "m", "other")


def test_what_another_writer_is_making_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    """Neither where it runs, nor where nobody can know: no lock file, no locks."""
    unknown = tmp_path / ".m.01234567.partial"
    unknown.mkdir()
    with CheckpointWriter(tmp_path / "m") as running:
        running.vector("norm", np.ones(3, np.float32))
        tiny.write(tmp_path / "m", SPEC)
        (tmp_path / "m").rename(tmp_path / "first")
        finished(running)
    assert Checkpoint.open(tmp_path / "m").names() == ["norm"]
    lock = tmp_path / ".m.01234567.partial.lock"
    lock.touch()
    with monkeypatch.context() as without_locks:
        without_locks.setattr(locks, "_lock", lambda _: None)
        CheckpointWriter(tmp_path / "m", overwrite=True).__exit__(None, None, None)
    assert unknown.is_dir() and nothing_left(tmp_path, "m", "first", unknown.name, lock.name)


def test_what_the_reader_would_refuse_gets_no_name(tmp_path: Path) -> None:
    with (
        pytest.raises(FormatError, match="architecture 'llama'"),
        CheckpointWriter(tmp_path / "m") as writer,
    ):
        writer.matrix(ternary_matrix())
        writer.finish(architecture="qwen3", config={"architecture": "llama"})
    assert nothing_left(tmp_path)


def test_only_an_old_checkpoint_is_replaced_and_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    for name in ("photos", "file"):
        for overwrite in (False, True):
            with pytest.raises(InvalidRequest, match=f"{name} exists and is not a bonsai"):
                CheckpointWriter(tmp_path / name, overwrite=overwrite)
    tiny.write(tmp_path / "m", SPEC)
    with pytest.raises(InvalidRequest, match="m exists already"):
        CheckpointWriter(tmp_path / "m")
    assert nothing_left(tmp_path, "photos", "file", "m")
    before = (tmp_path / "m" / "manifest.json").read_bytes()
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "m", overwrite=True) as writer:
        writer.matrix(ternary_matrix())
        raise RuntimeError
    assert (tmp_path / "m" / "manifest.json").read_bytes() == before
    with CheckpointWriter(tmp_path / "m", overwrite=True) as writer:
        writer.matrix(ternary_matrix())
        finished(writer)
    assert Checkpoint.open(tmp_path / "m").names() == ["w"]
    assert nothing_left(tmp_path, "photos", "file", "m")


def test_a_failed_rename_brings_the_old_checkpoint_back(tmp_path: Path, monkeypatch) -> None:
    tiny.write(tmp_path / "m", SPEC)
    before = (tmp_path / "m" / "manifest.json").read_bytes()
    real = os.replace

    def replaced(source, target) -> None:
        if str(source).endswith(".partial") and Path(target) == tmp_path / "m":
            raise PermissionError(errno.EACCES, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    with (
        pytest.raises(BonsaiError, match="m cannot be written: Permission denied"),
        CheckpointWriter(tmp_path / "m", overwrite=True) as writer,
    ):
        writer.matrix(ternary_matrix())
        finished(writer)
    assert (tmp_path / "m" / "manifest.json").read_bytes() == before
    assert nothing_left(tmp_path, "m")


def test_empty_and_missing_folders_are_made(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    tiny.write(tmp_path / "empty", SPEC)
    tiny.write(tmp_path / "a" / "b" / "c", SPEC)
    monkeypatch.chdir(tmp_path)
    tiny.write(Path("relative"), SPEC)
    for name in ("empty", "a/b/c", "relative"):
        assert verify(tmp_path / name).ok


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BonsaiError, match="cannot be written"):
        CheckpointWriter(tmp_path / "file" / "m")


@pytest.mark.parametrize(
    "options", [{"container": "gguf"}, {"shard_bytes": 0}, {"container": "npz", "shard_bytes": 9}]
)
def test_impossible_containers_are_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(InvalidRequest):
        CheckpointWriter(tmp_path / "m", **options)
    assert nothing_left(tmp_path)


def broken_codes(matrix: PackedMatrix) -> PackedMatrix:
    codes = matrix.codes.copy()
    codes[2, 1] |= 3 << 4
    return replace(matrix, codes=codes)


def with_scale(value: float) -> Callable[[PackedMatrix], PackedMatrix]:
    def change(matrix: PackedMatrix) -> PackedMatrix:
        scales = matrix.scales.copy()
        scales[3, 1] = value
        return replace(matrix, scales=scales)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        (with_scale(np.inf), ConversionError, "w.scales has values that are not finite"),
        (with_scale(np.nan), ConversionError, "w.scales has values that are not finite"),
        (broken_codes, ConversionError, "w.codes: 1 codes that no ternary matrix has"),
        (
            lambda m: replace(m, scales=m.scales.astype(np.float32)),
            ConversionError,
            "w.scales is float32 [6, 2], t2 [6, 192] needs F16 [6, 2]",
        ),
        (
            lambda m: replace(m, scales=m.scales[:, :1]),
            ConversionError,
            "w.scales is float16 [6, 1], t2 [6, 192] needs F16 [6, 2]",
        ),
        (
            lambda m: replace(m, codes=m.codes[:, :12]),
            ConversionError,
            "w.codes is uint32 [6, 12], t2 [6, 192] needs U32 [6, 16]",
        ),
        (
            lambda m: replace(m, biases=m.scales),
            ConversionError,
            "w: t2 has the planes w.codes, w.s",
        ),
        (lambda m: replace(m, packing="q8"), ConversionError, "w: q8 has the planes"),
        (lambda m: replace(m, packing="t3"), UnsupportedModel, "w: packing 't3'; supported"),
        (lambda m: replace(m, group=48), UnsupportedModel, "w: group 48 of packing t2; supported"),
        (lambda m: replace(m, name="_pad.1"), FormatError, "'_pad.1' cannot be the name"),
        (lambda m: replace(m, name="a/../b"), FormatError, "cannot be the name"),
        (
            lambda m: replace(m, transform=SignedHadamard(128, np.ones(192, np.int8))),
            ConversionError,
            "w: a transform of block 128 with signs [192] does not fit inputs of 192",
        ),
        (
            lambda m: replace(m, transform=SignedHadamard(64, np.zeros(192, np.int8))),
            ConversionError,
            "does not fit inputs of 192",
        ),
    ],
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_wrong_matrices_are_refused_by_name(
    tmp_path: Path, container: str, change, kind: type[BonsaiError], expected: str
) -> None:
    with CheckpointWriter(tmp_path / "m", container) as writer:
        with pytest.raises(kind) as info:
            writer.matrix(change(ternary_matrix()))
        assert expected in str(info.value)
        writer.matrix(ternary_matrix("v"))  # the writer is as it was
        finished(writer)
    assert Checkpoint.open(tmp_path / "m").names() == ["v"]
    assert verify(tmp_path / "m").ok


def test_zero_groups_have_scale_zero_and_stay_zero(tmp_path: Path) -> None:
    trits = np.random.default_rng(0).integers(-1, 2, (3, 256)).astype(np.int8)
    trits[1] = 0
    scales = np.array([[0.5, 0], [0, 0], [6e4, 6e-8]], np.float16)
    matrix = PackedMatrix("w", "t2", (3, 256), 128, ternary.pack(trits, "t2", 128), scales)
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(matrix)
        finished(writer)
    with Checkpoint.open(tmp_path / "m") as opened:
        rows = opened.matrix("w").rows()
    assert not rows[1].any() and not rows[0, 128:].any() and np.isfinite(rows).all()
    assert np.array_equal(rows[2, 128:], trits[2, 128:] * np.float32(np.float16(6e-8)))


@pytest.mark.parametrize("packing", ["f32", "f16", "bf16"])
def test_dense_values_that_are_not_finite_are_refused(tmp_path: Path, packing: str) -> None:
    values = np.ones((2, 2), np.float32)
    values[1, 0] = np.nan
    with CheckpointWriter(tmp_path / "m") as writer:
        with pytest.raises(ConversionError, match="v has values that are not finite"):
            writer.vector("v", values, packing)
        with pytest.raises(ConversionError, match="w has values that are not finite"):
            writer.matrix(DenseMatrix("w", packing, (2, 2), narrow(values, packing)))


def test_values_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        with pytest.raises(ConversionError, match="v has values that are not finite"):
            writer.vector("v", np.array([65520], np.float32), "f16")
        writer.vector("v", np.array([65519], np.float32), "f16")
        with pytest.raises(ConversionError, match="float64 values as 'f32', expected float32"):
            writer.vector("u", np.ones(3))
        with pytest.raises(ConversionError, match="float32 values as 't2'"):
            writer.vector("u", np.ones(3, np.float32), "t2")


def test_a_name_is_written_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(ternary_matrix())
        with pytest.raises(ConversionError, match="w is written twice"):
            writer.matrix(ternary_matrix())
        writer.file("a.json", b"")
        with pytest.raises(InvalidRequest, match=r"a.json: .* written already"):
            writer.file("a.json", b"")


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "model.safetensors", "x.npz"])
def test_files_that_the_writer_makes_cannot_be_given(tmp_path: Path, name: str) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        with pytest.raises(InvalidRequest, match=f"{name}: the writer makes this file"):
            writer.file(name, b"")


@pytest.mark.parametrize("name", ["../a.json", "a/b.json", "C:a.json", "a\\b.json", ""])
def test_files_outside_the_folder_cannot_be_given(tmp_path: Path, name: str) -> None:
    with (
        CheckpointWriter(tmp_path / "m") as writer,
        pytest.raises(FormatError, match="not a plain file name"),
    ):
        writer.file(name, b"")


def test_one_transform_per_width(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one, other = tiny.signs(rng, 64, 192), tiny.signs(rng, 64, 192)
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(ternary_matrix("a", transform=one))
        with pytest.raises(ConversionError, match="b: its transform differs"):
            writer.matrix(ternary_matrix("b", transform=other))
        wide = ternary_matrix("c", columns=256, transform=tiny.signs(rng, 128, 256))
        with pytest.raises(ConversionError, match=r"c: its transform differs.*blocks \[64, 128\]"):
            writer.matrix(wide)


@pytest.mark.parametrize(
    ("name", "x", "y", "expected"),
    [
        ("w", 192, 6, "but no transformed matrix"),  # written, but not transformed
        ("v", 192, 6, "but no transformed matrix"),  # never written
        ("t", 6, 192, r"a proof of \[6\] to \[192\]"),
        ("t", 192, 6, "its proof has no output"),
    ],
)
def test_a_proof_of_nothing_is_refused(
    tmp_path: Path, name: str, x: int, y: int, expected: str
) -> None:
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(ternary_matrix("w"))
        writer.matrix(ternary_matrix("t", transform=tiny.signs(np.random.default_rng(0), 64, 192)))
        writer.proof(name, np.ones(x, np.float32), np.zeros(y, np.float32))
        with pytest.raises(ConversionError, match=f"{name}: .*{expected}"):
            finished(writer)
    assert nothing_left(tmp_path)


def test_a_file_of_many_tensors_is_one_file(tmp_path: Path) -> None:
    """As many as a 27B model has."""
    with CheckpointWriter(tmp_path / "m") as writer:
        for i in range(1500):
            writer.vector(f"layers.{i}.attn.q_norm", np.full(16, i, np.float32))
        finished(writer)
    assert (tmp_path / "m" / "model.safetensors").exists() and verify(tmp_path / "m").ok


def test_bf16_is_rounded_to_nearest_with_ties_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xBF818000], "<u4")
    rounded = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xBF82]
    assert narrow(bits.view("<f4"), "bf16").tolist() == rounded
    assert narrow(np.array([np.nan], np.float32), "bf16")[0] & 0x7FC0 == 0x7FC0


def test_progress_counts_the_bytes_of_all_files(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.matrix(ternary_matrix())
        finished(writer, progress=lambda *step: steps.append(step))
    names = ("config.json", "model.safetensors")
    total = sum((tmp_path / "m" / name).stat().st_size for name in names)
    assert steps[-1] == ("hash", total, total)
