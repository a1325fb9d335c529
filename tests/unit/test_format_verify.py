"""`verify` reads everything and reports each thing that is wrong, by file or tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mutate
import numpy as np
import pytest
import tiny

from bonsai.errors import ModelNotFound
from bonsai.format import Checkpoint, CheckpointWriter, Finding, verify
from bonsai.format.npz_io import NpzFile
from bonsai.format.safetensors_io import SafetensorsFile
from bonsai.matrix import PackedMatrix

SPEC = tiny.Tiny(layers=1, ffn=192, vocab=60)
DOWN = "layers.0.ffn.down"  # 192 columns: the second group of 128 is padded


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "m", SPEC)


def findings(path: Path) -> list[tuple[str, str]]:
    report = verify(path)
    assert report.ok == (not report.findings) and report.path == path
    return [(finding.where, finding.problem) for finding in report.findings]


def poke(path: Path, plane: str, offset: int, data: bytes) -> None:
    """Change bytes of a plane, and the manifest's hashes with them."""
    (file,) = path.glob("model.*")
    opened = NpzFile(file) if file.suffix == ".npz" else SafetensorsFile(file)
    place = opened.info(plane).offset + offset
    opened.close()
    mutate.put(file, place, data)
    mutate.reseal(path)


@pytest.mark.parametrize("packing", ["t2", "t5", "b1", "q4", "q8", "f16", "bf16"])
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_good_checkpoints_have_no_findings(tmp_path: Path, packing: str, container: str) -> None:
    spec = tiny.Tiny(layers=1, ffn=192, vocab=37, packing=packing, container=container)
    report = verify(tiny.write(tmp_path / "m", spec))
    assert report.findings == () and report.ok
    assert report.files == 2 and report.tensors == 13


def test_findings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Finding("a", "b").where = "c"
    assert str(Finding("a", "b")) == "a: b"


def test_a_path_that_is_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        verify(tmp_path / "none")


def test_a_folder_without_a_good_manifest_is_a_finding(model: Path) -> None:
    (model / "manifest.json").write_text("{")
    ((where, problem),) = findings(model)
    assert where == "manifest.json" and "not valid JSON" in problem
    (model / "manifest.json").unlink()
    ((where, problem),) = findings(model)
    assert where == "m" and "no manifest.json" in problem


def test_every_damaged_file_is_found(tmp_path: Path) -> None:
    spec = tiny.Tiny(layers=1, vocab=100, shard_bytes=20_000)
    path = tiny.write(tmp_path / "m", spec, {"tokenizer.json": b"{}", "chat_template.jinja": b"x"})
    mutate.flip(path / "model-00001-of-00003.safetensors")
    mutate.flip(path / "model-00003-of-00003.safetensors")
    mutate.pad(path / "tokenizer.json")
    (path / "chat_template.jinja").unlink()
    found = dict(findings(path))
    assert set(found) == {
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert "sha256 is" in found["model-00001-of-00003.safetensors"]
    assert "9 bytes, manifest.json says 2" in found["tokenizer.json"]
    assert found["chat_template.jinja"] == "the file is missing"
    assert len(list(path.glob("*.safetensors"))) == 3  # the good ones stay


def test_a_cut_file_is_one_finding(model: Path) -> None:
    mutate.cut(model / "model.safetensors", 100)
    ((where, problem),) = findings(model)
    assert where == "model.safetensors" and "bytes, manifest.json says" in problem


def test_planes_that_do_not_fit_are_a_finding(model: Path) -> None:
    mutate.edit_json(model / "manifest.json", lambda m: m["tensors"][DOWN].update(group=64))
    ((where, problem),) = findings(model)
    assert where == "model.safetensors"
    assert f"{DOWN}.codes is U32 [128, 16], manifest.json needs U32 [128, 12]" in problem
    assert "groups of 128, the manifest says 64" in problem


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_scales_that_are_not_finite_are_found(model: Path, value: float) -> None:
    poke(model, f"{DOWN}.scales", 10, np.float16(value).tobytes())
    poke(model, "norm", 8, np.float32(value).tobytes())
    assert findings(model) == [
        (f"{DOWN}.scales", "has values that are not finite"),
        ("norm", "has values that are not finite"),
    ]


def test_bf16_values_that_are_not_finite_are_found(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", dataclasses.replace(SPEC, packing="bf16", container="npz"))
    poke(path, DOWN, 20, np.uint16(0x7F80).tobytes())
    assert findings(path) == [(DOWN, "has values that are not finite")]


def test_codes_3_are_counted(model: Path) -> None:
    poke(model, f"{DOWN}.codes", 0, b"\xff\x03")
    assert findings(model) == [(f"{DOWN}.codes", "has 5 codes 3")]


@pytest.mark.parametrize(("offset", "byte"), [(0, 1), (23, 237), (24, 1), (25, 49)])
def test_impossible_t5_bytes_are_counted(tmp_path: Path, offset: int, byte: int) -> None:
    """The last two of the 26 bytes of a group hold four trits: 49 is 01201, which is five."""
    path = tiny.write(tmp_path / "m", dataclasses.replace(SPEC, packing="t5"))
    poke(path, f"{DOWN}.codes", offset, bytes([byte]))
    assert findings(path) == [(f"{DOWN}.codes", "has 1 bytes that no five trits make")]


@pytest.mark.parametrize(("packing", "last"), [("t2", 2 << 6), ("b1", 128)])
def test_padding_that_is_not_empty_is_found(tmp_path: Path, packing: str, last: int) -> None:
    path = tiny.write(tmp_path / "m", dataclasses.replace(SPEC, packing=packing))
    with Checkpoint.open(path) as opened:
        codes = opened.planes(DOWN)[f"{DOWN}.codes"]
        row = codes.shape[1] * 4
        value = bytes([int(codes.view(np.uint8)[5, -1]) & 63 | last])
    poke(path, f"{DOWN}.codes", 6 * row - 1, value)
    problem = "has padding after column 192 that is not empty"
    assert findings(path) == [(f"{DOWN}.codes", problem)]


def test_a_false_zero_fraction_is_found(model: Path) -> None:
    def change(manifest: dict) -> None:
        manifest["tensors"][DOWN]["zeros"] += 1 / (128 * 192)

    mutate.edit_json(model / "manifest.json", change)
    ((where, problem),) = findings(model)
    assert where == f"{DOWN}.codes"
    assert "zero fraction is 0.3" in problem and "manifest.json says 0.3" in problem


def test_a_changed_trit_changes_the_zero_fraction(model: Path) -> None:
    """What resealed hashes hide, the fraction may still show."""
    with Checkpoint.open(model) as opened:
        first = int(opened.planes(DOWN)[f"{DOWN}.codes"].view(np.uint8)[0, 0])
    other = first ^ 1 if first & 3 == 0 else first & 0xFC | (0 if first & 3 == 1 else 1)
    poke(model, f"{DOWN}.codes", 0, bytes([other]))
    assert "zero fraction" in findings(model)[0][1]


def proven(path: Path, container: str = "safetensors") -> tuple[Path, PackedMatrix]:
    """A checkpoint with a transformed matrix and a proof from an explicit Hadamard matrix."""
    rng = np.random.default_rng(7)
    transform = tiny.signs(rng, 64, 128)
    matrix = tiny.matrix(rng, 300, 128, transform=transform, name="w")
    assert isinstance(matrix, PackedMatrix)
    x = rng.standard_normal(128).astype(np.float32)
    ones = [[(-1) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]
    turned = np.kron(np.eye(2), np.array(ones) / 8) @ (x * transform.signs)
    with CheckpointWriter(path, container) as writer:
        writer.matrix(matrix)
        writer.proof("w", x, (matrix.rows() @ turned).astype(np.float32))
        writer.finish(architecture="qwen3", config={"a": 1})
    return path, matrix


@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_a_true_proof_is_accepted(tmp_path: Path, container: str) -> None:
    path, _ = proven(tmp_path / "m", container)
    assert findings(path) == []
    with Checkpoint.open(path) as opened:
        proof = opened.proof()
        assert proof is not None and proof[0] == "w"
        assert proof[1].shape == (128,) and proof[2].shape == (300,)


@pytest.mark.parametrize("column", [0, 77])
def test_one_false_sign_is_found(tmp_path: Path, column: int) -> None:
    path, matrix = proven(tmp_path / "m")
    assert matrix.transform is not None
    poke(path, "hadamard.signs.128", column, np.int8(-matrix.transform.signs[column]).tobytes())
    ((where, problem),) = findings(path)
    assert where == "w" and "differs from the stored proof by" in problem


def test_another_block_is_found(tmp_path: Path) -> None:
    path, _ = proven(tmp_path / "m")
    mutate.edit_json(path / "manifest.json", lambda m: m["hadamard"].update(block=32))
    assert "differs from the stored proof" in findings(path)[0][1]


def test_one_false_scale_is_found(tmp_path: Path) -> None:
    path, matrix = proven(tmp_path / "m")
    half = np.float16(matrix.scales[3, 0] / 2)
    poke(path, "w.scales", 6, half.tobytes())
    assert "differs from the stored proof" in findings(path)[0][1]


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_proof_that_proves_nothing_is_found(tmp_path: Path, value: float) -> None:
    path, _ = proven(tmp_path / "m")
    poke(path, "hadamard.proof.input", 0, np.full(128, value, np.float32).tobytes())
    poke(path, "hadamard.proof.output", 0, np.full(300, value, np.float32).tobytes())
    assert findings(path) != []


def test_progress_counts_bytes_and_then_tensors(model: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    verify(model, progress=lambda *step: steps.append(step))
    total = sum(path.stat().st_size for path in model.iterdir() if path.name != "manifest.json")
    assert ("hash", total, total) in steps and steps[-1] == ("tensors", 13, 13)
