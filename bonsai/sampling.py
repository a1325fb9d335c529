"""How the next token is chosen: the settings, and what they mean in NumPy.

Knows logits and ids. Does not know text, stop rules or where logits come from. Every backend's own
sampler must return what `choose` returns for the same logits, history and uniform number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from bonsai.errors import InvalidRequest, NumericError

__all__ = ["Sampling", "choose"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of one reply. `Sampling()` is the model's own distribution, unchanged.

    temperature         0 or more: logits are divided by it; 0 is the single best id (`greedy`)
    top_k               0 or more: keep the k best ids; 0 is off, more than the vocabulary is all
    top_p               0 to 1: keep the fewest best ids with this much probability; 1 is off
    min_p               0 to 1: keep ids at least this probable relative to the best one; 0 is off
    repetition_penalty  0.01 to 100: ids already in the context, prompt included, are less likely
                        above 1 and more likely below 1; 1 is off
    seed                0 to 2**64 - 1, or None for a different reply each time

    Whatever the values, the best id always survives. Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_real("temperature", 0.0, math.inf, "a finite number, 0 or more")
        self._check_real("top_p", 0.0, 1.0, "0 to 1")
        self._check_real("min_p", 0.0, 1.0, "0 to 1")
        self._check_real("repetition_penalty", 0.01, 100.0, "0.01 to 100")
        self._check_index("top_k", 2**63, "0 (off) or more")
        if self.seed is not None:
            self._check_index("seed", 2**64, f"0 to {2**64 - 1}, or None")

    @classmethod
    def greedy(cls) -> Sampling:
        """Always the best id; the lowest id where several are equally good."""
        return cls(temperature=0.0)

    def uniforms(self) -> Iterator[float]:
        """The numbers in [0, 1) that decide a reply, one for each chosen id, greedy or not.

        They are PCG64's of NumPy, so that one seed means one reply on every backend.
        """
        generator = np.random.Generator(np.random.PCG64(self.seed))
        while True:
            yield float(generator.random())

    def _check_real(self, name: str, low: float, high: float, accepted: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, Real) or isinstance(value, bool):
            raise InvalidRequest(f"sampling: {name} is {value!r}, expected {accepted}")
        number = float(value)
        if not (low <= number <= high and math.isfinite(number)):
            raise InvalidRequest(f"sampling: {name} is {value!r}, expected {accepted}")
        object.__setattr__(self, name, number)

    def _check_index(self, name: str, limit: int, accepted: str) -> None:
        value: Any = getattr(self, name)
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < limit:
            raise InvalidRequest(f"sampling: {name} is {value!r}, expected {accepted}")
        object.__setattr__(self, name, number)


def choose(logits: np.ndarray, sampling: Sampling, seen: np.ndarray, uniform: float) -> int:
    """One id from `logits` float32 [vocab]; `seen` are the ids of the context, `uniform` in [0, 1).

    All arithmetic is in float64, sums run from the first candidate to the last, in this order:

    1. l = logits. For each id of `seen`, once: l / penalty where l > 0, l * penalty elsewhere.
    2. temperature 0: the lowest id among those with the largest l. Done.
    3. Candidates are the ids sorted by (l descending, id ascending); top_k keeps the first k.
    4. w[i] = exp((l[i] - l[0]) / temperature); c[i] = w[0] + ... + w[i]; n = all candidates.
    5. top_p < 1: n = 1 + the first i with c[i] >= top_p * c[n - 1].
    6. min_p > 0: n = the number of i < n with w[i] >= min_p (w[0] is 1).
    7. The first i with c[i] > uniform * c[n - 1].

    Ids at -inf are never chosen. Implementations whose exp differs in the last bit can disagree
    only where a comparison in 5 to 7 is decided by that bit. Raises NumericError when a logit is
    NaN or +inf, or all are -inf.
    """
    best = logits.max()  # NaN if there is one
    if not np.isfinite(best):
        raise NumericError(
            f"the model's logits are not usable (their maximum is {best})",
            hint="the weights may be damaged: bonsai verify; or try --backend reference",
        )
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1.0 and len(seen):
        hit, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = np.where(hit > 0, hit / penalty, hit * penalty)
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    order = _best_first(scores, sampling.top_k)
    with np.errstate(over="ignore", under="ignore"):  # far below the best: -inf, weight 0
        weights = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
        sums = np.cumsum(weights)
    kept = len(order)
    if sampling.top_p < 1.0:
        kept = 1 + int(np.searchsorted(sums, sampling.top_p * sums[-1], side="left"))
    if sampling.min_p > 0.0:
        kept = int(np.count_nonzero(weights[:kept] >= sampling.min_p))
    drawn = int(np.searchsorted(sums[:kept], uniform * sums[kept - 1], side="right"))
    return int(order[min(drawn, kept - 1)])


def _best_first(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Ids by (score descending, id ascending): the first `top_k`, or all when it is 0."""
    if not 0 < top_k < len(scores):
        return np.argsort(-scores, kind="stable")
    floor = np.partition(scores, -top_k)[-top_k]
    ids = np.flatnonzero(scores >= floor)  # more than top_k only where scores tie at the floor
    return ids[np.argsort(-scores[ids], kind="stable")][:top_k]
