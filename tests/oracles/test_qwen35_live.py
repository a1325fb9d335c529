"""Tiny hybrids that decode: the conv and recurrent states of `transformers` against ours.

Logits of one prefill are in test_models_live.py.
"""

from __future__ import annotations

from pathlib import Path

import golden_models
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner

from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen35-at-500", "qwen35-one-share"])
def test_decoding_equals_that_of_transformers(runner: Runner, tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers.models.qwen3_5", reason="needs transformers with Qwen3.5")
    import make_models_golden as oracle

    spec, step = golden_models.CASES[name], golden_models.tokens(name)[:70]
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        session = runner.load(checkpoint).session(400, spec.vocab)
        network, cache = oracle.network(checkpoint), None
    for _ in range(60):
        with torch.no_grad():
            result = network(torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        session.prefill(step)
        expected = result.logits[0, -1].numpy()
        assert_allclose(session.logits(), expected, **runner.bound("qwen35"))
        step = [int(np.argmax(expected))]
