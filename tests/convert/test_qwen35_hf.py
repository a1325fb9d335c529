"""Qwen3.5 hybrids in Hugging Face folders and MLX packs: norms, names, folds, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gguf_writer as gguf
import hf_writer as hf
import numpy as np
import pytest
import tiny
import tiny_qwen35 as made_by
from hybrid import QUANTIZATION, config, mlx_tensors, pack_config, raw, sanitized
from numpy.testing import assert_allclose
from test_qwen35_gguf import FAR, logits, truth
from tiny_qwen35 import SPEC
from tolerances import EXACT, F32_MODEL

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.errors import BonsaiError, ConversionError, UnsupportedModel
from bonsai.format import Checkpoint, verify
from bonsai.sampling import Sampling

FOLDED = replace(SPEC, packing="t2", hadamard=64)
MTP = {
    "mtp.fc.weight": np.ones((128, 256), np.float32),
    "mtp.norm.weight": np.ones(128, np.float32),
    "mtp.layers.0.input_layernorm.weight": np.ones(128, np.float32),
}


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    made = tiny.weights(SPEC)
    hf.write(tmp_path / "hf", SPEC, raw(SPEC, made), config(SPEC), shards=3)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.warnings == ()
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.config == {**tiny.config(SPEC), "eos": [257]}
        assert set(checkpoint.names()) == {*made.matrices, *made.vectors}
        for name in ("layers.0.gdn.conv", "layers.0.gdn.norm", "layers.0.gdn.a_log"):
            assert_allclose(checkpoint.vector(name), made.vectors[name], **EXACT)
        for name in ("norm", "layers.1.attn_norm", "layers.3.attn.q_norm"):
            assert_allclose(checkpoint.vector(name), made.vectors[name], rtol=0, atol=1e-6)
    assert_allclose(logits(tmp_path / "out"), truth(SPEC, made), **F32_MODEL)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("form", [raw, sanitized])
def test_norms_are_shifted_once_whatever_else_is_in_the_file(
    tmp_path: Path, form: Callable[..., dict], drafts: bool
) -> None:
    """Neither their values nor the tensors that draft tokens decide, and a second time is none."""
    made = tiny.weights(SPEC)
    tensors = {**form(SPEC, made), **(MTP if drafts else {})}
    hf.write(tmp_path / "hf", SPEC, tensors, config(SPEC))
    report = convert(tmp_path / "hf", tmp_path / "first")
    assert any("3 tensors that draft tokens" in line for line in report.warnings) == drafts
    convert(tmp_path / "first", tmp_path / "second")
    assert_allclose(logits(tmp_path / "first"), truth(SPEC, made), **F32_MODEL)
    assert_allclose(logits(tmp_path / "second"), logits(tmp_path / "first"), **EXACT)


@pytest.mark.parametrize("form", [raw, sanitized])
def test_a_shift_too_many_or_too_few_is_far_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[..., dict]
) -> None:
    made = tiny.weights(SPEC)
    tensors = form(SPEC, made)
    for name in tensors:  # the other layout under the same norms
        if name.endswith("conv1d.weight"):
            tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
    hf.write(tmp_path / "hf", SPEC, tensors, config(SPEC))
    convert(tmp_path / "hf", tmp_path / "out")
    assert np.abs(logits(tmp_path / "out") - truth(SPEC, made)).max() > FAR


def test_the_text_of_a_model_for_images(tmp_path: Path) -> None:
    made = tiny.weights(SPEC)
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in raw(SPEC, made).items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    values = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": config(SPEC, architectures=None), "vision_config": {"depth": 27},
        "image_token_id": 5, "video_token_id": 6, "tie_word_embeddings": False,
        "vision_start_token_id": 7, "vision_end_token_id": 8,
    }  # fmt: skip
    hf.write(tmp_path / "hf", SPEC, tensors, values)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert any("1 of model.visual.*" in line for line in report.warnings)
    assert_allclose(logits(tmp_path / "out"), truth(SPEC, made), **F32_MODEL)


def test_a_pack_of_two_bits(tmp_path: Path) -> None:
    spec = replace(SPEC, packing="t2")
    made = tiny.weights(spec)
    values = {
        "model_type": "qwen3_5", "quantization": QUANTIZATION,
        "quantization_config": QUANTIZATION, "text_config": config(spec, architectures=None),
    }  # fmt: skip
    hf.write(tmp_path / "hf", spec, mlx_tensors(spec, made, "language_model."), values)
    convert(tmp_path / "hf", tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for name, matrix in made.matrices.items():
            assert_allclose(checkpoint.matrix(name).rows(), matrix.rows(), **EXACT)
    assert_allclose(logits(tmp_path / "out"), truth(spec, made), **F32_MODEL)


def pack(tmp_path: Path, drop: str = "", **changes: Any) -> tuple[Path, tiny.Weights]:
    made = tiny.weights(FOLDED)
    tensors = mlx_tensors(FOLDED, made, "language_model.")
    tensors.pop(drop, None)
    tensors["vision_tower.pos_embed.weight"] = np.ones((4, 4), np.float32)
    folder = tmp_path / "pack"
    return hf.write(folder, FOLDED, tensors, pack_config(FOLDED, made, **changes)), made


def test_a_folded_pack(tmp_path: Path) -> None:
    folder, made = pack(tmp_path)
    report = convert(folder, tmp_path / "out")
    assert any("names Python code" in line for line in report.warnings)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for name, matrix in made.matrices.items():
            found = checkpoint.matrix(name)
            assert_allclose(found.rows(), matrix.rows(), **EXACT)
            assert (found.transform is None) == (matrix.transform is None)
        assert checkpoint.proof() is not None
    assert verify(tmp_path / "out").ok
    assert_allclose(logits(tmp_path / "out"), truth(FOLDED, made), **F32_MODEL)


def test_a_pack_with_a_module_that_is_not_folded(tmp_path: Path) -> None:
    """Block 0: packed like the others, but without signs."""
    made = tiny.weights(FOLDED)
    name = "layers.3.attn.out"
    made.matrices[name] = replace(made.matrices[name], transform=None)
    values = pack_config(FOLDED, made)
    entry = {"path": "model.layers.3.self_attn.o_proj", "block": 0, "embedding": False}
    values["modules"].append({**entry, "dtype": "float16"})
    hf.write(tmp_path / "p", FOLDED, mlx_tensors(FOLDED, made, "language_model."), values)
    convert(tmp_path / "p", tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.matrix(name).transform is None
    assert_allclose(logits(tmp_path / "out"), truth(FOLDED, made), **F32_MODEL)


def test_the_same_folded_model_as_gguf_and_as_a_pack_gives_the_same_tokens(tmp_path: Path) -> None:
    folder, made = pack(tmp_path)
    signs = {m.shape[1]: m.transform.signs for m in made.matrices.values() if m.transform}
    metadata = {**made_by.metadata(FOLDED), **made_by.fold_keys(made, signs, 64)}
    tensors = made_by.tensors(FOLDED, made, columns=False)
    convert(gguf.write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "gguf")
    convert(folder, tmp_path / "mlx")
    replies = []
    for name in ("gguf", "mlx"):
        with Checkpoint.open(tmp_path / name) as checkpoint:
            session = BACKEND.load(checkpoint).session(100, 300)
        session.prefill([1, 2, 3])
        replies.append(list(islice(session.decode(Sampling.greedy()), 50)))
    assert replies[0] == replies[1]
    assert_allclose(logits(tmp_path / "gguf"), logits(tmp_path / "mlx"), rtol=0, atol=1e-5)


Q, K = "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj"


@pytest.mark.parametrize(("drop", "changes", "error", "words"), [
    ("", {"schema_version": 1}, UnsupportedModel, "schema_version 1"),
    ("", {"schema_version": None}, UnsupportedModel, "'schema_version' is missing"),
    ("", {"base_model_type": "qwen4"}, UnsupportedModel, "qwen4"),
    ("", {"gdn_activation_layout": "tiled"}, UnsupportedModel, "'tiled'"),
    ("", {"components": {"text": False}}, UnsupportedModel, "components"),
    ("", {"modules": None}, UnsupportedModel, "list of the folded modules"),
    ("", {"modules": [{"path": Q, "block": 96, "embedding": False}]}, UnsupportedModel, "block 96"),
    ("", {"modules": [{"path": Q, "block": -64}]}, UnsupportedModel, "block -64"),
    ("", {"modules": [{"path": Q, "block": 64}] * 2}, UnsupportedModel, "twice"),
    ("", {"modules": [{"path": Q, "block": 64}, {"path": K, "block": 32}]}, UnsupportedModel,
     "blocks of [32, 64]"),
    ("", {"modules": [{"path": Q, "block": 64, "embedding": True}]}, UnsupportedModel, Q),
    ("", {"modules": [{"path": Q, "block": 64, "axis": 0}]}, UnsupportedModel, "keys: axis"),
    ("", {"modules": [{"path": Q, "block": 64}]}, ConversionError, "signs"),
    (f"language_model.{Q}.signs", {}, ConversionError, Q),
    ("", {"model_type": "qwen3_5"}, UnsupportedModel, "unknown keys: base_model_type"),
    ("", {"model_type": "prism_hadamard_qwen9"}, BonsaiError, "unknown keys"),
])  # fmt: skip
def test_a_pack_that_is_not_known_exactly_is_refused(
    tmp_path: Path, drop: str, changes: dict, error: type[BonsaiError], words: str
) -> None:
    folder, _ = pack(tmp_path, drop, **changes)
    with pytest.raises(error) as caught:
        convert(folder, tmp_path / "out")
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"output_gate_type": "relu"}, "output_gate_type"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ({"linear_num_value_heads": 3}, "3 value heads cannot share 2"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ({"num_experts": 8}, "unknown keys: num_experts"),
    ({"rope_parameters": None}, "rope_theta is missing"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}, "19 dims"),
    ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "yarn"),
])  # fmt: skip
def test_a_config_that_we_cannot_honour_is_refused_by_key(
    tmp_path: Path, changes: dict, words: str
) -> None:
    made = tiny.weights(SPEC)
    hf.write(tmp_path / "hf", SPEC, raw(SPEC, made), config(SPEC, **changes))
    with pytest.raises(BonsaiError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    assert words in str(caught.value)


def test_layers_by_interval(tmp_path: Path) -> None:
    made = tiny.weights(SPEC)
    hf.write(tmp_path / "hf", SPEC, raw(SPEC, made), config(SPEC, layer_types=None))
    convert(tmp_path / "hf", tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.config["kinds"] == list(SPEC.kinds)
