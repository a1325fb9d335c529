"""A folded MLX pack, converted, against logits that mlx-vlm's own module computed once."""

from __future__ import annotations

from pathlib import Path

import hf_writer as hf
import hybrid
import numpy as np
import prism_model
import tiny
from numpy.testing import assert_allclose

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.format import Checkpoint


def converted(tmp_path: Path) -> Path:
    spec = prism_model.SPEC
    made = tiny.weights(spec)
    tensors = hybrid.mlx_tensors(spec, made, "language_model.")
    hf.write(tmp_path / "pack", hf.Tiny(), tensors, hybrid.pack_config(spec, made))
    convert(tmp_path / "pack", tmp_path / "out")
    return tmp_path / "out"


def test_logits_equal_those_of_mlx_vlm(tmp_path: Path) -> None:
    with np.load(prism_model.PATH) as golden:
        expected = golden["logits"]
    tokens = prism_model.tokens()
    with Checkpoint.open(converted(tmp_path)) as checkpoint:
        session = BACKEND.load(checkpoint).session(100, 320)
    for row, position in enumerate(prism_model.POSITIONS):
        session.prefill(tokens[len(session.tokens) : position + 1])
        # mlx adds 1e-6 to the mean of squares of queries and keys, and not to their sum
        assert_allclose(session.logits(), expected[row], rtol=0, atol=1e-3)
