"""Qwen3.5 hybrids in GGUF: tiled heads, negated decays, folded weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dense
import gguf_writer as gguf
import numpy as np
import pytest
import tiny
import tiny_qwen35 as made_by
from numpy.testing import assert_allclose
from tiny import Gdn, Tiny
from tiny_qwen35 import SPEC
from tolerances import EXACT, F32_MODEL

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.errors import BonsaiError, ConversionError, UnsupportedModel
from bonsai.format import Checkpoint, verify

IDS = tiny.Random(5).integers(0, 320, 12).tolist()
BLOCK = 64
FAR = 0.1  # of logits up to 5


def written(tmp_path: Path, spec: Tiny, weights: tiny.Weights, columns: bool = True,
            **changes: Any) -> Path:  # fmt: skip
    """A file; a change whose key has a dot in front is a whole key."""
    whole = {key: value for key, value in changes.items() if key.startswith("prism.")}
    own = {key: value for key, value in changes.items() if key not in whole}
    metadata = {**made_by.metadata(spec, **own), **whole}
    tensors = made_by.tensors(spec, weights, columns)
    return gguf.write(tmp_path / "m.gguf", metadata, tensors)


def logits(folder: Path) -> np.ndarray:
    with Checkpoint.open(folder) as checkpoint:
        engine = BACKEND.load(checkpoint)
    with engine.session(64, 320) as session:
        session.prefill(IDS)
        return session.logits()


def truth(spec: Tiny, weights: tiny.Weights) -> np.ndarray:
    vectors, matrices = weights.vectors.__getitem__, weights.matrices.__getitem__
    return dense.logits(tiny.config(spec), matrices, vectors, IDS)[-1]


@pytest.mark.parametrize("spec", [
    SPEC, replace(SPEC, gdn=Gdn(1, 4, 32, 64)), replace(SPEC, gdn=Gdn(4, 4, 32, 32), tied=True),
])  # fmt: skip
def test_every_tensor_arrives_in_our_order(tmp_path: Path, spec: Tiny) -> None:
    weights = tiny.weights(spec)
    convert(written(tmp_path, spec, weights), tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert set(checkpoint.names()) == {*weights.matrices, *weights.vectors}
        for name, matrix in weights.matrices.items():
            assert_allclose(checkpoint.matrix(name).rows(), matrix.rows(), **EXACT)
        for name, values in weights.vectors.items():
            within = {"rtol": 1e-6, "atol": 0} if name.endswith("a_log") else EXACT
            assert_allclose(checkpoint.vector(name), values, **within)
        expected = {**tiny.config(spec), "eos": [257]}
        assert {**checkpoint.config} == expected
    assert_allclose(logits(tmp_path / "out"), truth(spec, weights), **F32_MODEL)


def test_packed_matrices_arrive_bit_for_bit(tmp_path: Path) -> None:
    spec = replace(SPEC, packing="t2", table="f32")
    weights = tiny.weights(spec)
    convert(written(tmp_path, spec, weights), tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for name, matrix in weights.matrices.items():
            found = checkpoint.matrix(name)
            assert found.packing == matrix.packing
            if matrix.packing == "t2":
                assert np.array_equal(found.codes, matrix.codes), name
                assert np.array_equal(found.scales, matrix.scales), name


def test_only_the_linears_are_quantized(tmp_path: Path) -> None:
    path = written(tmp_path, SPEC, tiny.weights(SPEC))
    convert(path, tmp_path / "out", quant="q8", quant_embeddings=True)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        packings = {name: checkpoint.entry(name).packing for name in checkpoint.names()}
    assert packings["layers.0.gdn.qkv"] == packings["layers.0.gdn.out"] == "q8"
    assert packings["head"] == packings["layers.3.attn.q"] == "q8"
    assert {packings[f"layers.0.gdn.{p}"] for p in ("a", "b", "conv", "norm", "a_log")} == {"f32"}


def folded_file(tmp_path: Path, **changes: Any) -> Path:
    weights, signs = made_by.folded(tiny.weights(SPEC), BLOCK)
    keys = made_by.fold_keys(weights, signs, BLOCK)
    keys |= {f"prism.hadamard.{key}": value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    return written(tmp_path, SPEC, weights, columns=False, **keys)


def test_a_folded_model_gives_the_logits_of_the_plain_one(tmp_path: Path) -> None:
    convert(folded_file(tmp_path), tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        folds = [name for name in checkpoint.names() if checkpoint.entry(name).transform]
        assert len(folds) == 2 + 3 * 6 + 7
        assert "embedding" in folds
        assert "layers.0.gdn.a" not in folds
        assert checkpoint.proof() is not None
    assert verify(tmp_path / "out").ok
    assert_allclose(logits(tmp_path / "out"), truth(SPEC, tiny.weights(SPEC)), **F32_MODEL)


def test_a_folded_model_can_be_converted_again(tmp_path: Path) -> None:
    convert(folded_file(tmp_path), tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "second")
    assert verify(tmp_path / "second").ok
    assert_allclose(logits(tmp_path / "second"), logits(tmp_path / "first"), **EXACT)


def test_signs_that_are_all_one(tmp_path: Path) -> None:
    made = tiny.weights(SPEC)
    weights, signs = made_by.folded(made, BLOCK)
    for name, matrix in weights.matrices.items():
        if not name.endswith(made_by.UNFOLDED):
            ones = tiny.SignedHadamard(BLOCK, np.ones(matrix.shape[1], np.int8))
            values = ones.forward(made.matrices[name].rows().astype(np.float64))
            weights.matrices[name] = replace(matrix, values=values.astype(np.float32))
    keys = made_by.fold_keys(weights, signs, BLOCK)
    del keys["prism.hadamard.sign_widths"], keys["prism.hadamard.sign_values"]
    keys["prism.hadamard.sign_mode"] = "identity"
    convert(written(tmp_path, SPEC, weights, columns=False, **keys), tmp_path / "out")
    assert_allclose(logits(tmp_path / "out"), truth(SPEC, made), **F32_MODEL)


@pytest.mark.parametrize("control", ["no fold", "no signs", "tiled columns", "grouped rows"])
def test_each_part_of_the_import_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    import bonsai.convert.gguf_model as opener
    import bonsai.convert.hadamard as hadamard
    import bonsai.convert.qwen35 as qwen35

    def no_fold(*a: Any) -> None:
        return None

    def no_signs(block: int, signs: np.ndarray) -> Any:
        return tiny.SignedHadamard(block, np.ones_like(signs))

    as_they_are: Callable[..., Any] = lambda tensor, *rest: tensor  # noqa: E731
    path = folded_file(tmp_path)
    if control == "no fold":
        monkeypatch.setattr(opener, "read_gguf_fold", no_fold)
        monkeypatch.setattr(qwen35, "_with_columns", as_they_are)
    elif control == "no signs":
        monkeypatch.setattr(hadamard, "SignedHadamard", no_signs)
    elif control == "tiled columns":
        path = written(tmp_path, SPEC, tiny.weights(SPEC))
        monkeypatch.setattr(qwen35, "_is_grouped", lambda *a: True)
        monkeypatch.setattr(opener, "read_gguf_fold", lambda *a: hadamard.Fold(frozenset(), {}))
    else:
        monkeypatch.setattr(qwen35, "_with_rows", as_they_are)
    convert(path, tmp_path / "out")
    expected = truth(SPEC, tiny.weights(SPEC))
    assert np.abs(logits(tmp_path / "out") - expected).max() > FAR


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"version": 3}, UnsupportedModel, "version 3"),
    ({"version": None}, UnsupportedModel, "'version' is missing"),
    ({"block_size": 96}, UnsupportedModel, "96 is not a power of two"),
    ({"block_size": 256}, ConversionError, "128 columns in blocks of 256"),
    ({"transform": "fft"}, UnsupportedModel, "'transform' is 'fft'"),
    ({"axis": "output"}, UnsupportedModel, "'axis' is 'output'"),
    ({"sign_mode": "seed"}, UnsupportedModel, "sign_mode is 'seed'"),
    ({"sign_widths": [128]}, ConversionError, "do not fit sign_widths"),
    ({"sign_values": [1, 2] * 576}, ConversionError, "other than -1 and 1"),
    ({"sign_widths": [1152]}, ConversionError, "no signs for tensors of"),
    ({"weight_names": ["blk.9.attn_q.weight"]}, ConversionError, "blk.9.attn_q.weight, which is"),
    ({"weight_names": ["blk.0.ssm_alpha.weight"]}, UnsupportedModel, "cannot be folded"),
    ({"weight_names": ["output.weight"] * 2}, ConversionError, "same name twice"),
    ({"inverse_weight_names": ["output.weight"]}, UnsupportedModel, "cannot be folded"),
    ({"gdn_v_grouped": False}, UnsupportedModel, "gdn_v_grouped is not true"),
    ({"tied_output": True}, UnsupportedModel, "'tied_output' is True in version 1"),
    ({"scale": 2}, UnsupportedModel, "unknown keys: scale"),
])  # fmt: skip
def test_a_fold_that_is_not_known_exactly_is_refused(
    tmp_path: Path, changes: dict, error: type[BonsaiError], words: str
) -> None:
    with pytest.raises(error) as caught:
        convert(folded_file(tmp_path, **changes), tmp_path / "out")
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_tied_folded_model(tmp_path: Path) -> None:
    """Version 2: the table is the head, folded once for both."""
    spec = replace(SPEC, tied=True)
    weights, signs = made_by.folded(tiny.weights(spec), BLOCK)
    keys = made_by.fold_keys(weights, signs, BLOCK)
    keys |= {"prism.hadamard.version": 2, "prism.hadamard.tied_output": True}
    convert(written(tmp_path, spec, weights, columns=False, **keys), tmp_path / "out")
    assert_allclose(logits(tmp_path / "out"), truth(spec, tiny.weights(spec)), **F32_MODEL)


@pytest.mark.parametrize(("changes", "words"), [
    ({"ssm.inner_size": 700}, "ssm.inner_size 700"),
    ({"ssm.group_count": 4}, "6 value heads cannot share 4"),
    ({"ssm.state_size": None}, "'ssm.state_size' is missing"),
    ({"full_attention_interval": None}, "'full_attention_interval' is missing"),
    ({"rope.dimension_count": 66}, "66 dims"),
    ({"rope.dimension_sections": [1, 1, 1, 0]}, "rope.dimension_sections"),
    ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
    ({"ssm.dt_rank": 3}, "unknown keys: ssm.dt_rank"),
    ({"attention.recurrent_layers": [True] * 3}, "attention.recurrent_layers"),
    ({"attention.recurrent_layers": [1, 2, 1, 0]}, "attention.recurrent_layers"),
])  # fmt: skip
def test_metadata_that_we_cannot_honour_is_refused_by_key(
    tmp_path: Path, changes: dict, words: str
) -> None:
    path = written(tmp_path, SPEC, tiny.weights(SPEC), **changes)
    with pytest.raises(BonsaiError) as caught:
        convert(path, tmp_path / "out")
    assert words in str(caught.value)


def test_a_list_of_recurrent_layers_comes_before_the_interval(tmp_path: Path) -> None:
    kinds = ("attention", "delta", "attention", "delta")
    spec = replace(SPEC, kinds=kinds)
    flags = [kind == "delta" for kind in kinds]
    weights = tiny.weights(spec)
    for name, interval in (("a", 4), ("b", None)):
        changes = {"attention.recurrent_layers": flags, "full_attention_interval": interval}
        convert(written(tmp_path, spec, weights, **changes), tmp_path / name)
        assert_allclose(logits(tmp_path / name), truth(spec, weights), **F32_MODEL)


def test_decays_that_are_not_below_zero_are_refused(tmp_path: Path) -> None:
    tensors = made_by.tensors(SPEC, tiny.weights(SPEC))
    tensors["blk.1.ssm_a"] = gguf.dense(np.array([-1, -1, 0, -1, -1, -1], np.float32))
    path = gguf.write(tmp_path / "m.gguf", made_by.metadata(SPEC), tensors)
    with pytest.raises(ConversionError, match=r"blk.1.ssm_a: has values that are not below 0"):
        convert(path, tmp_path / "out")


def test_heads_narrower_than_a_group_are_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, packing="t2", gdn=Gdn(2, 4, 32, 64))
    path = written(tmp_path, spec, tiny.weights(spec), columns=False)
    with pytest.raises(UnsupportedModel, match=r"ssm_out.weight: heads of 64 columns"):
        convert(path, tmp_path / "out")


def test_the_part_that_drafts_tokens_is_left_out_with_a_line(tmp_path: Path) -> None:
    weights = tiny.weights(SPEC)
    tensors = made_by.tensors(SPEC, weights)
    for name in ("nextn.eh_proj.weight", "attn_q.weight", "nextn.enorm.weight"):
        tensors[f"blk.4.{name}"] = gguf.dense(np.ones((2, 128), np.float32))
    metadata = made_by.metadata(SPEC, block_count=5, nextn_predict_layers=1)
    path = gguf.write(tmp_path / "m.gguf", metadata, tensors)
    report = convert(path, tmp_path / "out")
    assert "3 tensors that draft tokens are left out" in report.warnings
    assert_allclose(logits(tmp_path / "out"), truth(SPEC, weights), **F32_MODEL)
