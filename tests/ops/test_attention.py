"""`attention` of every backend, with its growing state, against float64."""

from __future__ import annotations

import dense
import numpy as np
import pytest
from numpy.testing import assert_allclose
from runners import Runner


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (4, 4), (9, 3), (16, 2)])
@pytest.mark.parametrize("width", [16, 64, 96, 128])
def test_attention_is_right_in_chunks_of_any_size(
    runner: Runner, heads: int, kv_heads: int, width: int
) -> None:
    rng = np.random.default_rng(width)
    total = 83
    q = gaussian(rng, total, heads, width)
    k, v = gaussian(rng, total, kv_heads, width), gaussian(rng, total, kv_heads, width)
    expected = dense.attended(q, k, v, heads // kv_heads)
    for chunks in ((83,), (1, 2, 5, 33, 42), (33, 1, 1, 1, 47)):
        state = runner.new_state(1, kv_heads, width, 83)
        for count in chunks:
            part = slice(state.position, state.position + count)
            y = np.asarray(runner.ops.attention(q[part], k[part], v[part], state, 0))
            assert y.shape == (count, heads, width)
            assert_allclose(y, expected[part], **runner.attention)
            state.advance(count)


def test_layers_keep_their_own_rows(runner: Runner) -> None:
    rng = np.random.default_rng(0)
    state = runner.new_state(3, 1, 64, 100)
    q, k, v = gaussian(rng, 3, 7, 2, 64), gaussian(rng, 3, 7, 1, 64), gaussian(rng, 3, 7, 1, 64)
    for part in (slice(0, 5), slice(5, 7)):
        for layer in range(3):
            rows = (q[layer, part], k[layer, part], v[layer, part])
            y = np.asarray(runner.ops.attention(*rows, state, layer))
            expected = dense.attended(q[layer], k[layer], v[layer], 2)[part]
            assert_allclose(y, expected, **runner.attention)
        state.advance(part.stop - part.start)


def test_slices_of_a_wider_array_are_read_right(runner: Runner) -> None:
    """The model cuts q, k and v out of one array of heads."""
    rng = np.random.default_rng(1)
    for rows in (1, 2, 5, 33):
        joined = gaussian(rng, rows, 8, 64)
        q, k, v = joined[:, :4], joined[:, 4:6], joined[:, 6:]
        y = np.asarray(runner.ops.attention(q, k, v, runner.new_state(1, 2, 64, 64), 0))
        assert_allclose(y, dense.attended(q, k, v, 2), **runner.attention)


def test_an_interrupted_forward_can_run_again(runner: Runner) -> None:
    """Until `advance`, appending again writes the same place."""
    rng = np.random.default_rng(2)
    state = runner.new_state(1, 1, 64, 100)
    q, k, v = gaussian(rng, 9, 2, 64), gaussian(rng, 9, 1, 64), gaussian(rng, 9, 1, 64)
    runner.ops.attention(q[:4], k[:4], v[:4], state, 0)
    state.advance(4)
    runner.ops.attention(q[:5], k[:5], v[:5], state, 0)
    y = np.asarray(runner.ops.attention(q[4:], k[4:], v[4:], state, 0))
    assert_allclose(y, dense.attended(q, k, v, 2)[4:], **runner.attention)


def test_large_scores_do_not_overflow(runner: Runner) -> None:
    rng = np.random.default_rng(3)
    q, k, v = 1e3 * gaussian(rng, 9, 2, 64), gaussian(rng, 9, 1, 64), gaussian(rng, 9, 1, 64)
    k = k.astype(np.float16).astype(np.float32)  # scores of 1e4: rounding k would decide the winner
    y = np.asarray(runner.ops.attention(q, k, v, runner.new_state(1, 1, 64, 16), 0))
    assert np.isfinite(y).all()
    assert_allclose(y, dense.attended(q, k, v, 2), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_attention_reads_far_back_across_every_growth_of_the_state(
    runner: Runner, rows: int
) -> None:
    rng = np.random.default_rng(4)
    before = 1100
    total = before + rows
    q, k, v = gaussian(rng, total, 4, 64), gaussian(rng, total, 2, 64), gaussian(rng, total, 2, 64)
    k[0] *= 3
    state = runner.new_state(1, 2, 64, total)
    for start in range(0, before, 100):
        part = slice(start, start + 100)
        runner.ops.attention(q[part], k[part], v[part], state, 0)
        state.advance(100)
    y = np.asarray(runner.ops.attention(q[before:], k[before:], v[before:], state, 0))
    expected = dense.attended(q[before:], k, v, 2, first=before)
    assert_allclose(y, expected, **runner.attention)


def test_a_state_forgets_what_is_cut_and_holds_what_was_saved(runner: Runner) -> None:
    rng = np.random.default_rng(5)
    q, k, v = gaussian(rng, 20, 2, 64), gaussian(rng, 20, 1, 64), gaussian(rng, 20, 1, 64)
    other = gaussian(rng, 20, 1, 64)
    state = runner.new_state(1, 1, 64, 40)

    def append(keys: np.ndarray, start: int, stop: int) -> np.ndarray:
        part = slice(start, stop)
        y = np.asarray(runner.ops.attention(q[part], keys[part], v[part], state, 0))
        state.advance(stop - start)
        return y

    append(k, 0, 8)
    saved = state.save()
    append(other, 8, 20)
    state.cut(8)
    assert state.position == 8
    expected = dense.attended(q, k, v, 2)[8:]
    assert_allclose(append(k, 8, 20), expected, **runner.attention)
    for _ in range(2):  # a saved state is not used up
        state.load(saved)
        assert state.position == 8
        assert_allclose(append(k, 8, 20), expected, **runner.attention)
    fresh = runner.new_state(1, 1, 64, 20)
    fresh.load(saved)
    state = fresh
    assert_allclose(append(k, 8, 20), expected, **runner.attention)


def test_what_was_saved_survives_rows_written_over(runner: Runner) -> None:
    rng = np.random.default_rng(6)
    q, k, v = gaussian(rng, 9, 2, 64), gaussian(rng, 9, 1, 64), gaussian(rng, 9, 1, 64)
    state = runner.new_state(1, 1, 64, 9)
    runner.ops.attention(q[:8], k[:8], v[:8], state, 0)
    state.advance(8)
    saved = state.save()
    for _ in range(2):  # first over the rows of the state itself, then over those it got back
        state.cut(3)
        runner.ops.attention(q[3:8], -k[3:8], -v[3:8], state, 0)
        state.advance(5)
        state.load(saved)
    y = np.asarray(runner.ops.attention(q[8:], k[8:], v[8:], state, 0))
    assert_allclose(y, dense.attended(q, k, v, 2)[8:], **runner.attention)
