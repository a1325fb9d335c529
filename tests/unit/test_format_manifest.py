"""The manifest: read exactly, and refused by name where it says what we do not know."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from bonsai.errors import BonsaiError, FormatError, UnsupportedModel
from bonsai.format import Hadamard, Manifest, TensorEntry
from bonsai.format.manifest import FileEntry

DIGEST = "0123456789abcdef" * 4
GOOD: dict[str, Any] = {
    "format": "bonsai",
    "version": 1,
    "architecture": "qwen3",
    "created_by": "bonsai-lm 0.1.0",
    "source": {"kind": "gguf", "files": [{"name": "a.gguf", "bytes": 7, "sha256": DIGEST}]},
    "tensors": {
        "embedding": {"packing": "t2", "shape": [10, 256], "group": 128, "zeros": 0.25},
        "norm": {"packing": "f32", "shape": [256]},
        "layers.0.ffn.up": {
            "packing": "t5",
            "shape": [8, 256],
            "group": 64,
            "planes": 1,
            "transform": "hadamard",
        },
    },
    "hadamard": {"block": 128, "widths": [256], "proof": {"matrix": "layers.0.ffn.up"}},
    "files": {"config.json": {"bytes": 3, "sha256": DIGEST}},
    "sampling": {"temperature": 0.7, "top_k": 20},
    "tokenizer": {"size": 151669},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with the value at a slash-separated path replaced, or removed when it is `...`."""
    manifest = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place = manifest
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return manifest


def error(manifest: Any) -> BonsaiError:
    with pytest.raises((FormatError, UnsupportedModel)) as info:
        Manifest.read(manifest, "x/manifest.json")
    assert str(info.value).startswith("x/manifest.json: ") and len(str(info.value)) < 400
    return info.value


def test_every_key_is_read() -> None:
    manifest = Manifest.read(GOOD)
    assert manifest.architecture == "qwen3" and manifest.created_by == "bonsai-lm 0.1.0"
    assert list(manifest.tensors) == ["embedding", "norm", "layers.0.ffn.up"]
    assert manifest.tensors["embedding"] == TensorEntry("t2", (10, 256), 128, 0.25)
    assert manifest.tensors["norm"] == TensorEntry("f32", (256,))
    assert manifest.tensors["layers.0.ffn.up"].transform == "hadamard"
    assert manifest.hadamard == Hadamard(128, (256,), "layers.0.ffn.up")
    assert manifest.files == {"config.json": FileEntry(3, DIGEST)}
    assert manifest.source is not None and manifest.source.kind == "gguf"
    assert manifest.source.files == {"a.gguf": FileEntry(7, DIGEST)}
    assert manifest.sampling == {"temperature": 0.7, "top_k": 20}
    assert manifest.tokenizer_size == 151669


def test_a_manifest_cannot_be_changed() -> None:
    manifest = Manifest.read(GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.architecture = "llama"
    with pytest.raises(TypeError):
        manifest.tensors["x"] = manifest.tensors["norm"]


def test_optional_keys_may_be_absent() -> None:
    values = {key: GOOD[key] for key in GOOD if key not in ("source", "sampling", "tokenizer")}
    manifest = Manifest.read(values)
    assert manifest.source is manifest.sampling is manifest.tokenizer_size is None


UP = "tensors/layers.0.ffn.up"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("version", 2, ["version 2", "reads version 1"]),
        ("packing_v2", {}, ["unknown keys: packing_v2"]),
        ("tensors/embedding/packing", "t3", ["embedding", "'t3'", "supported: t2, t5, b1, q4"]),
        ("tensors/embedding/group", 100, ["embedding", "group 100", "supported: 32, 64"]),
        (f"{UP}/group", 32, ["layers.0.ffn.up", "group 32 of packing t5", "64, 128, 256"]),
        ("tensors/embedding/group", ..., ["embedding", "'group' is missing"]),
        ("tensors/embedding/group", "128", ["embedding", "'128'", "expected int"]),
        ("tensors/embedding/planes", 2, ["embedding", "2 planes", "supported: 1"]),
        ("tensors/embedding/rotation", "x", ["embedding", "unknown keys: rotation"]),
        ("tensors/norm/group", 128, ["norm", "unknown keys: group"]),
        (f"{UP}/transform", "dct", ["layers.0.ffn.up", "'dct'", "supported: hadamard"]),
        ("tokenizer/size", 0, ["tokenizer", "'size' is 0"]),
        ("tokenizer/kind", "bpe", ["tokenizer", "unknown keys: kind"]),
        ("sampling/typical_p", 1.0, ["sampling", "unknown keys: typical_p"]),
        ("sampling/top_k", 2.5, ["sampling", "'top_k' is 2.5"]),
        ("hadamard/seed", 1, ["hadamard", "unknown keys: seed"]),
        ("source/url", "x", ["source", "unknown keys: url"]),
        ("architecture", 3, ["'architecture' is 3"]),
        ("created_by", ..., ["'created_by' is missing"]),
    ],
)
def test_what_we_do_not_know_is_unsupported_by_name(path: str, value: Any, expected: list) -> None:
    found = error(changed(path, value))
    assert isinstance(found, UnsupportedModel)
    for part in expected:
        assert part in str(found)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("format", "gguf", ["'gguf'", "expected 'bonsai'"]),
        ("format", ..., ["None", "expected 'bonsai'"]),
        ("tensors", {}, ["'tensors' is not an object with entries"]),
        ("tensors", [1], ["'tensors' is not an object with entries"]),
        ("files", {}, ["'files' is not an object with entries"]),
        ("tensors/_pad.0", {"packing": "f32", "shape": [1]}, ["'_pad.0' cannot be the name"]),
        ("tensors/hadamard.x", {"packing": "f32", "shape": [1]}, ["'hadamard.x' cannot be"]),
        ("tensors/a b", {"packing": "f32", "shape": [1]}, ["'a b' cannot be the name"]),
        ("tensors/..", {"packing": "f32", "shape": [1]}, ["'..' cannot be the name"]),
        ("tensors/a\0", {"packing": "f32", "shape": [1]}, ["'a\\x00' cannot be the name"]),
        ("tensors/norm/shape", [0], ["norm", "[0]", "positive"]),
        ("tensors/norm/shape", [], ["norm", "[]"]),
        ("tensors/norm/shape", 256, ["norm", "256"]),
        ("tensors/norm/shape", [1, 1, 1, 1, 1], ["norm", "1 to 4"]),
        ("tensors/norm/shape", [2**31], ["norm", str(2**31)]),
        ("tensors/norm/shape", [True], ["norm", "True"]),
        ("tensors/norm/shape", [2**30, 2**30], ["norm", "too many elements"]),
        ("tensors/embedding/shape", [10], ["embedding", "[10]", "matrix in t2"]),
        ("tensors/embedding/zeros", 1.5, ["embedding", "1.5", "fraction"]),
        ("tensors/embedding/zeros", "a", ["embedding", "'a'", "fraction"]),
        ("tensors/norm/zeros", 0.5, ["norm", "t2 and t5 only"]),
        ("tensors/norm/transform", "hadamard", ["norm", "not a matrix"]),
        ("files/config.json/sha256", "abc", ["config.json", "'abc'"]),
        ("files/config.json/sha256", DIGEST.upper(), ["config.json", "not a size and a hash"]),
        ("files/config.json/bytes", -1, ["config.json", "-1 bytes"]),
        ("source/files", {}, ["source", "'files' is not a list"]),
        ("hadamard/block", 100, ["hadamard", "'block' is 100", "power of two"]),
        ("hadamard/widths", [200], ["hadamard", "[200]", "multiples of the block 128"]),
        ("hadamard/widths", [], ["hadamard", "'widths' is []"]),
        ("hadamard/widths", [256, 256], ["hadamard", "[256, 256]"]),
        ("hadamard/widths", [512], ["layers.0.ffn.up", "width 256", "declared for: 512"]),
        ("hadamard", ..., ["layers.0.ffn.up", "width 256", "declared for: none"]),
        ("hadamard/proof/matrix", "norm", ["'norm' is not transformed"]),
        ("hadamard/proof/matrix", "x", ["'x' is not transformed"]),
    ],
)
def test_what_cannot_be_is_a_format_error(path: str, value: Any, expected: list) -> None:
    found = error(changed(path, value))
    assert isinstance(found, FormatError), found
    for part in expected:
        assert part in str(found)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_tensor_that_is_no_object_is_refused(value: Any) -> None:
    assert "norm: expected an object" in str(error(changed("tensors/norm", value)))
