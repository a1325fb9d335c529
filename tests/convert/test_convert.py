"""Whole conversions: recognising a source, repacking, reports, targets."""

from __future__ import annotations

import json
import os

import hf_writer as hf
import numpy as np
import pytest
import tiny
import tiny_gguf

import bonsai
import bonsai.convert as convert
from bonsai.errors import BonsaiError, ConversionError, FormatError, InvalidRequest, ModelNotFound
from bonsai.format import Checkpoint


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(checkpoint: Checkpoint, name: str) -> np.ndarray:
    if len(checkpoint.entry(name).shape) == 1:
        return checkpoint.vector(name)
    return checkpoint.matrix(name).rows()


def test_the_package_is_the_function(tmp_path):
    report = bonsai.convert(hf.write(tmp_path / "hf"), tmp_path / "out")
    assert isinstance(report, convert.ConversionReport)
    assert report.path == tmp_path / "out"


def test_a_file_a_folder_with_one_file_and_a_checkpoint_are_recognised(tmp_path):
    (tmp_path / "folder").mkdir()
    path = tiny_gguf.write(tmp_path / "folder/model.gguf", hf.Tiny())
    assert convert(path, tmp_path / "a").kind == "gguf"
    assert convert(tmp_path / "folder", tmp_path / "b").kind == "gguf"
    assert convert(tmp_path / "a", tmp_path / "c").kind == "bonsai"
    assert convert(hf.write(tmp_path / "hf"), tmp_path / "d").kind == "huggingface"


def test_content_counts_not_the_name(tmp_path):
    path = tiny_gguf.write(tmp_path / "model.bin", hf.Tiny())
    assert convert(path, tmp_path / "a").kind == "gguf"


SOURCES = {
    "nothing there": (None, ModelNotFound, "no such file or folder"),
    "empty file": (b"", FormatError, "the file is empty"),
    "git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", FormatError, "git-LFS"),
    "web page": (b"<!DOCTYPE html><html>", FormatError, "web page"),
    "safetensors file": (hf.safetensors(hf.weights()), FormatError, "name its folder"),
    "pickle": (b"PK\x03\x04" + b"\0" * 60, FormatError, "pickled PyTorch file"),
    "noise": (b"\x01\x02\x03\x04" * 20, FormatError, "not a GGUF file"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_what_is_no_source_is_said(tmp_path, case):
    data, kind, message = SOURCES[case]
    if data is not None:
        (tmp_path / "source").write_bytes(data)
    with pytest.raises(kind, match=message) as caught:
        convert(tmp_path / "source", tmp_path / "out")
    assert "source" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_kind_can_be_forced(tmp_path):
    folder = hf.write(tmp_path / "both")
    tiny_gguf.write(folder / "model.gguf", hf.Tiny())
    assert convert(folder, tmp_path / "a").kind == "huggingface"
    assert convert(folder, tmp_path / "b", kind="gguf").kind == "gguf"
    for kind in ("bonsai", "huggingface"):
        with pytest.raises(BonsaiError, match=r"model.gguf"):
            convert(folder / "model.gguf", tmp_path / "c", kind=kind)
    with pytest.raises(BonsaiError, match=r"no manifest.json"):
        convert(folder, tmp_path / "c", kind="bonsai")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a file one may not read")
def test_file_that_may_not_be_read(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", hf.Tiny())
    path.chmod(0)
    with pytest.raises(FormatError, match="cannot be read"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_name_that_no_file_can_have(tmp_path, name):
    with pytest.raises(BonsaiError):
        convert(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no model in this folder"),
        (["a.gguf", "b.gguf"], r"2 GGUF files \(a.gguf, b.gguf\)"),
        (["pytorch_model.bin"], "pickled PyTorch files"),
    ],
)
def test_folder_without_one_model(tmp_path, names, message):
    (tmp_path / "folder").mkdir()
    for name in names:
        (tmp_path / "folder" / name).write_bytes(b"x")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "folder", tmp_path / "out")


@pytest.mark.parametrize("group", [64, 128, 256])
@pytest.mark.parametrize("packing", ["t2", "t5"])
def test_repacking_changes_the_bytes_and_no_weight(tmp_path, group, packing):
    other = {"t2": "t5", "t5": "t2"}[packing]
    spec = tiny.Tiny(packing=packing, group=group, ffn=192)
    tiny.write(tmp_path / "random", spec, {"chat_template.jinja": b"{{ x }}"})
    convert(tmp_path / "random", tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", packing=other)
    convert(tmp_path / "b", tmp_path / "c", packing=packing)
    a, b = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b")
    assert b.entry("layers.0.ffn.down").packing == other
    for name in a.names():
        assert np.array_equal(rows(a, name), rows(b, name)), name
    assert report.relative_error == 0
    assert files(tmp_path / "a") == files(tmp_path / "c")
    assert (tmp_path / "c/chat_template.jinja").read_bytes() == b"{{ x }}"


@pytest.mark.parametrize("source", ["gguf", "huggingface"])
@pytest.mark.parametrize("options", [{}, {"quant": "ternary"}, {"quant": "q4"}])
def test_converting_twice_equals_converting_once(tmp_path, source, options):
    if source == "gguf":
        path = tiny_gguf.write(tmp_path / "m.gguf", hf.Tiny())
    else:
        generation = {"do_sample": True, "top_p": 0.9}
        path = hf.write(tmp_path / "hf", files={"generation_config.json": generation})
    convert(path, tmp_path / "once", **options)
    convert(tmp_path / "once", tmp_path / "twice")
    assert files(tmp_path / "once") == files(tmp_path / "twice")


def test_ternarizing_a_ternary_checkpoint_again_changes_nothing(tmp_path):
    tiny.write(tmp_path / "random", tiny.Tiny())
    convert(tmp_path / "random", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", quant="ternary")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_transform_and_its_proof_survive_repacking(tmp_path):
    spec = tiny.Tiny(hadamard=128, ffn=256)
    tiny.write(tmp_path / "a", spec)
    convert(tmp_path / "a", tmp_path / "b", packing="t5")
    a, b = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b")
    assert b.manifest.hadamard == a.manifest.hadamard
    one, other = (c.matrix("layers.0.attn.q") for c in (a, b))
    assert np.array_equal(one.transform.signs, other.transform.signs)
    assert np.array_equal(one.rows(), other.rows())


def test_packing_that_does_not_have_the_group_is_a_fallback(tmp_path):
    tiny.write(tmp_path / "a", tiny.Tiny(group=32))
    report = convert(tmp_path / "a", tmp_path / "b", packing="t5")
    assert len(report.fallbacks) == 15
    assert "t5 has no groups of 32: kept as t2" in report.fallbacks[0]
    with pytest.raises(ConversionError, match="t5 has no groups of 32"):
        convert(tmp_path / "a", tmp_path / "c", packing="t5", strict=True)


def test_width_that_is_not_whole_groups_is_padded_and_its_true_bits_are_reported(tmp_path):
    spec = hf.Tiny(ffn=224)
    report = convert(
        hf.write(tmp_path / "hf", spec), tmp_path / "out", quant="ternary", strict=True
    )
    row = next(tensor for tensor in report.tensors if tensor.name == "layers.0.ffn.down")
    assert row.bits_per_weight == 256 * 2.125 / 224
    assert report.fallbacks == ()
    assert report.bits_per_weight == 8 * report.nbytes / report.weights


@pytest.mark.parametrize("options", [{"container": "npz"}, {"shard_bytes": 100_000}])
def test_container_options(tmp_path, options):
    folder = hf.write(tmp_path / "hf")
    convert(folder, tmp_path / "a")
    convert(folder, tmp_path / "b", **options)
    a, b = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b")
    for name in a.names():
        assert np.array_equal(rows(a, name), rows(b, name))


def test_progress_counts_weights_then_bytes(tmp_path):
    calls = []
    report = convert(
        hf.write(tmp_path / "hf"), tmp_path / "out", progress=lambda *call: calls.append(call)
    )
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages == ["convert", "hash source", "hash"]
    for stage in stages:
        done = [(count, total) for name, count, total in calls if name == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]
    assert max(total for stage, _, total in calls if stage == "convert") == report.weights


def test_report_lines_tell_the_classes_bits_zeros_and_error(tmp_path):
    report = convert(hf.write(tmp_path / "hf"), tmp_path / "out", quant="ternary")
    text = "\n".join(report.lines(tensors=True))
    for part in (
        "llama from huggingface: 21 tensors",
        "bits per weight",
        "14 linears: F32 -> t2 in groups of 128",
        "1 embedding: F32 -> f32",
        "zero weights: ",
        "relative error: 0.4",
        "warning: the source was not ternary",
        "layers.1.ffn.down",
    ):
        assert part in text


def test_target_that_exists_is_kept_unless_overwriting(tmp_path):
    folder = hf.write(tmp_path / "hf")
    convert(folder, tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(InvalidRequest, match="exists already"):
        convert(folder, tmp_path / "out", quant="ternary")
    assert files(tmp_path / "out") == before
    convert(folder, tmp_path / "out", quant="ternary", overwrite=True)
    assert files(tmp_path / "out") != before
    # In place: the source is the target.
    convert(tmp_path / "out", tmp_path / "out", packing="t5", overwrite=True)
    assert Checkpoint.open(tmp_path / "out").entry("layers.0.attn.q").packing == "t5"


def test_damaged_checkpoint_as_a_source_is_refused(tmp_path):
    tiny.write(tmp_path / "a", tiny.Tiny())
    path = tmp_path / "a/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="sha256"):
        convert(tmp_path / "a", tmp_path / "b")


def test_checkpoint_of_another_version_is_refused(tmp_path):
    tiny.write(tmp_path / "a", tiny.Tiny())
    path = tmp_path / "a/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(BonsaiError, match="version 2"):
        convert(tmp_path / "a", tmp_path / "b")
