"""Tiny models on every backend against `transformers`, at 70 positions and more, in float32."""

from __future__ import annotations

from pathlib import Path

import golden_models
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner
from tolerances import F32_MODEL

from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", golden_models.CASES)
def test_logits_equal_those_of_transformers(runner: Runner, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    import make_models_golden as oracle

    spec, tokens = golden_models.CASES[name], golden_models.tokens(name)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        expected = oracle.logits(checkpoint, tokens)
        with runner.load(checkpoint).session(len(tokens), checkpoint.config["vocab"]) as session:
            for position in [*range(70), len(tokens) - 1]:
                session.prefill(tokens[len(session.tokens) : position + 1])
                assert_allclose(
                    session.logits(), expected[position], **runner.bound(spec.architecture)
                )
        kept = np.load(golden_models.PATH)[name]
        assert_allclose(expected[golden_models.positions(name)], kept, **F32_MODEL)
