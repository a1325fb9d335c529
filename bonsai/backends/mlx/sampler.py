"""Choosing an id on the device, without a number going to the host: `bonsai.sampling.choose`.

Logits and weights are float32, sums are exact: weights become integers, so that no order of adding
matters and every device agrees. An id can differ from that of `choose` only where a comparison is
decided by the last bits of a float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from bonsai.sampling import Sampling

__all__ = ["Recipe", "choose", "knobs"]

SCALE = 2.0**44
"""Weights are at most 1, so the sum of a vocabulary of 2^19 fits into 63 bits."""
BLOCK = 1024
"""Ids that one sort of the first round of top_k sees."""
SMALL = 64
"""The largest top_k that is found in two rounds."""
LEAST, MOST = 1e-37, 1e37
"""Temperatures beyond these are the same in float32."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What must be known to build the graph; numbers that only change values are in `knobs`.

    Ids at `valid` and above are never chosen.
    """

    valid: int
    sampled: bool
    penalized: bool
    top_k: int

    @classmethod
    def of(cls, sampling: Sampling, valid: int) -> Recipe:
        sampled = sampling.temperature > 0
        return cls(
            valid, sampled, sampling.repetition_penalty != 1.0, sampling.top_k if sampled else 0
        )


def knobs(sampling: Sampling, uniform: float) -> mx.array:
    """The numbers of a `Recipe`: temperature, min_p, penalty, top_p and uniform as fractions."""
    temperature = min(max(sampling.temperature, LEAST), MOST)
    top_p = _halves(sampling.top_p) if sampling.top_p < 1 else (-1.0, 0.0)
    values = (temperature, sampling.min_p, sampling.repetition_penalty, *top_p, *_halves(uniform))
    return mx.array(values, mx.float32)


def choose(logits: mx.array, recipe: Recipe, numbers: mx.array, seen: mx.array | None) -> mx.array:
    """One id, int32 []; -1 when a logit is NaN or +inf, or none is above -inf.

    `logits` float32 [vocab], `seen` bool [vocab] where the recipe is penalized.
    """
    temperature, min_p, penalty = numbers[0], numbers[1], numbers[2]
    scores = logits
    if recipe.penalized:
        assert seen is not None
        scores = mx.where(seen, mx.where(scores > 0, scores / penalty, scores * penalty), scores)
    best = scores.max()
    usable = mx.logical_not(mx.isnan(logits).any()) & (mx.abs(best) < mx.inf)
    if not recipe.sampled:
        chosen = mx.argmax(scores)
    else:
        chosen = _drawn(scores, best, recipe.top_k, temperature, min_p, numbers)
    return mx.where(usable, chosen.astype(mx.int32), mx.array(-1, mx.int32))


def _drawn(
    scores: mx.array,
    best: mx.array,
    top_k: int,
    temperature: mx.array,
    min_p: mx.array,
    numbers: mx.array,
) -> mx.array:
    ids = _best_first(scores, top_k)
    weights = mx.exp((scores[ids] - best) / temperature)
    sums = mx.cumsum((weights * SCALE).astype(mx.uint64))
    places = mx.arange(ids.shape[0])
    reached = 1 + (sums < _part(numbers[3], numbers[4], sums[-1])).sum()
    kept = mx.where(numbers[3] < 0, ids.shape[0], mx.minimum(reached, ids.shape[0]))
    kept = ((places < kept) & (weights >= min_p)).sum()
    floor = _part(numbers[5], numbers[6], sums[kept - 1])
    drawn = ((places < kept) & (sums <= floor)).sum()
    return ids[mx.minimum(drawn, kept - 1)]


def _best_first(scores: mx.array, top_k: int) -> mx.array:
    """Ids by (score descending, id ascending): the first `top_k`, or all when it is 0.

    A score and its id make one integer, so the order does not depend on how the device sorts.
    """
    vocab = scores.shape[0]
    keys = (_rising(-scores).astype(mx.uint64) << 32) | mx.arange(vocab).astype(mx.uint64)
    if 0 < top_k <= SMALL and vocab > 2 * BLOCK:
        missing = -vocab % BLOCK
        if missing:
            keys = mx.concatenate([keys, ~mx.zeros((missing,), mx.uint64)])  # after all others
        keys = mx.sort(keys.reshape(-1, BLOCK), axis=1)[:, :top_k].reshape(-1)
    keys = mx.sort(keys)
    keys = keys[:top_k] if 0 < top_k < vocab else keys[:vocab]
    return (keys & 0xFFFFFFFF).astype(mx.uint32)


def _rising(x: mx.array) -> mx.array:
    """uint32 in the order of the float32 x, both zeros the same."""
    bits = mx.where(x == 0, mx.array(0.0), x).view(mx.uint32)
    top = mx.array(0x80000000, mx.uint32)
    return mx.where(bits >= top, ~bits, bits | top)


def _halves(fraction: float) -> tuple[float, float]:
    """A number in [0, 1) as the upper and lower 16 of its first 32 bits, both exact in float32."""
    bits = int(fraction * 2**32)
    return float(bits >> 16), float(bits & 0xFFFF)


def _part(upper: mx.array, lower: mx.array, total: mx.array) -> mx.array:
    """floor(total * fraction) for a fraction of 32 bits and a total below 2^64."""
    fraction = (upper.astype(mx.uint64) << 16) | lower.astype(mx.uint64)
    high, low = total >> 32, total & 0xFFFFFFFF
    return high * fraction + ((low * fraction) >> 32)
