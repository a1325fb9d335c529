"""Indexes and shards: what is missing is named, and no name leaves the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import mutate
import numpy as np
import pytest

from bonsai.errors import FormatError
from bonsai.format.files import child, read_small
from bonsai.format.shards import INDEX, ShardedTensors

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: a and b in the first, c in the second."""
    folder = tmp_path / "m"
    folder.mkdir()
    shard(folder / ONE, a=1, b=2)
    shard(folder / TWO, c=3)
    places = {"a": ONE, "b": ONE, "c": TWO}
    index = {"metadata": {"total_size": 12}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def shard(path: Path, **values: float) -> None:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(values)
    }
    mutate.safetensors(path, header, np.array(list(values.values()), "<f4").tobytes())


def error(folder: Path) -> str:
    with pytest.raises(FormatError) as info:
        ShardedTensors(folder)
    assert str(folder) in str(info.value)
    return str(info.value)


def place(folder: Path, **changes: str | None) -> None:
    """Change the index; None removes an entry."""

    def change(index: dict) -> None:
        for name, shard in changes.items():
            index["weight_map"].pop(name, None)
            if shard is not None:
                index["weight_map"][name] = shard

    mutate.edit_json(folder / INDEX, change)


def test_tensors_of_all_shards(folder: Path) -> None:
    tensors = ShardedTensors(folder)
    assert tensors.names() == ["a", "b", "c"]
    assert [float(tensors.array(name)[0]) for name in tensors.names()] == [1, 2, 3]
    assert [path.name for path in tensors.files] == [ONE, TWO]
    assert tensors.info("c").file == folder / TWO
    with pytest.raises(FormatError, match="no tensor 'd'"):
        tensors.array("d")
    tensors.release("a")
    tensors.close()


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    shard(tmp_path / "model.safetensors", a=1)
    assert ShardedTensors(tmp_path).names() == ["a"]


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / TWO).unlink()
    assert f"{INDEX}: the shard '{TWO}' is missing" in error(folder)


def test_a_tensor_that_is_in_another_shard_is_named(folder: Path) -> None:
    place(folder, a=TWO, c=ONE)
    assert f"tensor 'a' is not in its shard '{TWO}', but in '{ONE}'" in error(folder)


def test_a_tensor_that_is_nowhere_is_named(folder: Path) -> None:
    place(folder, ghost=TWO)
    assert "tensor 'ghost' is in none of the 2 shards" in error(folder)


def test_a_tensor_that_the_index_lacks_is_named(folder: Path) -> None:
    place(folder, b=None)
    assert f"tensor 'b' of '{ONE}' is not in the index" in error(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    shard(folder / TWO, c=3, a=1)
    assert f"tensor 'a' is in both '{ONE}' and '{TWO}'" in error(folder)


def test_a_missing_index_is_named(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"2 shards ({ONE}, ...) but no {INDEX}" in error(folder)


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    assert "model.safetensors: the file is missing" in error(tmp_path)


def test_an_index_beside_a_single_file_is_refused(folder: Path) -> None:
    shard(folder / "model.safetensors", a=1)
    assert "both model.safetensors and" in error(folder)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {}}, "'weight_map' has no entries"),
        ({}, "'weight_map' is not an object"),
        ({"weight_map": ["a"]}, "'weight_map' is not an object"),
        ({"weight_map": {"a": 3}}, "'weight_map' is not an object of file names"),
    ],
)
def test_an_empty_index_is_refused(folder: Path, index: dict, expected: str) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    assert expected in error(folder)


@pytest.mark.parametrize("count", [1, 100])
def test_a_cut_shard_is_named(folder: Path, count: int) -> None:
    mutate.cut(folder / TWO, count)
    assert f"{TWO}: " in error(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/hostname",
        "a/../../x",
        "sub/x.safetensors",
        "..\\x",
        "sub\\x",
        "C:x",
        "C:\\x",
        "\\\\server\\share",
        "a\0.safetensors",
        "a\n.safetensors",
        "",
        ".",
        "..",
        "~",
        ".hidden",
        "x.safetensors.",
        "x.safetensors ",
        "x" * 300,
        "na\u00efve.safetensors",
    ],
)
def test_names_that_leave_the_folder_are_refused_unopened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(folder, c=name)
    opened: list[str] = []
    real = open

    def watched(path, *args, **kwargs):
        opened.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", watched)
    text = error(folder)
    assert "is not a plain file name" in text and INDEX in text
    assert opened == [str(folder / INDEX)]


def link(target: Path, place: Path) -> None:
    try:
        place.symlink_to(target)
    except (OSError, NotImplementedError):
        pytest.skip("cannot make symbolic links here")


def test_a_link_that_leaves_the_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / TWO).rename(outside)
    link(outside, folder / TWO)
    text = error(folder)
    assert f"'{TWO}' is a link that leaves the folder, to {outside}" in text


def test_a_link_through_a_linked_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    (folder / TWO).rename(outside / "x")
    link(outside, folder / "sub")
    link(Path("sub") / "x", folder / TWO)
    assert "is a link that leaves the folder" in error(folder)


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / TWO).rename(folder / "sub" / "x")
    link(Path("sub") / "x", folder / TWO)
    assert ShardedTensors(folder).names() == ["a", "b", "c"]


def test_a_folder_that_is_a_link_itself_is_followed(folder: Path) -> None:
    link(folder, folder.parent / "alias")
    assert ShardedTensors(folder.parent / "alias").names() == ["a", "b", "c"]


def cached(folder: Path, blobs: str = "blobs") -> Path:
    """The folder as the Hugging Face cache keeps it: links to blobs beside snapshots."""
    repository = folder.parent / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / blobs).mkdir()
    for path in list(folder.iterdir()):
        path.rename(repository / blobs / f"blob-{path.name}")
        link(Path("..") / ".." / blobs / f"blob-{path.name}", snapshot / path.name)
    return snapshot


def test_links_into_the_blobs_of_the_same_repository_are_followed(folder: Path) -> None:
    assert ShardedTensors(cached(folder)).names() == ["a", "b", "c"]


def test_links_into_anything_else_beside_the_snapshots_are_refused(folder: Path) -> None:
    assert "is a link that leaves the folder" in error(cached(folder, "other"))


def test_links_into_the_blobs_of_another_repository_are_refused(folder: Path) -> None:
    snapshot = cached(folder)
    other = snapshot.parents[2] / "models--owner--other" / "blobs"
    other.mkdir(parents=True)
    shard(other / "x", c=3)
    (snapshot / TWO).unlink()
    link(other / "x", snapshot / TWO)
    assert "is a link that leaves the folder" in error(snapshot)


def test_a_link_to_itself_is_one_clear_error(folder: Path) -> None:
    (folder / TWO).unlink()
    link(folder / TWO, folder / TWO)
    assert TWO in error(folder)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: None])
def test_small_files_that_are_not_there(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.json")
    with pytest.raises(FormatError, match=r"x.json: the file is missing"):
        read_small(child(tmp_path, "x.json", "test"))


def test_small_files_have_a_limit_and_no_impostors(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(FormatError, match=r"x.json: 5 bytes, at most 4 are accepted"):
        read_small(path, 4)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FormatError, match="git-LFS pointer") as info:
        read_small(path)
    assert info.value.hint == "git lfs pull"


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="needs POSIX modes")
def test_an_unreadable_file_is_one_clear_error(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (folder / TWO).chmod(0)
    assert f"{TWO}: cannot be read: Permission denied" in error(folder)
