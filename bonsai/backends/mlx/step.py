"""One token through a model and the choice of the next, as one graph: built, or traced once.

Knows what goes into a step and comes out of it. Does not know when steps run; that is the session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from bonsai.backends.mlx.ops import MlxOps
from bonsai.backends.mlx.sampler import Recipe, choose
from bonsai.backends.mlx.state import Arrays, MlxState
from bonsai.models import Model

__all__ = ["Choice", "Stepper"]

RECIPES = 8
"""Traced steps that are kept; each new way to sample needs one."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """An id that may not be computed yet, int32 []: -1 where the logits are not finite.

    `row` is the hidden row [1, hidden] of the token before it, `seen` the ids that a penalty sees.
    """

    token: mx.array
    row: mx.array = field(repr=False)
    seen: mx.array | None = field(repr=False)


class Stepper:
    """Steps of one model. Compiled ones look at positions and settings as arrays only.

    `traces` counts how often the Python code of a step ran to be compiled.
    """

    def __init__(self, model: Model, ops: MlxOps, *, compiled: bool) -> None:
        self.traces = 0
        self._model, self._ops = model, ops
        self._compiled = compiled
        self._steps: OrderedDict[Recipe, Callable[..., Any]] = OrderedDict()

    def choose(
        self, row: mx.array, recipe: Recipe, numbers: mx.array, seen: mx.array | None
    ) -> Choice:
        """The next id after the token whose hidden row [1, hidden] this is."""
        logits = self._model.weights.head(row).astype(mx.float32).reshape(-1)
        finite = mx.isfinite(logits).all()
        places = mx.arange(logits.shape[0])
        logits = mx.where(places < recipe.valid, logits, -mx.inf)
        token = mx.where(finite, choose(logits, recipe, numbers, seen), mx.array(-1, mx.int32))
        if seen is not None:
            seen = seen | (places == token)
        return Choice(token, row, seen)

    def step(self, state: MlxState, before: Choice, recipe: Recipe, numbers: mx.array) -> Choice:
        """Append `before.token` to the state, not held yet; the choice of the id after it."""
        state.reserve(1)
        if not self._compiled:
            row = self._forward(before.token, state)
            return self.choose(row, recipe, numbers, before.seen)
        run = self._traced(recipe, state)
        token, row, seen, arrays = run(
            before.token, state.start, numbers, before.seen, state.arrays()
        )
        state.put(arrays)  # nothing else holds the old keys: MLX writes the row where they are
        return Choice(token, row, seen)

    def _forward(self, token: mx.array, state: MlxState) -> mx.array:
        return self._model.forward(self._ops, mx.maximum(token, 0).reshape(1), state)

    def _traced(self, recipe: Recipe, state: MlxState) -> Callable[..., Any]:
        """The compiled step of a recipe; MLX traces it again when shapes change."""
        if recipe in self._steps:
            self._steps.move_to_end(recipe)
            return self._steps[recipe]

        def run(
            token: mx.array,
            start: mx.array,
            numbers: mx.array,
            seen: mx.array | None,
            arrays: Arrays,
        ) -> tuple[mx.array, mx.array, mx.array | None, Arrays]:
            self.traces += 1
            sliced, self._ops.sliced = self._ops.sliced, False
            view = state_like(arrays, start)
            try:
                row = self._forward(token, view)
            finally:
                self._ops.sliced = sliced
            made = self.choose(row, recipe, numbers, seen)
            return made.token, made.row, made.seen, view.stored()

        state_like = state.traced
        self._steps[recipe] = mx.compile(run)
        if len(self._steps) > RECIPES:
            self._steps.popitem(last=False)
        return self._steps[recipe]
