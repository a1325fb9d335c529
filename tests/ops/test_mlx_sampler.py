"""The sampler on the device chooses the ids of `bonsai.sampling.choose`, at any size."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from bonsai.backends.mlx import sampler  # noqa: E402
from bonsai.backends.mlx.ops import MlxOps  # noqa: E402
from bonsai.backends.mlx.sampler import Recipe  # noqa: E402
from bonsai.sampling import Sampling, choose  # noqa: E402

SAMPLINGS = [
    Sampling(),
    Sampling(0.7, top_k=20, top_p=0.8),
    Sampling(0.6, top_k=64, top_p=0.95, min_p=0.05),
    Sampling(0.8, top_k=65, repetition_penalty=1.1),
    Sampling(1.3, top_p=0.9),
    Sampling(0.0, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocab", [2048, 2049, 5000, 30_000])
def test_every_route_chooses_what_the_rules_choose(sampling: Sampling, vocab: int) -> None:
    rng, ops = np.random.default_rng(vocab), MlxOps()
    chosen = set()
    for trial in range(12):
        logits = (3 * rng.standard_normal(vocab)).astype(np.float32)
        if trial % 2:  # as a model in half precision has them: many are equal
            logits = logits.astype(np.float16).round(1).astype(np.float32)
        seen, uniform = np.unique(rng.integers(0, vocab, 50)), float(rng.random())
        token = ops.sample(mx.array(logits), sampling, seen, uniform)
        assert token == choose(logits, sampling, seen, uniform)
        chosen.add(token)
    assert len(chosen) > 3


def test_equal_logits_go_by_their_id_in_every_block() -> None:
    """All of 3,000 are the same: the best k are the first k, which lie in one block."""
    for top_k in (1, 2, 50, 64, 65):
        for uniform in (0.0, 0.41, 0.999):
            sampling = Sampling(top_k=top_k)
            token = MlxOps().sample(mx.zeros((3000,)), sampling, np.empty(0, np.int64), uniform)
            assert token == int(top_k * uniform)


def test_both_zeros_are_equal() -> None:
    logits = np.zeros(10, np.float32)
    logits[:5] = -0.0
    for uniform in (0.0, 0.35, 0.95):
        token = MlxOps().sample(mx.array(logits), Sampling(), np.empty(0, np.int64), uniform)
        assert token == int(10 * uniform)


def test_ids_are_drawn_as_often_as_they_are_probable() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rng, counts = np.random.default_rng(0), np.zeros(4)
    for uniform in rng.random(1000):
        counts[MlxOps().sample(mx.array(logits), Sampling(), np.empty(0, int), uniform)] += 1
    assert np.abs(counts / 1000 - [0.5, 0.3, 0.15, 0.05]).max() < 0.05


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_minus_one(bad: float) -> None:
    for sampling in (Sampling.greedy(), Sampling(0.5, top_k=3)):
        logits = np.zeros(100, np.float32)
        logits[77] = bad
        recipe, numbers = Recipe.of(sampling, 100), sampler.knobs(sampling, 0.5)
        assert sampler.choose(mx.array(logits), recipe, numbers, None).item() == -1
    nothing = mx.full((100,), -mx.inf)
    assert sampler.choose(nothing, Recipe.of(Sampling(), 100), numbers, None).item() == -1


@pytest.mark.parametrize("total", [1, 2**20, 2**44, 2**62 - 1])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.999999, 1 - 2**-32])
def test_a_part_of_a_sum_is_exact(total: int, fraction: float) -> None:
    halves = (mx.array(x) for x in sampler._halves(fraction))
    found = sampler._part(*halves, mx.array(total, mx.uint64)).item()
    assert found == total * int(fraction * 2**32) >> 32
