"""The ops of gated delta nets and gated attention, on every backend, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dense
import numpy as np
import pytest
import runners
from conftest import RUNNERS
from numpy.testing import assert_allclose
from runners import Runner
from tolerances import EXACT, F32_REDUCTION

from bonsai.backends import delta
from bonsai.config import DeltaSpec

ROWS = (1, 2, 5, 33)
SPEC = DeltaSpec(layers=2, channels=96, taps=4, heads=6, key_dim=16, value_dim=24)


@pytest.fixture(params=(*RUNNERS, "defaults"))
def runner(request: pytest.FixtureRequest) -> Runner:
    """Also the compositions in NumPy that backends start from."""
    return runners.get(request.param)


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def new_state(runner: Runner, spec: DeltaSpec = SPEC):
    return runner.new_state(1, 1, 16, 4096, spec)


@pytest.mark.parametrize("width", [1, 64, 100])
def test_sigmoid_gate(runner: Runner, width: int) -> None:
    rng = np.random.default_rng(width)
    for rows in ROWS:
        x, gate = gaussian(rng, rows, width), 4 * gaussian(rng, rows, width)
        y = np.asarray(runner.ops.sigmoid_gate(x, gate))
        assert_allclose(y, x / (1 + np.exp(-gate.astype(np.float64))), **F32_REDUCTION)
    far = np.array([[-7e4, -1e3, -100, -0.0, 100, 7e4]], np.float32)
    y = np.asarray(runner.ops.sigmoid_gate(np.full((1, 6), 2.5, np.float32), far))
    assert_allclose(y, [[0, 0, 0, 1.25, 2.5, 2.5]], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [(40,), (1, 2, 5, 32), (33, 1, 1, 1, 4), (1,) * 40])
def test_causal_conv_silu(runner: Runner, taps: int, chunks: tuple[int, ...]) -> None:
    rng = np.random.default_rng(taps)
    state = new_state(runner, DeltaSpec(2, 20, taps, 2, 4, 4))
    weights = [gaussian(rng, 20, taps) for _ in range(2)]
    joined = gaussian(rng, 40, 29)  # the model cuts x out of a wider array
    kept = [runner.ops.vector(w) for w in weights]
    for count in chunks:
        part = slice(state.position, state.position + count)
        for layer, x in enumerate((joined[:, :20], joined[:, 9:])):
            y = np.asarray(runner.ops.causal_conv_silu(x[part], kept[layer], state, layer))
            assert_allclose(y, dense.convolved(x, weights[layer])[part], **F32_REDUCTION)
        state.advance(count)


def test_gated_delta_gates(runner: Runner) -> None:
    rng = np.random.default_rng(0)
    for rows in ROWS:
        ab = 5 * gaussian(rng, rows, 14)
        a, b = ab[:, :7], ab[:, 7:]
        a_log, dt = gaussian(rng, 7), gaussian(rng, 7)
        found = runner.ops.gated_delta_gates(a, b, runner.ops.vector(a_log), runner.ops.vector(dt))
        decay, beta = (np.asarray(f) for f in found)
        assert decay.dtype == beta.dtype == np.float32
        sum_ = a.astype(np.float64) + dt
        expected = -np.exp(a_log.astype(np.float64)) * np.log1p(np.exp(sum_))
        assert_allclose(decay, expected, rtol=2e-5, atol=1e-7)
        assert_allclose(beta, 1 / (1 + np.exp(-b.astype(np.float64))), **F32_REDUCTION)


def test_gated_delta_gates_of_extremes(runner: Runner) -> None:
    a = np.array([[-1e4, -100, -20, 0, 20, 100, 1e4]], np.float32)
    zeros = runner.ops.vector(np.zeros(7, np.float32))
    decay, beta = (np.asarray(f) for f in runner.ops.gated_delta_gates(a, a, zeros, zeros))
    expected = -np.array([0, np.exp(-100), np.exp(-20), np.log(2), 20, 100, 1e4])
    assert_allclose(decay[0], expected, rtol=1e-5, atol=1e-30)
    assert_allclose(beta[0], [0, 0, 0, 0.5, 1, 1, 1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("width", [1, 24, 128])
def test_gated_rms_norm(runner: Runner, width: int) -> None:
    rng = np.random.default_rng(width)
    gain = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    for rows in ROWS:
        x, z = 3 * gaussian(rng, rows, 6, width), 3 * gaussian(rng, rows, 6, width)
        y = np.asarray(runner.ops.gated_rms_norm(x, z, runner.ops.vector(gain), 1e-6))
        silu = z / (1 + np.exp(-z.astype(np.float64)))
        assert_allclose(y, dense.norm(x, gain, 1e-6) * silu, **F32_REDUCTION)
    zeros = np.zeros((1, 6, width), np.float32)
    y = np.asarray(runner.ops.gated_rms_norm(zeros, zeros - 200, runner.ops.vector(gain), 1e-6))
    assert_allclose(y, 0, **EXACT)


Inputs = tuple[np.ndarray, ...]


def inputs(seed: int, rows: int, key_heads: int, spec: DeltaSpec, strength: float = 1) -> Inputs:
    """q, k, v, decay, beta as a model makes them; larger `strength` forgets faster."""
    rng = np.random.default_rng(seed)
    q, k = (gaussian(rng, rows, key_heads, spec.key_dim) for _ in "qk")
    q, k = dense.unit(q) / np.sqrt(spec.key_dim), dense.unit(k)
    v = gaussian(rng, rows, spec.heads, spec.value_dim)
    decay = -strength * rng.random((rows, spec.heads)) ** 3
    beta = rng.random((rows, spec.heads))
    return tuple(a.astype(np.float32) for a in (q, k, v, decay, beta))


def expected_of(made: Inputs) -> np.ndarray:
    q, k, v, decay, beta = made
    return dense.recurred(q, k, v, np.exp(decay.astype(np.float64)), beta)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("chunks", [
    (150,), (1,) * 40, (1, 2, 5, 33, 65, 44), (63, 1, 64, 22), (129, 21),
])  # fmt: skip
def test_gated_delta_rule(runner: Runner, key_heads: int, chunks: tuple[int, ...]) -> None:
    made = inputs(key_heads, sum(chunks), key_heads, SPEC)
    expected = expected_of(made)
    assert np.abs(expected).max() > 0.3
    state = new_state(runner)
    for count in chunks:
        part = slice(state.position, state.position + count)
        for layer in range(2):
            y = runner.ops.gated_delta_rule(*(a[part] for a in made), state, layer)
            assert_allclose(np.asarray(y), expected[part], **F32_REDUCTION)
        state.advance(count)


@pytest.mark.parametrize("shape", [(4, 4), (24, 40), (40, 24), (128, 128), (33, 7)])
def test_gated_delta_rule_of_other_shapes(runner: Runner, shape: tuple[int, int]) -> None:
    spec = DeltaSpec(1, 8, 2, 3, *shape)
    made = inputs(1, 70, 3, spec)
    state = new_state(runner, spec)
    for part in (slice(0, 69), slice(69, 70)):
        y = runner.ops.gated_delta_rule(*(a[part] for a in made), state, 0)
        assert_allclose(np.asarray(y), expected_of(made)[part], **F32_REDUCTION)
        state.advance(part.stop - part.start)


@pytest.mark.parametrize("strength", [0, 1e-6, 30, 1e4])
def test_memories_that_keep_everything_or_nothing(runner: Runner, strength: float) -> None:
    """Sums of decay over a chunk reach -1e5, and their differences still count."""
    made = inputs(3, 130, 2, SPEC, strength)
    state = new_state(runner)
    y = np.asarray(runner.ops.gated_delta_rule(*made, state, 0))
    assert_allclose(y, expected_of(made), **F32_REDUCTION)


def test_the_same_key_again_and_again(runner: Runner) -> None:
    """Each value replaces the one before it: the hardest case for solving a chunk at once."""
    q, k, v, decay, beta = inputs(4, 130, 2, SPEC, 0)
    k[:], beta[:] = k[0], 1
    q = k / np.float32(4)
    state = new_state(runner)
    y = np.asarray(runner.ops.gated_delta_rule(q, k, v, decay, beta, state, 0))
    assert_allclose(y, v / 4, rtol=1e-4, atol=1e-4)


def test_the_memory_is_float32(runner: Runner) -> None:
    """4000 small writes under a slow decay: half precision would lose them."""
    rows = 4000
    q, k, v, decay, beta = inputs(5, rows, 2, SPEC, 1e-3)
    v, beta = np.abs(v), beta * np.float32(1e-3)
    state = new_state(runner)
    found = []
    for start in range(0, rows, 500):
        part = slice(start, start + 500)
        made = (a[part] for a in (q, k, v, decay, beta))
        found.append(np.asarray(runner.ops.gated_delta_rule(*made, state, 0)))
        state.advance(500)
    expected = expected_of((q, k, v, decay, beta))
    error = np.abs(np.concatenate(found) - expected)[-500:].max()
    assert error < 1e-5 * np.abs(expected).max() + 1e-6


def test_an_interrupted_forward_can_run_again(runner: Runner) -> None:
    """Until `advance`, conv and memory start from the same place."""
    made = inputs(6, 20, 2, SPEC)
    x, taps = gaussian(np.random.default_rng(6), 20, 96), gaussian(np.random.default_rng(7), 96, 4)
    state = new_state(runner)

    def both(part: slice) -> tuple[np.ndarray, np.ndarray]:
        y = runner.ops.gated_delta_rule(*(a[part] for a in made), state, 1)
        conv = runner.ops.causal_conv_silu(x[part], runner.ops.vector(taps), state, 1)
        return np.asarray(y).copy(), np.asarray(conv).copy()

    both(slice(0, 9))
    state.advance(9)
    both(slice(9, 13))  # never finished
    y, conv = both(slice(9, 20))
    assert_allclose(y, expected_of(made)[9:], **F32_REDUCTION)
    assert_allclose(conv, dense.convolved(x, taps)[9:], **F32_REDUCTION)


def test_a_state_goes_back_to_its_marks_and_to_the_start(runner: Runner) -> None:
    made = inputs(8, 30, 2, SPEC)
    expected = expected_of(made)
    state = new_state(runner)

    def run(start: int, stop: int) -> np.ndarray:
        y = runner.ops.gated_delta_rule(*(a[start:stop] for a in made), state, 0)
        heads = np.zeros((stop - start, 1, 16), np.float32)
        runner.ops.attention(heads, heads, heads, state, 0)  # the rows that `advance` counts
        state.advance(stop - start)
        return np.asarray(y).copy()

    run(0, 11)
    mark, saved = state.mark(), state.save()
    run(11, 30)
    for back in (lambda: state.cut(11, mark), lambda: state.load(saved)) * 2:
        back()
        assert state.position == 11
        assert_allclose(run(11, 30), expected[11:], **F32_REDUCTION)
    state.cut(0)
    assert_allclose(run(0, 30), expected, **F32_REDUCTION)


def in_chunks(made: Inputs, size: int) -> Iterator[np.ndarray]:
    """`delta.chunk` in float64, any chunk size, heads first."""
    q, k, v, decay, beta = (a.astype(np.float64) for a in made)
    share = v.shape[1] // k.shape[1]
    q, k = (np.repeat(a, share, axis=1).transpose(1, 0, 2) for a in (q, k))
    memory = np.zeros((v.shape[1], k.shape[2], v.shape[2]))
    for start in range(0, len(v), size):
        part = slice(start, start + size)
        rows = (q[:, part], k[:, part], v.transpose(1, 0, 2)[:, part])
        y, memory = delta.chunk(*rows, decay.T[:, part], beta.T[:, part], memory)
        yield y.transpose(1, 0, 2)


@pytest.mark.parametrize("size", [1, 7, 16, 64, 128])
def test_chunks_of_any_size_equal_the_recurrence_in_float64(size: int) -> None:
    made = inputs(9, 200, 2, SPEC)
    found = np.concatenate(list(in_chunks(made, size)))
    assert_allclose(found, expected_of(made), rtol=0, atol=1e-13)


@pytest.mark.parametrize("break_it", [
    lambda q, k, v, decay, beta: (q, k, v, decay * 0, beta),
    lambda q, k, v, decay, beta: (q, k, v, decay, beta * 0 + 1),
    lambda q, k, v, decay, beta: (q, k[:, ::-1], v, decay, beta),
    lambda q, k, v, decay, beta: (q * 2, k, v, decay, beta),
])  # fmt: skip
def test_each_input_counts(runner: Runner, break_it: Callable[..., Inputs]) -> None:
    made = inputs(10, 20, 2, SPEC)
    y = np.asarray(runner.ops.gated_delta_rule(*break_it(*made), new_state(runner), 0))
    assert np.abs(y - expected_of(made)).max() > 0.05
