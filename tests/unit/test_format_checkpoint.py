"""Opening checkpoints: what is handed out, what is refused, and which files are hashed when."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import mutate
import numpy as np
import pytest
import tiny

from bonsai.errors import BonsaiError, FormatError, InvalidRequest, ModelNotFound, UnsupportedModel
from bonsai.format import Checkpoint, checkpoint, stamps
from bonsai.format.safetensors_io import SafetensorsFile
from bonsai.matrix import PackedMatrix

SPEC = tiny.Tiny(layers=1, vocab=100, tied=False)
SHARDED = tiny.Tiny(layers=1, vocab=100, shard_bytes=20_000)
SHARDS = 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bonsai" / ".checked"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "m", SPEC)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tiny.write(tmp_path / "s", SHARDED)
    assert len(list(path.glob("*.safetensors"))) == SHARDS
    return path


def error(path: Path, **kwargs) -> BonsaiError:
    """The error of opening; it names a path in the folder or the folder."""
    with pytest.raises((FormatError, UnsupportedModel, ModelNotFound)) as info:
        Checkpoint.open(path, **kwargs)
    assert str(path) in str(info.value)
    return info.value


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8", "f32", "f16", "bf16"])
@pytest.mark.parametrize("shard_bytes", [None, 10_000])
def test_every_packing_comes_back_as_it_was(
    tmp_path: Path, packing: str, shard_bytes: int | None
) -> None:
    spec = tiny.Tiny(layers=1, ffn=192, vocab=37, packing=packing, shard_bytes=shard_bytes)
    made = tiny.weights(spec)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as opened:
        assert opened.names() == [*made.matrices, *made.vectors]
        assert opened.nbytes == sum(m.nbytes for m in made.matrices.values()) + sum(
            v.nbytes for v in made.vectors.values()
        )
        for name, expected in made.matrices.items():
            found = opened.matrix(name)
            assert type(found) is type(expected) and found.packing == packing
            assert found.shape == expected.shape
            for part in ("codes", "scales", "biases", "values"):
                a, b = getattr(found, part, None), getattr(expected, part, None)
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.dtype == b.dtype and np.array_equal(a, b)
                    assert not a.flags.writeable
                    assert a.ctypes.data % 64 == 0
        for name, values in made.vectors.items():
            found = opened.vector(name)
            assert found.dtype == np.float32 and np.array_equal(found, values)


def test_a_transform_comes_back_once_per_width(tmp_path: Path) -> None:
    spec = tiny.Tiny(layers=2, vocab=40, hadamard=64)
    made = tiny.weights(spec)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as opened:
        assert opened.entry("layers.0.ffn.up").transform == "hadamard"
        first, second = opened.matrix("layers.0.ffn.up"), opened.matrix("layers.1.attn.q")
        assert first.transform is second.transform and first.transform is not None
        expected = made.matrices["layers.0.ffn.up"].transform
        assert expected is not None
        assert first.transform.block == 64
        assert np.array_equal(first.transform.signs, expected.signs)
        assert opened.proof() is None


def test_signs_that_are_not_signs_are_refused(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", tiny.Tiny(layers=1, vocab=40, hadamard=64))
    info = SafetensorsFile(path / "model.safetensors").info("hadamard.signs.128")
    mutate.put(path / "model.safetensors", info.offset, b"\0")
    mutate.reseal(path)
    with Checkpoint.open(path) as opened, pytest.raises(FormatError, match=r"hadamard.signs.128"):
        opened.matrix("embedding")


def test_names_and_misuse(model: Path) -> None:
    with Checkpoint.open(model) as opened:
        assert opened.has("head") and not opened.has("nothing")
        assert opened.architecture == opened.config["architecture"] == "qwen3"
        with pytest.raises(FormatError, match="there is no tensor 'nothing'"):
            opened.entry("nothing")
        with pytest.raises(FormatError, match=r"norm is \[128\], not a matrix"):
            opened.matrix("norm")
        with pytest.raises(FormatError, match="head is packed as t2"):
            opened.vector("head")


def test_tensors_that_nobody_asked_for_are_known(model: Path) -> None:
    with Checkpoint.open(model) as opened:
        assert opened.unused() == opened.names()
        for name in opened.names():
            if name not in ("head", "norm"):
                opened.vector(name) if opened.entry(name).dense else opened.matrix(name)
        assert opened.unused() == ["head", "norm"]


def test_release_keeps_the_values_and_close_keeps_held_arrays(model: Path) -> None:
    opened = Checkpoint.open(model)
    head = opened.matrix("head")
    before = head.rows().sum()
    opened.release("head")
    assert head.rows().sum() == before
    opened.close()
    assert head.rows().sum() == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["scales", "biases"])
def test_a_scale_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, value: float, part: str
) -> None:
    path = tiny.write(tmp_path / "m", tiny.Tiny(layers=1, vocab=40, packing="q4"))
    plane = f"layers.0.ffn.up.{part}"
    info = SafetensorsFile(path / "model.safetensors").info(plane)
    mutate.put(path / "model.safetensors", info.offset + 6, np.float16(value).tobytes())
    mutate.reseal(path)
    with Checkpoint.open(path) as opened:
        opened.matrix("layers.0.ffn.gate")
        with pytest.raises(FormatError, match=f"{plane} has values that are not finite"):
            opened.matrix("layers.0.ffn.up")


def test_a_gain_that_is_not_finite_is_refused_by_name(model: Path) -> None:
    info = SafetensorsFile(model / "model.safetensors").info("norm")
    mutate.put(model / "model.safetensors", info.offset, np.float32(np.nan).tobytes())
    mutate.reseal(model)
    with Checkpoint.open(model) as opened, pytest.raises(FormatError, match="norm has values"):
        opened.vector("norm")


def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path, model: Path) -> None:
    assert "no such directory" in str(error(tmp_path / "none"))
    assert "is a file; a checkpoint is a directory" in str(error(model / "config.json"))
    (tmp_path / "empty").mkdir()
    found = error(tmp_path / "empty")
    assert "no manifest.json" in str(found) and "bonsai convert" in str(found.hint)
    with pytest.raises(InvalidRequest, match="check 'sometimes'"):
        Checkpoint.open(model, check="sometimes")


def test_a_repaired_folder_opens_in_the_same_process(model: Path) -> None:
    good = (model / "manifest.json").read_bytes()
    mutate.edit_json(model / "manifest.json", lambda m: m.update(version=9))
    assert "version 9" in str(error(model))
    (model / "manifest.json").write_bytes(good)
    Checkpoint.open(model).close()


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors"])
def test_impostors_are_told_apart(model: Path, name: str) -> None:
    (model / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    found = error(model)
    assert f"{name}: this looks like a git-LFS pointer" in str(found) and found.hint
    (model / name).write_bytes(b"")
    assert f"{name}: the file is empty" in str(error(model))
    (model / name).write_bytes(b"<!DOCTYPE html><title>Gone</title>")
    assert f"{name}: this is a web page" in str(error(model))
    (model / name).unlink()
    assert name in str(error(model))


@pytest.mark.parametrize("count", [1, 100, 1000])
def test_a_cut_file_is_refused_with_both_sizes(model: Path, count: int) -> None:
    size = (model / "model.safetensors").stat().st_size
    mutate.cut(model / "model.safetensors", count)
    text = str(error(model, check="never"))
    assert f"model.safetensors: {size - count} bytes, manifest.json says {size}" in text
    mutate.reseal(model)  # even when the manifest was made from the cut file
    text = str(error(model, check="never"))
    assert "truncated" in text and str(size - count) in text and str(size) in text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_trailing_bytes_are_refused_with_both_sizes(model: Path, name: str) -> None:
    size = (model / name).stat().st_size
    mutate.pad(model / name)
    text = str(error(model, check="never"))
    assert f"{name}: {size + 7} bytes, manifest.json says {size}" in text


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: the file is missing" in str(error(sharded))


def test_a_missing_or_false_index_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good = index.read_bytes()

    def swap(values: dict) -> None:
        places = values["weight_map"]
        places["embedding.codes"], places["norm"] = places["norm"], places["embedding.codes"]

    mutate.edit_json(index, swap)
    assert "tensor 'embedding.codes' is not in its shard" in str(error(sharded))
    index.write_bytes(good)
    mutate.edit_json(index, lambda v: v.update(weight_map={}))
    assert "'weight_map' has no entries" in str(error(sharded))
    index.write_bytes(good)
    mutate.edit_json(index, lambda v: v["weight_map"].update(ghost=v["weight_map"]["norm"]))
    assert "tensor 'ghost' is in none of the 3 shards" in str(error(sharded))
    index.unlink()
    assert "model.safetensors.index.json: the file is missing" in str(error(sharded))


def test_files_that_the_manifest_does_not_list_are_not_read(model: Path, sharded: Path) -> None:
    mutate.edit_json(
        sharded / "manifest.json", lambda m: m["files"].pop("model-00002-of-00003.safetensors")
    )
    text = str(error(sharded))
    assert "the tensors lie in model-00001-of-00003.safetensors" in text
    assert "manifest.json lists model-00001" in text
    mutate.edit_json(model / "manifest.json", lambda m: m["files"].pop("model.safetensors"))
    assert "lists no such file" in str(error(model))


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "C:x", "a\\b", "a\0"])
def test_file_names_that_leave_the_folder_are_refused(model: Path, name: str) -> None:
    entry = {"bytes": 1, "sha256": "0" * 64}
    mutate.edit_json(model / "manifest.json", lambda m: m["files"].update({name: entry}))
    assert "is not a plain file name" in str(error(model))


def test_linked_files_that_leave_the_folder_are_refused(model: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    (model / "config.json").rename(outside)
    try:
        (model / "config.json").symlink_to(outside)
    except (OSError, NotImplementedError):
        pytest.skip("cannot make symbolic links here")
    assert "'config.json' is a link that leaves the folder" in str(error(model))


def test_a_checkpoint_in_the_hugging_face_cache_opens(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in list(sharded.iterdir()):
        path.rename(blobs / path.name[::-1])
        try:
            (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name[::-1])
        except (OSError, NotImplementedError):
            pytest.skip("cannot make symbolic links here")
    with Checkpoint.open(snapshot, check="always") as opened:
        assert opened.vector("norm").shape == (128,)


def test_a_group_that_the_file_does_not_have_is_named_with_both_sizes(tmp_path: Path) -> None:
    """The codes of t2 are the same for both groups; only the scales tell."""
    path = tiny.write(tmp_path / "m", tiny.Tiny(layers=1, vocab=1000, group=64))
    mutate.edit_json(path / "manifest.json", lambda m: m["tensors"]["embedding"].update(group=128))
    text = str(error(path))
    assert "embedding.scales is F16 [1000, 2], manifest.json needs F16 [1000, 1]" in text
    assert "the file has groups of 64, the manifest says 128" in text
    path = tiny.write(tmp_path / "n", tiny.Tiny(layers=1, vocab=1000, group=128, packing="t5"))
    mutate.edit_json(path / "manifest.json", lambda m: m["tensors"]["embedding"].update(group=64))
    assert "the file has groups of 128, the manifest says 64" in str(error(path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("norm"), "tensor 'norm' is not in manifest.json"),
        (
            lambda t: t.update(extra={"packing": "f32", "shape": [3]}),
            "no tensor 'extra', manifest.json needs F32 [3]",
        ),
        (lambda t: t["norm"].update(shape=[64]), "norm is F32 [128], manifest.json needs F32 [64]"),
        (lambda t: t["norm"].update(packing="f16"), "norm is F32 [128], manifest.json needs F16"),
        (
            lambda t: t["head"].update(packing="b1"),
            "head.codes is U32 [100, 8], manifest.json needs",
        ),
        (
            lambda t: t["head"].update(packing="t5"),
            "head.codes is U32 [100, 8], manifest.json needs",
        ),
        (lambda t: t["head"].update(shape=[128, 100]), "head.codes is U32 [100, 8]"),
        (
            lambda t: t.update({"head.codes": {"packing": "f32", "shape": [3]}}),
            "head.codes belongs to head and to head.codes",
        ),
    ],
)
def test_planes_and_manifest_must_agree(model: Path, change, expected: str) -> None:
    def edit(manifest: dict) -> None:
        for entry in manifest["tensors"].values():
            entry.pop("zeros", None)
        change(manifest["tensors"])

    mutate.edit_json(model / "manifest.json", edit)
    assert expected in str(error(model))


def test_a_file_of_another_writer_without_alignment_is_refused(model: Path) -> None:
    """The same tensors written again without padding: right in every way but the placement."""
    path = model / "model.safetensors"
    old = SafetensorsFile(path)
    header, data = {}, b""
    for name in sorted(old.names()):
        if not name.startswith("_pad"):
            values = old.array(name)
            ends = [len(data), len(data) + values.nbytes]
            entry = {"dtype": old.info(name).dtype, "shape": list(values.shape)}
            header[name] = {**entry, "data_offsets": ends}
            data += values.tobytes()
    mutate.safetensors(path, header, data)
    mutate.reseal(model)
    assert "not a multiple of 64" in str(error(model))


def test_config_and_manifest_name_one_architecture(model: Path) -> None:
    mutate.edit_json(model / "config.json", lambda c: c.update(architecture="llama"))
    mutate.reseal(model)
    text = str(error(model))
    assert "config.json: architecture 'llama', manifest.json says 'qwen3'" in text


def age(folder: Path, seconds: float = 60) -> None:
    """As if the files had been written a while ago, and none of them since."""
    when = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (when, when))


def counted(monkeypatch: pytest.MonkeyPatch, small: int = 4096) -> list[str]:
    """Names of the files hashed from now on; those of `small` bytes and more count as large."""
    names: list[str] = []
    real = checkpoint.sha256

    def sha256(path: Path, step=None) -> str:
        names.append(path.name)
        return real(path, step)

    monkeypatch.setattr(checkpoint, "sha256", sha256)
    monkeypatch.setattr(checkpoint, "SMALL", small)
    return names


def test_a_flipped_byte_is_found_and_named(sharded: Path) -> None:
    name = "model-00002-of-00003.safetensors"
    age(sharded)
    Checkpoint.open(sharded).close()
    expected = json.loads((sharded / "manifest.json").read_text())["files"][name]["sha256"]
    mutate.flip(sharded / name)
    for check in ("changed", "always"):
        text = str(error(sharded, check=check))
        assert f"{name}: sha256 is " in text and f"manifest.json says {expected}" in text
        assert text.count("0123") <= 2 and len(text.split("sha256 is ")[1].split(",")[0]) == 64
    Checkpoint.open(sharded, check="never").close()
    mutate.flip(sharded / name)
    Checkpoint.open(sharded, check="always").close()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_changed_small_file_is_found_and_named(tmp_path: Path, name: str) -> None:
    model = tiny.write(tmp_path / "t", SPEC, files={"tokenizer.json": b'{"a": 1}'})
    mutate.flip(model / name, 5)
    assert f"{name}: sha256 is " in str(error(model))


def test_large_files_are_hashed_once(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = counted(monkeypatch)
    age(model)
    Checkpoint.open(model).close()
    assert sorted(names) == ["config.json", "model.safetensors"]
    assert len(list(cache.iterdir())) == 1
    names.clear()
    Checkpoint.open(model).close()
    assert names == ["config.json"]
    names.clear()
    Checkpoint.open(model, check="always").close()
    assert sorted(names) == ["config.json", "model.safetensors"]
    names.clear()
    Checkpoint.open(model, check="never").close()
    assert names == []


def test_a_large_file_that_changed_is_hashed_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = counted(monkeypatch)
    age(model)
    Checkpoint.open(model).close()
    mutate.flip(model / "model.safetensors")
    assert "model.safetensors: sha256 is" in str(error(model))
    age(model)  # a time in the past does not hide it either
    names.clear()
    assert "model.safetensors: sha256 is" in str(error(model))
    assert "model.safetensors" in names


def test_a_file_written_just_now_gets_no_stamp(model: Path, cache: Path, monkeypatch) -> None:
    """Its next change might leave the same time behind."""
    counted(monkeypatch)
    Checkpoint.open(model).close()
    assert not cache.exists()
    assert not stamps.matches(model / "model.safetensors", "0" * 64)


def test_a_file_that_changes_while_it_is_hashed_gets_no_stamp(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch)
    age(model)
    real = checkpoint.sha256

    def sha256(path: Path, step=None) -> str:
        digest = real(path, step)
        if path.name == "model.safetensors":
            mutate.flip(path)
            age(model)
        return digest

    monkeypatch.setattr(checkpoint, "sha256", sha256)
    Checkpoint.open(model).close()
    assert not cache.exists()


def test_a_stamp_belongs_to_one_path_and_one_hash(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = counted(monkeypatch)
    age(model)
    Checkpoint.open(model).close()
    shutil.copytree(model, tmp_path / "copy")
    names.clear()
    Checkpoint.open(tmp_path / "copy").close()
    assert "model.safetensors" in names
    digest = json.loads((model / "manifest.json").read_text())["files"]["model.safetensors"]
    assert stamps.matches(model / "model.safetensors", digest["sha256"])
    assert not stamps.matches(model / "model.safetensors", "0" * 64)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_a_damaged_stamp_only_costs_time(
    model: Path, cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = counted(monkeypatch)
    age(model)
    Checkpoint.open(model).close()
    (stamp,) = cache.iterdir()
    stamp.write_bytes(content)
    names.clear()
    Checkpoint.open(model).close()
    assert "model.safetensors" in names


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "below"))
    names = counted(monkeypatch)
    age(model)
    for _ in range(2):
        Checkpoint.open(model).close()
    assert names.count("model.safetensors") == 2


def test_progress_counts_the_bytes_that_are_hashed(sharded: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    Checkpoint.open(sharded, progress=lambda *step: steps.append(step)).close()
    total = sum(path.stat().st_size for path in sharded.iterdir() if path.name != "manifest.json")
    assert steps[-1] == ("check", total, total)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


def test_a_large_checkpoint_is_mapped_not_read(tmp_path: Path) -> None:
    """Opening costs a small part of the file."""
    rng = np.random.default_rng(0)
    matrix = tiny.matrix(rng, 4096, 4096, name="embedding")
    assert isinstance(matrix, PackedMatrix)
    made = tiny.Weights({"embedding": matrix}, {"norm": np.ones(4096, np.float32)})
    path = tiny.save(tmp_path / "m", SPEC, made)
    tracemalloc.start()
    with Checkpoint.open(path) as opened:
        opened.matrix("embedding")
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000 < matrix.nbytes, peak  # two buffers of 1 MiB
