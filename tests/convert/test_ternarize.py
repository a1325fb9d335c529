"""Ternarization: exact where the source is ternary, and the least squared error where it is not."""

from __future__ import annotations

import itertools

import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.convert.ternarize import exact_ternary, least_squares
from bonsai.errors import ConversionError, InvalidRequest
from bonsai.format import Checkpoint

DOWN = "model.layers.0.mlp.down_proj.weight"


def restored(values: np.ndarray, group: int) -> np.ndarray:
    trits, scales = least_squares("w", values, group, 0)
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, : values.shape[1]]
    return trits * wide


def test_no_trits_and_scale_are_nearer():
    """Against every one of the 3^8 - 1 trit vectors, each with its own best scale."""
    values = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    vectors = np.array(list(itertools.product((-1, 0, 1), repeat=8)), np.float64)
    vectors = vectors[np.abs(vectors).any(axis=1)]
    projections = values.astype(np.float64) @ vectors.T
    best = (values.astype(np.float64) ** 2).sum(axis=1)
    best -= (projections**2 / (vectors**2).sum(axis=1)).max(axis=1)
    found = ((values - restored(values, 8)) ** 2).sum(axis=1)
    # The scale is rounded to fp16 afterwards: 2^-12 of it, squared, times at most 8 weights.
    assert np.allclose(found, best, rtol=1e-5, atol=1e-5)
    assert (found >= best - 1e-6).all()


@pytest.mark.parametrize("group", [64, 128, 256])
@pytest.mark.parametrize("columns", [64, 192, 576])
def test_ternary_input_comes_back_exactly(group, columns):
    rng = np.random.default_rng(columns + group)
    groups = -(-columns // group)
    scales = rng.uniform(1e-5, 3e4, (50, groups)).astype(np.float16).astype(np.float32)
    trits = rng.choice([-1, 0, 1], (50, columns), p=[0.1, 0.8, 0.1])
    values = trits * np.repeat(scales, group, axis=1)[:, :columns]
    assert np.array_equal(restored(values, group), values)
    found = exact_ternary(values, group)
    assert found is not None
    assert np.array_equal(found[0], np.where(values == 0, 0, trits))


def test_scale_of_ternary_input_is_the_maximum_not_the_mean():
    values = np.float32(np.float16(0.0371)) * np.array([[1, -1, 0, 1, 0, 0, 0, 0]], np.float32)
    _, scales = least_squares("w", values, 8, 0)
    assert scales[0, 0] == np.float16(0.0371)


def test_zero_groups_have_scale_zero():
    values = np.zeros((2, 128), np.float32)
    values[1, 64:] = 1
    trits, scales = least_squares("w", values, 64, 0)
    assert scales.tolist() == [[0, 0], [0, 1]]
    assert not trits[0].any()
    assert exact_ternary(values, 64) is not None


@pytest.mark.parametrize("bad", [7e4, 1e38, 1e-30, np.nan, np.inf])
def test_scale_that_does_not_fit_names_tensor_and_row(bad):
    values = np.ones((5, 128), np.float32)
    values[3] = bad
    with pytest.raises(ConversionError, match=r"layers.0.ffn.up: row 103 "):
        least_squares("layers.0.ffn.up", values, 128, first_row=100)


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.1, 0.1], [1e-9, 0.0], [7e4, 0.0], [np.nan, 1.0]])
def test_values_that_are_not_exactly_ternary_are_told(values):
    """Two magnitudes, or one that fp16 does not hold."""
    assert exact_ternary(np.array([values], np.float32), 64) is None


@pytest.mark.parametrize("group", [64, 128, 256])
def test_gaussian_source_reports_its_error_and_warns(tmp_path, group):
    source = hf.weights()
    folder = hf.write(tmp_path / "hf", tensors=source)
    report = convert(folder, tmp_path / "out", quant="ternary", group_size=group)
    checkpoint = Checkpoint.open(tmp_path / "out")
    matrix = checkpoint.matrix("layers.0.ffn.down")
    assert (matrix.packing, matrix.group) == ("t2", group)
    row = next(tensor for tensor in report.tensors if tensor.name == "layers.0.ffn.down")
    error = np.linalg.norm(matrix.rows() - source[DOWN]) / np.linalg.norm(source[DOWN])
    assert row.relative_error == pytest.approx(error, rel=1e-4)
    assert 0.40 < report.relative_error < 0.46  # the best for a gaussian is 0.436
    assert 0.4 < report.zeros < 0.55
    assert any("source was not ternary" in text for text in report.warnings)
    assert checkpoint.entry("embedding").packing == "f32"
    assert checkpoint.entry("head").packing == "f32"


def test_ternary_source_round_trips_without_a_warning(tmp_path):
    rng = np.random.default_rng(1)
    source = hf.weights()
    for name, shape in hf.linear_shapes(hf.Tiny()).items():
        trits = rng.integers(-1, 2, shape).astype(np.float32)
        source[name] = trits * np.float32(np.float16(0.0371))
    folder = hf.write(tmp_path / "hf", tensors=source)
    report = convert(folder, tmp_path / "out", quant="ternary")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert np.array_equal(checkpoint.matrix("layers.0.ffn.down").rows(), source[DOWN])
    assert report.relative_error == 0
    assert report.warnings == ()


def test_embeddings_are_quantized_when_asked(tmp_path):
    folder = hf.write(tmp_path / "hf")
    convert(folder, tmp_path / "out", quant="ternary", quant_embeddings=True)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert {checkpoint.entry(name).packing for name in ("embedding", "head")} == {"t2"}


def test_padded_vocabulary_rows_get_scale_zero(tmp_path):
    source = hf.weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        source[name][300:] = 0
    folder = hf.write(tmp_path / "hf", tensors=source)
    convert(folder, tmp_path / "out", quant="ternary", quant_embeddings=True)
    matrix = Checkpoint.open(tmp_path / "out").matrix("head")
    assert np.isfinite(matrix.scales).all()
    assert not matrix.scales[300:].any()
    assert matrix.scales[:300].all()
    assert not matrix.rows(slice(300, None)).any()


@pytest.mark.parametrize(("packing", "bound"), [("q8", 0.006), ("q4", 0.1)])
def test_affine_quantization(tmp_path, packing, bound):
    folder = hf.write(tmp_path / "hf")
    report = convert(folder, tmp_path / "out", quant=packing)
    assert Checkpoint.open(tmp_path / "out").entry("layers.0.ffn.down").packing == packing
    assert 0 < report.relative_error < bound


def test_affine_overflow_names_the_tensor(tmp_path):
    source = hf.weights()
    source[DOWN][5] = 1e6
    folder = hf.write(tmp_path / "hf", tensors=source)
    with pytest.raises(ConversionError, match=r"layers.0.ffn.down: rows .* does not fit in fp16"):
        convert(folder, tmp_path / "out", quant="q8")


@pytest.mark.parametrize(
    "options", [{"quant": "q5"}, {"group_size": 100}, {"packing": "t3"}, {"kind": "onnx"}]
)
def test_unknown_options_list_the_known_ones(tmp_path, options):
    with pytest.raises(InvalidRequest, match=next(iter(options))) as caught:
        convert(tmp_path, tmp_path / "out", **options)
    assert caught.value.hint.startswith("one of: ")
