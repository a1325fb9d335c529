"""Engine and session on MLX: the device computes the next id while the host looks at this one.

Knows when graphs are handed over and read. Everything else, which ids are held, what is pending
and how a state goes back, is `EagerSession`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import numpy as np

from bonsai.backends.eager import CHUNK, EagerEngine, EagerSession
from bonsai.backends.mlx.costs import Prediction
from bonsai.backends.mlx.device import scope, waiting
from bonsai.backends.mlx.ops import MlxOps
from bonsai.backends.mlx.sampler import Recipe, knobs
from bonsai.backends.mlx.state import MlxState, flat
from bonsai.backends.mlx.step import Choice, Stepper
from bonsai.backends.ops import Array
from bonsai.errors import NumericError
from bonsai.models import Model
from bonsai.sampling import Sampling

__all__ = ["MlxEngine", "MlxSession"]

CLEARED = 256
"""Tokens after which buffers that nobody uses go back to the system, such as a smaller state."""


class MlxEngine(EagerEngine):
    """A model on MLX arrays. `compiled`: one token is a traced graph, else built for each token.

    `prediction` is what decoding should reach on this device; None where nothing is known.
    """

    def __init__(
        self,
        model: Model,
        ops: MlxOps,
        new_state: Callable[[int], MlxState],
        description: str,
        chunk: int = CHUNK,
        *,
        compiled: bool = False,
        prediction: Prediction | None = None,
    ) -> None:
        super().__init__(model, ops, new_state, description, chunk)
        self.prediction = prediction
        self.stepper = Stepper(model, ops, compiled=compiled)

    def open_session(self, max_context: int, valid_ids: int) -> MlxSession:
        return MlxSession(self, max_context, valid_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """The choice after an id that is pending: `choice.row` is that id's own hidden row.

    It was made for a session of so many tokens, in this version of its state.
    """

    choice: Choice = field(repr=False)
    last: int
    tokens: int
    version: int


class MlxSession(EagerSession):
    """`bonsai.backends.Session`. What was computed ahead counts only if nothing has changed."""

    _engine: MlxEngine

    def _decode(self, sampling: Sampling) -> Iterator[int]:
        recipe = Recipe.of(sampling, min(self._valid_ids, self._engine.vocab))
        uniforms = sampling.uniforms()
        numbers = knobs(sampling, next(uniforms))
        ahead: Ahead | None = None
        while self._mlx_state() and len(self._tokens) < self.max_context:
            if ahead is not None and self._holds(ahead):
                self._advance(ahead.choice)
            else:
                ahead = self._first(sampling, recipe, numbers)
            numbers = knobs(sampling, next(uniforms))
            following = self._hand_over(ahead.choice, recipe, numbers)
            token = self._read(ahead.choice)
            self._seen.add(token)
            self._tokens.append(token)
            ahead = None
            if following is not None:
                ahead = Ahead(following, token, len(self._tokens), self._mlx_state().version)
            yield token

    def _holds(self, ahead: Ahead) -> bool:
        """Whether what `ahead` was computed for is still what is held."""
        now = (len(self._tokens), self._mlx_state().version)
        return now == (ahead.tokens, ahead.version) and self._tokens[-1] == ahead.last

    def _advance(self, choice: Choice) -> None:
        """The step of the pending id is done: it is no longer pending."""
        state = self._mlx_state()
        self._last = None  # an interrupt between the next two lines must not leave an old row
        state.advance(1)
        self._last = choice.row
        self._keep_mark(state)
        if state.position % CLEARED == 0:
            mx.clear_cache()

    def _first(self, sampling: Sampling, recipe: Recipe, numbers: mx.array) -> Ahead:
        """The choice after the tokens that are held, which are computed, handed over."""
        row, stepper = self._ready(), self._engine.stepper
        with scope():
            seen = None
            if recipe.penalized:
                seen = self._ops().seen(self._engine.vocab, self._history(sampling))
            choice = stepper.choose(row, recipe, numbers, seen)
            mx.async_eval(choice.token)
        return Ahead(choice, self._tokens[-1], len(self._tokens), self._mlx_state().version)

    def _hand_over(self, choice: Choice, recipe: Recipe, numbers: mx.array) -> Choice | None:
        """Give the device the step after a choice that nobody has read yet; None at the end."""
        if len(self._tokens) + 1 >= self.max_context:
            return None
        state = self._mlx_state()
        with scope():
            following = self._engine.stepper.step(state, choice, recipe, numbers)
            mx.async_eval(following.token, following.row, *flat(state.stored()))
        return following

    def _read(self, choice: Choice) -> int:
        """The id, once it is there. Raises NumericError where there is none."""
        with waiting():
            token = int(choice.token.item())
        if token >= 0:
            return token
        self.logits()  # says what is wrong with them
        raise NumericError(
            f"the model's logits are not usable after {len(self._tokens)} tokens",
            hint="the weights may be damaged: bonsai verify; or try --backend reference",
        )

    def _forward(self) -> Array:
        """Hand the next chunk of pending ids to the device and wait for it."""
        state, engine = self._mlx_state(), self._engine
        chunk = self._tokens[state.position : self._end_of_chunk(state.position)]
        state.version += 1  # what was computed ahead is overwritten
        with scope():
            state.reserve(len(chunk))
            rows = engine.model.forward(engine.ops, mx.array(chunk, mx.int32), state)
            last = mx.contiguous(rows[-1:])
            mx.async_eval(rows, last, *flat(state.stored()))
        with waiting():
            mx.eval(rows, last, *flat(state.stored()))
        mx.clear_cache()  # the buffers of a chunk are larger than those of a token
        self._last = None  # as in `_advance`
        state.advance(len(chunk))
        self._last = last
        self._keep_mark(state)
        return rows

    def _raw_logits(self, rows: Array) -> np.ndarray:
        with scope():
            found = self._engine.model.weights.head(rows).astype(mx.float32)
            mx.async_eval(found)
        with waiting():
            return np.array(found)

    def _mlx_state(self) -> MlxState:
        return cast(MlxState, self._state())

    def _ops(self) -> MlxOps:
        return cast(MlxOps, self._engine.ops)

    def __enter__(self) -> MlxSession:
        return self
