"""The golden logits of the folded pack are still what mlx-vlm computes."""

from __future__ import annotations

import numpy as np
import prism_model
import pytest
from numpy.testing import assert_allclose
from tolerances import F32_MODEL

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def test_mlx_vlm_still_computes_the_golden_logits() -> None:
    pytest.importorskip("mlx_vlm.models.prism_hadamard_qwen35", reason="needs mlx-vlm 0.7.10")
    import make_prism_golden as oracle

    with np.load(prism_model.PATH) as golden:
        expected = golden["logits"]
    found = oracle.logits(prism_model.tokens())[prism_model.POSITIONS]
    assert_allclose(found, expected, **F32_MODEL)
