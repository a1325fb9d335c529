"""What a checkpoint must have before it runs: a config we know, every tensor and none more."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import Tiny

from bonsai import backends, models
from bonsai.backends.reference.ops import ReferenceOps
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.models import llama, qwen3

SPEC = Tiny(hidden=64, ffn=96, heads=2, head_dim=32, vocab=100, group=32)


def load(folder: Path) -> models.Model:
    with Checkpoint.open(folder) as checkpoint:
        return models.load(checkpoint, ReferenceOps())


def test_an_unknown_architecture_is_named_and_not_remembered(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", replace(SPEC, architecture="qwen9"))
    with pytest.raises(UnsupportedModel) as caught:
        load(folder)
    expected = f"architecture qwen9 is not supported; supported: {', '.join(models.NAMES)}"
    assert str(caught.value) == expected
    shutil.rmtree(folder)
    assert load(tiny.write(folder, SPEC)).config.vocab == 100


def test_every_architecture_can_be_imported() -> None:
    for name in models.NAMES:
        assert callable(models.architecture(name).forward)


@pytest.mark.parametrize(("change", "words"), [
    ({"architecture": "llama"}, ["architecture", "llama"]),
    ({"activation": "relu2"}, ["activation", "relu2", "silu"]),
    ({"layers": 0}, ["layers", "0"]),
    ({"layers": "2"}, ["layers", "'2'"]),
    ({"hidden": True}, ["hidden", "True"]),
    ({"vocab": 2**40}, ["vocab"]),
    ({"heads": 3, "kv_heads": 2}, ["3 heads", "2 kv_heads"]),
    ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
    ({"norm_eps": float("nan")}, ["norm_eps", "nan"]),
    ({"tied": 1}, ["tied", "1"]),
    ({"tied": None}, ["tied"]),
    ({"rope": None}, ["rope", "missing"]),
    ({"rope": 1e4}, ["rope"]),
    ({"rope": {"theta": 1e4, "dims": 33}}, ["rope", "33"]),
    ({"rope": {"theta": 1e4, "dims": 64}}, ["rope", "64", "32"]),
    ({"rope": {"dims": 32}}, ["rope", "theta"]),
    ({"rope": {"theta": 1e4, "dims": 32, "kind": "llama3"}}, ["rope", "kind"]),
    ({"rope": {"theta": 1e4, "dims": 32, "yarn": {"factor": 4.0}}}, ["yarn", "original_context"]),
    ({"eos": 5}, ["eos", "5"]),
    ({"eos": [100]}, ["eos", "100"]),
    ({"eos": [True]}, ["eos", "True"]),
    ({"context": -1}, ["context", "-1"]),
    ({"window": 128}, ["unknown keys", "window"]),
    ({"model_file": "x.py"}, ["unknown keys", "model_file"]),
])  # fmt: skip
def test_a_config_that_we_cannot_honour_is_refused_by_key(change: dict, words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        qwen3.read_config({**tiny.config(SPEC), **change})
    for word in ["config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "key", sorted(set(tiny.config(SPEC)) - {"eos", "activation", "architecture"})
)
def test_a_missing_key_is_named(key: str) -> None:
    config = tiny.config(SPEC)
    del config[key]
    with pytest.raises(UnsupportedModel, match=f"'{key}' is missing"):
        qwen3.read_config(config)


def test_a_config_is_read_whole() -> None:
    cfg = llama.read_config(tiny.config(replace(SPEC, architecture="llama", eos=(5, 7))))
    assert (cfg.layers, cfg.hidden, cfg.ffn, cfg.heads, cfg.kv_heads) == (2, 64, 96, 2, 1)
    assert (cfg.eos, cfg.context, cfg.tied, cfg.qk_norm) == ((5, 7), 4096, True, False)
    assert qwen3.read_config(tiny.config(SPEC)).qk_norm


def edited(tmp_path: Path, spec: Tiny, edit) -> Path:
    made = tiny.weights(spec)
    edit(made)
    return tiny.save(tmp_path / "m", spec, made)


@pytest.mark.parametrize("name", [
    "embedding", "norm", "layers.1.attn.k", "layers.0.ffn.down", "layers.1.ffn_norm",
    "layers.0.attn.q_norm",
])  # fmt: skip
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = edited(
        tmp_path, SPEC, lambda made: (made.matrices.pop(name, 0), made.vectors.pop(name, 0))
    )
    with pytest.raises(FormatError, match=f"no tensor '{name}'"):
        load(folder)


@pytest.mark.parametrize(("change", "tensor", "found", "needed"), [
    ({"vocab": 101}, "embedding", "100 x 64", "101 x 64"),
    ({"hidden": 96}, "embedding", "100 x 64", "100 x 96"),
    ({"kv_heads": 2}, "layers.0.attn.k", "32 x 64", "64 x 64"),
    ({"ffn": 128}, "layers.0.ffn.gate", "96 x 64", "128 x 64"),
])  # fmt: skip
def test_a_shape_that_is_not_the_config_s_is_named(
    tmp_path: Path, change: dict, tensor: str, found: str, needed: str
) -> None:
    folder = tiny.save(tmp_path / "m", replace(SPEC, **change), tiny.weights(SPEC))
    with pytest.raises(FormatError) as caught:
        load(folder)
    assert f"{tensor} is {found}, the config needs {needed}" in str(caught.value)
    assert caught.value.hint


def test_tensors_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"11 tensors .* does not use: layers\.2\.attn\.q"):
        load(tiny.save(tmp_path / "m", SPEC, tiny.weights(replace(SPEC, layers=3))))


def test_q_norms_in_a_llama_are_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, architecture="llama")
    with pytest.raises(FormatError, match=r"4 tensors .* layers\.0\.attn\.q_norm"):
        load(tiny.save(tmp_path / "m", spec, tiny.weights(SPEC)))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_a_head_is_refused(tmp_path: Path, same: bool) -> None:
    def add_head(made: tiny.Weights) -> None:
        source = "embedding" if same else "layers.0.attn.q"
        made.matrices["head"] = replace(made.matrices[source], name="head")

    with pytest.raises(FormatError, match="\"tied\": true, and there is a tensor 'head'"):
        load(edited(tmp_path, SPEC, add_head))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, tied=False)
    with pytest.raises(FormatError, match="\"tied\": false, but there is no tensor 'head'"):
        load(edited(tmp_path, spec, lambda made: made.matrices.pop("head")))


def test_a_packed_norm_is_refused(tmp_path: Path) -> None:
    def pack_norm(made: tiny.Weights) -> None:
        del made.vectors["norm"]
        made.matrices["norm"] = tiny.matrix(tiny.Random(0), 1, 64, "t2", 32, name="norm")

    with pytest.raises(FormatError, match="norm is 1 x 64, the config needs 64"):
        load(edited(tmp_path, SPEC, pack_norm))


def test_a_failed_load_can_be_repeated_after_repair(tmp_path: Path) -> None:
    folder = edited(tmp_path, SPEC, lambda made: made.vectors.pop("norm"))
    for _ in range(2):
        with pytest.raises(FormatError):
            load(folder)
    shutil.rmtree(folder)
    assert load(tiny.write(folder, SPEC)).config.layers == 2


def test_progress_counts_blocks(tmp_path: Path) -> None:
    calls = []
    with Checkpoint.open(tiny.write(tmp_path / "m", SPEC)) as checkpoint:
        models.load(checkpoint, ReferenceOps(), lambda *call: calls.append(call))
    assert calls == [("load", 0, 2), ("load", 1, 2), ("load", 2, 2)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_a_file_that_is_cut_or_rewritten_is_an_error_at_the_next_forward(
    tmp_path: Path, backend: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write(tmp_path / "m", replace(SPEC, container=container))
    monkeypatch.chdir(tmp_path)
    file = folder / ("model.npz" if container == "npz" else "model.safetensors")
    size = file.stat().st_size
    with Checkpoint.open("m") as checkpoint:
        engine = backends.get(backend).load(checkpoint)
    monkeypatch.chdir(tmp_path.parent)
    with engine.session(64, 100) as session:
        session.prefill([1, 2])
        os.utime(file, (1, 1))  # as after an overwrite in place with as many bytes
        with pytest.raises(FormatError, match="changed while it was in use"):
            session.prefill([3])
        os.truncate(file, size - 5000)
        with pytest.raises(FormatError, match=f"{size} bytes when it was opened, {size - 5000} "):
            session.logits()


@pytest.mark.skipif(os.name == "nt", reason="Windows holds on to files that are mapped")
def test_a_file_that_is_replaced_or_deleted_keeps_its_bytes(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", SPEC)
    with Checkpoint.open(folder) as checkpoint:
        engine = backends.get("cpu").load(checkpoint)
    with engine.session(64, 100) as session:
        session.prefill([1, 2])
        before = session.logits()
        other = tiny.write(tmp_path / "other", replace(SPEC, seed=SPEC.seed + 1))
        os.replace(other / "model.safetensors", folder / "model.safetensors")
        session.rewind(0)
        session.prefill([1, 2])
        assert (session.logits() == before).all()
        shutil.rmtree(folder)
        session.rewind(0)
        session.prefill([1, 2])
        assert (session.logits() == before).all()
