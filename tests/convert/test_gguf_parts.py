"""GGUF models in parts: the same checkpoint as the whole file, and every way to lose a part."""

from __future__ import annotations

from pathlib import Path

import gguf_writer as gguf
import hf_writer as hf
import numpy as np
import pytest
import tiny_gguf

import bonsai.convert as convert
from bonsai.errors import ConversionError
from bonsai.format import Checkpoint

SPEC = hf.Tiny("qwen3")
COUNT = 3


def name(number: int, count: int = COUNT) -> str:
    return f"m-{number:05}-of-{count:05}.gguf"


def split(folder: Path, changes: dict | None = None, empty_first: bool = False) -> Path:
    """A model in three parts; `changes`: number of a part -> metadata that it gets."""
    folder.mkdir(exist_ok=True)
    parts = tiny_gguf.tensors(SPEC, hf.weights(SPEC))
    names = list(parts)
    bounds = [0, 0, 9, len(names)] if empty_first else [0, 5, 9, len(names)]
    for i in range(COUNT):
        values = {"split.no": i, "split.count": COUNT, "split.tensors.count": len(names)}
        if i == 0:
            values = {**tiny_gguf.metadata(SPEC), **values}
        values.update((changes or {}).get(i + 1, {}))
        mine = {n: parts[n] for n in names[bounds[i] : bounds[i + 1]]}
        gguf.write(folder / name(i + 1), values, mine)
    return folder / name(1)


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = Checkpoint.open(a), Checkpoint.open(b)
    assert ours.names() == theirs.names()
    for tensor in ours.names():
        if len(ours.entry(tensor).shape) == 2:
            assert np.array_equal(ours.matrix(tensor).values, theirs.matrix(tensor).values)
        else:
            assert np.array_equal(ours.vector(tensor), theirs.vector(tensor))


@pytest.mark.parametrize("empty_first", [False, True])
def test_parts_are_the_whole(tmp_path, empty_first):
    first = split(tmp_path / "parts", empty_first=empty_first)
    convert(first, tmp_path / "out")
    convert(tiny_gguf.write(tmp_path / "whole.gguf", SPEC), tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")
    files = Checkpoint.open(tmp_path / "out").manifest.source.files
    assert list(files) == [name(i + 1) for i in range(COUNT)]
    convert(tmp_path / "parts", tmp_path / "of folder")
    assert_same(tmp_path / "of folder", tmp_path / "whole")


@pytest.mark.parametrize("number", [2, 3])
def test_missing_part_is_named(tmp_path, number):
    first = split(tmp_path / "parts")
    (tmp_path / "parts" / name(number)).unlink()
    with pytest.raises(ConversionError, match=rf"{name(number)}: part {number} of 3 is missing"):
        convert(first, tmp_path / "out")


def test_missing_first_part_is_named(tmp_path):
    split(tmp_path / "parts").unlink()
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "parts" / name(2), tmp_path / "out")
    assert "part 2 of 3" in str(caught.value)
    assert caught.value.hint == f"name the first part: {name(1)}"
    with pytest.raises(ConversionError, match=r"2 GGUF files"):
        convert(tmp_path / "parts", tmp_path / "out")


def test_parts_in_wrong_order_are_refused(tmp_path):
    first = split(tmp_path / "parts", {2: {"split.no": 2}, 3: {"split.no": 1}})
    with pytest.raises(ConversionError, match=r"name says part 2 of 3, the file says part 3 of 3"):
        convert(first, tmp_path / "out")


def test_renamed_part_is_refused(tmp_path):
    path = split(tmp_path / "parts").rename(tmp_path / "parts" / "model.gguf")
    with pytest.raises(ConversionError, match=r"does not end in -00001-of-00003.gguf"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: {"split.count": 4}}, r"the file says part 2 of 4"),
        ({1: {"split.count": 4}}, r"the name says 3 parts, split.count is 4"),
        ({2: {"split.tensors.count": 7}}, r"split.tensors.count is 7, the 3 parts have 25 tensors"),
        ({1: {"split.count": "three"}}, r"split.count is 'three'"),
        ({3: {"general.architecture": "llama"}}, r"general.architecture is not what m-00001"),
    ],
)
def test_parts_that_disagree_are_refused(tmp_path, changes, message):
    first = split(tmp_path / "parts", changes)
    with pytest.raises(ConversionError, match=message):
        convert(first, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensor_in_two_parts_is_refused(tmp_path):
    first = split(tmp_path / "parts")
    parts = tiny_gguf.tensors(SPEC, hf.weights(SPEC))
    values = {"split.no": 1, "split.count": 3, "split.tensors.count": len(parts)}
    twice = dict(list(parts.items())[4:9])
    gguf.write(tmp_path / "parts" / name(2), values, twice)
    with pytest.raises(ConversionError, match=rf"{next(iter(twice))} is also in m-00001"):
        convert(first, tmp_path / "out")


def test_parts_with_groups_of_different_sizes_are_refused(tmp_path):
    """Id 42 means groups of 64 or of 128: not both in one model."""
    parts = tiny_gguf.tensors(SPEC, hf.weights(SPEC))
    rng = np.random.default_rng(0)
    names = list(parts)
    for at, group in ((1, 64), (-3, 128)):
        shape = (64, 128)
        trits = rng.integers(-1, 2, shape)
        parts[names[at]] = gguf.ternary(trits, np.ones((64, 128 // group)), group, 42)
    values = {"split.count": 2, "split.tensors.count": len(names)}
    whole = tiny_gguf.metadata(SPEC)
    half = {n: parts[n] for n in names[:9]}, {n: parts[n] for n in names[9:]}
    gguf.write(tmp_path / "m-00001-of-00002.gguf", {**whole, **values, "split.no": 0}, half[0])
    gguf.write(tmp_path / "m-00002-of-00002.gguf", {**values, "split.no": 1}, half[1])
    with pytest.raises(
        ConversionError, match=r"groups of different sizes: .* Q2_0, .* Q2_0 of 128"
    ):
        convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out")


def test_one_part_of_one_is_a_whole_file(tmp_path):
    values = {**tiny_gguf.metadata(SPEC), "split.no": 0, "split.count": 1}
    gguf.write(tmp_path / name(1, 1), values, tiny_gguf.tensors(SPEC, hf.weights(SPEC)))
    convert(tmp_path / name(1, 1), tmp_path / "out")
