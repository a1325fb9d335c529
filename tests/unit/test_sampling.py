"""Settings are refused clearly, and `choose` is the arithmetic that its docstring states."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bonsai.errors import BonsaiError, InvalidRequest, NumericError
from bonsai.sampling import Sampling, choose

NONE = np.empty(0, np.int64)
UNIFORMS = (0.0, 1e-12, 0.25, 0.5, 0.75, 1 - 2**-53)


def chosen(logits, sampling, uniforms=UNIFORMS, seen=NONE):
    """The ids that `choose` gives for several uniform numbers."""
    row = np.asarray(logits, np.float32)
    return [choose(row, sampling, np.asarray(seen, np.int64), u) for u in uniforms]


def plain(logits, sampling, seen, uniform):
    """`choose`, once more: a loop over Python floats that follows the docstring step by step."""
    scores = [float(x) for x in logits]
    for i in set(seen):
        p = sampling.repetition_penalty
        scores[i] = scores[i] / p if scores[i] > 0 else scores[i] * p
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if sampling.temperature == 0:
        return ranked[0]
    ranked = ranked[: sampling.top_k or None]
    top = scores[ranked[0]]
    weights = [math.exp((scores[i] - top) / sampling.temperature) for i in ranked]
    sums = list(itertools.accumulate(weights))
    n = len(ranked)
    if sampling.top_p < 1:
        n = 1 + next(i for i, c in enumerate(sums) if c >= sampling.top_p * sums[-1])
    if sampling.min_p > 0:
        n = sum(w >= sampling.min_p for w in weights[:n])
    return next(ranked[i] for i in range(n) if sums[i] > uniform * sums[n - 1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-1, -1e-30, math.nan, math.inf, "1", None, True, 1j)),
        *(("top_k", v) for v in (-1, 1.5, "5", None, True, 2**63)),
        *(("top_p", v) for v in (1.5, -0.1, math.nan, "x", None)),
        *(("min_p", v) for v in (1.01, -1, math.nan, None)),
        *(("repetition_penalty", v) for v in (0, -1, 0.001, 101, math.nan, math.inf)),
        *(("seed", v) for v in (-1, 1.0, "7", True, 2**64)),
    ],
)
def test_bad_setting_is_refused_by_name_and_value(field, value):
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "expected" in str(caught.value)
    assert isinstance(caught.value, BonsaiError)


def test_settings_are_plain_numbers_and_comparable():
    made = Sampling(temperature=np.float32(0.5), top_k=np.int64(7), top_p=1, seed=np.uint64(3))
    assert made == Sampling(temperature=0.5, top_k=7, top_p=1.0, seed=3)
    assert [type(v) for v in (made.temperature, made.top_k, made.top_p)] == [float, int, float]
    with pytest.raises(AttributeError):
        made.top_k = 3


def test_greedy_takes_the_best_and_the_lowest_of_equals():
    assert chosen([1.0, 5.0, 5.0, 2.0], Sampling.greedy()) == [1] * len(UNIFORMS)
    assert chosen([-math.inf, -3.0, -3.0], Sampling.greedy()) == [1] * len(UNIFORMS)


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-30, 1e-5, 0.01])
def test_tiny_temperature_is_argmax(temperature):
    logits = [1e4, 9999.0, -math.inf]
    assert chosen(logits, Sampling(temperature=temperature)) == [0] * len(UNIFORMS)
    assert chosen(logits[::-1], Sampling(temperature=temperature)) == [2] * len(UNIFORMS)


def test_temperature_two_shares_the_probability():
    logits = [1e4, 9999.0, -math.inf]
    edge = 1 / (1 + math.exp(-0.5))
    uniforms = (0.0, edge - 1e-9, edge + 1e-9, 1 - 2**-53)
    assert chosen(logits, Sampling(temperature=2.0), uniforms) == [0, 0, 1, 1]


def test_huge_temperature_is_uniform_and_never_picks_minus_infinity():
    logits = [3.0, -math.inf, 1e30, -1e30]
    picks = chosen(logits, Sampling(temperature=1e300), np.linspace(0, 1, 999, endpoint=False))
    assert sorted(set(picks)) == [0, 2, 3]
    assert max(map(picks.count, (0, 2, 3))) == 333


def test_extreme_logits_neither_overflow_nor_warn():
    big = float(np.finfo(np.float32).max)
    for t in (1e-300, 1.0, 1e300):
        assert chosen([-big, big], Sampling(temperature=t), (0.0,)) == [1]
    penalised = Sampling(repetition_penalty=0.01)
    assert chosen([-big, big], penalised, (0.5,), seen=[0, 1]) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling.greedy(), Sampling(top_k=1), Sampling()])
def test_logits_that_are_not_finite_are_an_error(bad, sampling):
    for row in ([0.0, bad, 9.0], [bad] * 3, [bad, 1.0, -math.inf]):
        with pytest.raises(NumericError):
            chosen(row, sampling)
    with pytest.raises(NumericError):
        chosen([-math.inf] * 3, sampling)


def test_penalty_lowers_positive_and_negative_logits():
    """[2, -1, 0.5, -3], 1.5, seen {0, 1} -> [1.3333, -1.5, 0.5, -3]: shown by who wins."""
    sampling = Sampling(temperature=0, repetition_penalty=1.5)

    def scored(index, logit):
        """True when seen id `index` ends up below `logit`."""
        row = np.array([-100.0] * 4 + [logit], np.float32)
        row[index] = [2, -1, 0.5, -3][index]
        return choose(row, sampling, np.array([0, 1]), 0.0) == 4

    assert scored(0, 1.3334) and not scored(0, 1.3333)
    assert scored(1, -1.4999) and not scored(1, -1.5001)
    assert scored(2, 0.5001) and not scored(2, 0.4999)
    assert scored(3, -2.9999) and not scored(3, -3.0001)


def test_id_seen_often_is_penalised_once():
    sampling = Sampling(temperature=0, repetition_penalty=1.5)
    assert chosen([2.0, 1.3], sampling, (0.0,), seen=[0, 0, 0]) == [0]  # 1.333, not 0.593
    assert chosen([2.0, 1.34], sampling, (0.0,), seen=[0]) == [1]


def test_logits_are_not_changed():
    row = np.array([2.0, -1.0, 0.5], np.float32)
    choose(row, Sampling(repetition_penalty=2.0, top_k=2), np.array([0, 1]), 0.5)
    assert row.tolist() == [2.0, -1.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "survivors"),
    [
        ({"top_k": 0}, 1000),
        ({"top_k": 1}, 1),
        ({"top_k": 999}, 999),
        ({"top_k": 1000}, 1000),
        ({"top_k": 1001}, 1000),
        ({"top_k": 10**9}, 1000),
        ({"top_p": 0}, 1),
        ({"top_p": 1}, 1000),
        ({"min_p": 1}, 1),
        ({"min_p": 0}, 1000),
        ({"top_k": 7, "top_p": 0, "min_p": 1}, 1),
    ],
)
def test_edges_of_the_filters(settings, survivors):
    logits = np.linspace(0.0, 1.0, 1000).astype(np.float32)[::-1]  # id 0 is the best
    picks = chosen(logits, Sampling(**settings), UNIFORMS)
    assert picks[0] == 0
    assert picks[-1] == survivors - 1


def test_top_k_keeps_the_lower_ids_of_equals():
    logits = [0.0, 1.0, 1.0, 1.0, 2.0]
    picks = chosen(logits, Sampling(top_k=3), np.linspace(0, 1, 200, endpoint=False))
    assert set(picks) == {4, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.76, 3), (0.99, 4)):
        picks = chosen(logits, Sampling(top_p=top_p), np.linspace(0, 1, 200, endpoint=False))
        assert set(picks) == set(range(kept))


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.5, 0.26, 0.125, 0.115]).astype(np.float32)
    picks = chosen(logits, Sampling(min_p=0.5), np.linspace(0, 1, 200, endpoint=False))
    assert set(picks) == {0, 1}


def test_choose_is_the_arithmetic_of_its_docstring():
    rng = np.random.default_rng(5)
    for _ in range(300):
        logits = np.round(rng.normal(0, 4, 40), 1).astype(np.float32)  # with ties
        logits[rng.integers(0, 40, 3)] = -np.inf
        sampling = Sampling(
            temperature=float(rng.choice([0, 0.3, 1, 2])),
            top_k=int(rng.choice([0, 1, 5, 39, 50])),
            top_p=float(rng.choice([0, 0.3, 0.9, 1])),
            min_p=float(rng.choice([0, 0.05, 1])),
            repetition_penalty=float(rng.choice([1, 1.3, 0.7])),
        )
        seen = np.unique(rng.integers(0, 40, 10))
        uniform = rng.random()
        expected = plain(logits.tolist(), sampling, seen.tolist(), uniform)
        assert choose(logits, sampling, seen, uniform) == expected


def test_frequencies_follow_the_softmax():
    logits = np.log([0.6, 0.3, 0.1]).astype(np.float32)
    uniforms = itertools.islice(Sampling(seed=1).uniforms(), 20_000)
    counts = np.bincount(chosen(logits, Sampling(), uniforms)) / 20_000
    assert np.abs(counts - [0.6, 0.3, 0.1]).max() < 0.015  # over four standard deviations


def test_seed_decides_the_uniform_numbers():
    def first(seed):
        return list(itertools.islice(Sampling(seed=seed).uniforms(), 5))

    assert first(7) == first(7) != first(8)
    assert first(None) != first(None)
    assert first(0)[:2] == [0.6369616873214543, 0.2697867137638703]  # NumPy's PCG64, seed 0
