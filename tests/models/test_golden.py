"""Tiny models on every backend against logits that `transformers` computed once."""

from __future__ import annotations

from pathlib import Path

import golden_models
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner

from bonsai.format import Checkpoint


@pytest.mark.parametrize("name", golden_models.CASES)
def test_logits_equal_those_of_transformers(runner: Runner, tmp_path: Path, name: str) -> None:
    spec, tokens = golden_models.CASES[name], golden_models.tokens(name)
    with np.load(golden_models.PATH) as golden:
        expected = golden[name]
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        engine = runner.load(checkpoint)
    with engine.session(len(tokens), spec.vocab) as session:
        for row, position in enumerate(golden_models.positions(name)):
            session.prefill(tokens[len(session.tokens) : position + 1])
            assert_allclose(session.logits(), expected[row], **runner.bound(spec.architecture))
