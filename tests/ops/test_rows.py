"""`rms_norm`, `rope`, `swiglu` and `sample` of every backend against float64."""

from __future__ import annotations

import dense
import numpy as np
import pytest
from numpy.testing import assert_allclose
from runners import Runner
from tolerances import EXACT, F32_REDUCTION

from bonsai.config import RopeSpec, Yarn
from bonsai.errors import NumericError
from bonsai.sampling import Sampling, choose

ROWS = (1, 2, 5, 33)


@pytest.mark.parametrize("width", [1, 4, 63, 64, 96, 128, 576, 2048])
def test_rms_norm(runner: Runner, width: int) -> None:
    rng = np.random.default_rng(width)
    gain = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    for rows in ROWS:
        x = (3 * rng.standard_normal((rows, width))).astype(np.float32)
        y = np.asarray(runner.ops.rms_norm(x, runner.ops.vector(gain), 1e-6))
        assert_allclose(y, dense.norm(x, gain, 1e-6), **F32_REDUCTION)


def test_rms_norm_over_heads_reads_a_slice_of_a_wider_array(runner: Runner) -> None:
    rng = np.random.default_rng(0)
    gain = (1 + 0.3 * rng.standard_normal(64)).astype(np.float32)
    for rows in ROWS:
        heads = rng.standard_normal((rows, 7, 64)).astype(np.float32)
        for part in (heads[:, :4], heads[:, 4:6], heads[:, 6:]):
            y = np.asarray(runner.ops.rms_norm(part, runner.ops.vector(gain), 1e-5))
            assert y.shape == part.shape
            assert_allclose(y, dense.norm(part, gain, 1e-5), **F32_REDUCTION)


def test_rms_norm_of_extremes(runner: Runner) -> None:
    gain = runner.ops.vector(np.full(128, 1.5, np.float32))
    zeros = np.asarray(runner.ops.rms_norm(np.zeros((2, 128), np.float32), gain, 1e-6))
    assert_allclose(zeros, 0, **EXACT)
    for size in (7e4, 1e-6, 1e15):
        x = np.full((2, 128), size, np.float32)
        x[:, ::2] *= -1
        expected = dense.norm(x, np.full(128, 1.5), 1e-6)
        y = np.asarray(runner.ops.rms_norm(x, gain, 1e-6))
        assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_the_gain_is_not_shifted_by_one(runner: Runner) -> None:
    x = np.ones((1, 64), np.float32)
    y = np.asarray(runner.ops.rms_norm(x, runner.ops.vector(np.zeros(64, np.float32)), 1e-6))
    assert_allclose(y, 0, **EXACT)


YARN = Yarn(4.0, 64, 32.0, 1.0, 1.1386)


@pytest.mark.parametrize("first", [0, 1, 500, 100_000])
@pytest.mark.parametrize("spec", [
    RopeSpec(1e4, 64), RopeSpec(1e6, 128), RopeSpec(1e5, 32), RopeSpec(1e4, 96),
    RopeSpec(1e4, 64, YARN), RopeSpec(1e6, 32, YARN), RopeSpec(5e5, 2),
])  # fmt: skip
def test_rope(runner: Runner, spec: RopeSpec, first: int) -> None:
    rng = np.random.default_rng(first)
    rope = {"theta": spec.theta, "dims": spec.dims}
    if spec.yarn:
        rope["yarn"] = {name: getattr(spec.yarn, name) for name in Yarn.__slots__}
    state = runner.new_state(1, 1, 4, 200_000)
    state.position = first
    for rows in ROWS:
        for width in (spec.dims, spec.dims + 6):
            heads = rng.standard_normal((rows, 5, width)).astype(np.float32)
            for x in (heads[:, :3], heads[:, 3:]):
                y = np.asarray(runner.ops.rope(x, state, spec))
                assert_allclose(y, dense.rotated(x, rope, first), **F32_REDUCTION)
                assert_allclose(y[..., spec.dims :], x[..., spec.dims :], **EXACT)


def test_rope_leaves_its_input_alone(runner: Runner) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    before = x.copy()
    state = runner.new_state(1, 1, 4, 100)
    state.position = 7
    runner.ops.rope(x, state, RopeSpec(1e4, 64))
    assert_allclose(x, before, **EXACT)


@pytest.mark.parametrize("width", [1, 7, 64, 192, 1536])
def test_swiglu(runner: Runner, width: int) -> None:
    rng = np.random.default_rng(width)
    for rows in ROWS:
        x = (4 * rng.standard_normal((rows, 2 * width))).astype(np.float32)
        a, b = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
        y = np.asarray(runner.ops.swiglu(x))
        assert y.shape == (rows, width)
        assert_allclose(y, a / (1 + np.exp(-a)) * b, **F32_REDUCTION)


def test_swiglu_of_extremes(runner: Runner) -> None:
    gate = np.array([-7e4, -1e3, -100, -88.5, -0.0, 0, 1e-30, 88.5, 100, 1e3, 7e4], np.float32)
    up = np.full(len(gate), 2.5, np.float32)
    y = np.asarray(runner.ops.swiglu(np.concatenate([gate, up])[None]))[0]
    assert_allclose(y, np.where(gate > 0, gate, 0) * 2.5 * np.where(gate == 1e-30, 0.5, 1),
                    rtol=1e-5, atol=1e-30)  # fmt: skip


SAMPLINGS = [
    Sampling.greedy(),
    Sampling(),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=0.3, repetition_penalty=1.5),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=1e-30),
    Sampling(top_k=10**9, top_p=0.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocab", [1, 5, 1001])
def test_sample_chooses_what_the_rules_choose(
    runner: Runner, sampling: Sampling, vocab: int
) -> None:
    rng = np.random.default_rng(vocab)
    for trial in range(50):
        logits = (4 * rng.standard_normal(vocab)).astype(np.float32)
        logits[vocab - vocab // 4 :] = -np.inf
        seen = np.unique(rng.integers(0, vocab, 9)) if trial % 2 else np.empty(0, np.int64)
        uniform = (0.0, float(rng.random()), runner.nearly_one)[trial % 3]
        token = runner.ops.sample(logits.copy(), sampling, seen, uniform)
        assert token == choose(logits, sampling, seen, uniform)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling.greedy(), Sampling(temperature=0.5, top_k=3)])
def test_sample_refuses_logits_that_are_not_numbers(
    runner: Runner, bad: float, sampling: Sampling
) -> None:
    for place in (0, 77, 99):
        logits = np.zeros(100, np.float32)
        logits[place] = bad
        with pytest.raises(NumericError):
            runner.ops.sample(logits, sampling, np.empty(0, np.int64), 0.5)
