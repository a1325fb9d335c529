"""The ops contract on MLX arrays, lazily: nothing is computed until a session asks for it.

Knows shapes and number types. Does not know when anything runs, nor positions as numbers in what
may be compiled. Activations have one type, `dtype`; norms, gates, convolutions and memories are
float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from bonsai.backends.mlx import delta
from bonsai.backends.mlx.device import scope
from bonsai.backends.mlx.linear import MlxLinear, Part, Table, part_of
from bonsai.backends.mlx.sampler import Recipe, choose, knobs
from bonsai.backends.mlx.state import MlxState
from bonsai.config import DeltaSpec, RopeSpec
from bonsai.errors import NumericError
from bonsai.matrix import Matrix
from bonsai.sampling import Sampling

__all__ = ["MlxOps", "Vector"]

DIGITS = 1024
"""The angle of a position is the sum of those of its three digits in this base."""
SLICE = 4
"""Residual sums after which the graph so far goes to the device: two blocks of a decoder."""
SCORES = 1 << 26
"""Scores of attention at a time where MLX has no kernel that never stores them."""


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A small array as it is, and rounded to the type of activations."""

    exact: mx.array = field(repr=False)
    rounded: mx.array = field(repr=False)


class MlxOps:
    """`bonsai.backends.ops.Ops` on MLX arrays; the state is an `MlxState`.

    `release` is told the name of each matrix that has been copied. `sliced` hands a graph over in
    parts while it is built; it must be off while something is traced.
    """

    def __init__(
        self,
        dtype: Any = mx.float32,
        *,
        release: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.dtype = dtype
        self.sliced = False
        self.linear_bytes = 0  # what one token reads, as the device keeps it
        self._release = release
        self._sums = 0
        self._table: Table | None = None
        self._angles: dict[RopeSpec, list[tuple[mx.array, mx.array]]] = {}

    def new_state(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        delta: DeltaSpec | None = None,
    ) -> MlxState:
        """The state of a fresh conversation."""
        return MlxState(layers, kv_heads, head_dim, max_context, delta, dtype=self.dtype)

    def vector(self, values: np.ndarray) -> Vector:
        exact = mx.array(np.array(values, np.float32))
        made = Vector(exact, exact.astype(self.dtype))
        mx.eval(made.rounded)
        return made

    def table(self, matrix: Matrix) -> Table:
        self._table = Table(matrix, self._part(matrix), self.dtype)
        return self._table

    def linear(self, *matrices: Matrix) -> MlxLinear:
        made = MlxLinear([(self._part(m), m.transform) for m in matrices], self.dtype, self._summed)
        mx.eval(made.arrays)
        self.linear_bytes += sum(array.nbytes for array in made.arrays)
        mx.clear_cache()  # parts that were joined
        return made

    def embed(self, table: Table, tokens: mx.array) -> mx.array:
        return table.rows(tokens)

    def rms_norm(self, x: mx.array, gain: Vector, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, gain.rounded, eps)

    def rope(self, x: mx.array, state: MlxState, spec: RopeSpec) -> mx.array:
        cos, sin = state.once((spec, x.shape[0]), lambda: self._turns(state, spec, x.shape[0]))
        half = spec.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : spec.dims].astype(mx.float32)
        turned = [a * cos - b * sin, b * cos + a * sin]
        parts = [part.astype(x.dtype) for part in turned]
        if spec.dims < x.shape[-1]:
            parts.append(x[..., spec.dims :])
        return mx.concatenate(parts, axis=-1)

    def attention(
        self, q: mx.array, k: mx.array, v: mx.array, state: MlxState, layer: int
    ) -> mx.array:
        keys, values, mask = state.append(layer, k, v)
        scale = float(q.shape[-1]) ** -0.5
        q = q.astype(self.dtype).transpose(1, 0, 2)[None]  # [1, H, T, D]
        count, seen = q.shape[2], keys.shape[2]
        step = max(1, SCORES // (q.shape[1] * seen))
        parts = []
        for first in range(0, count, step):
            rows = q[:, :, first : first + step]
            end = seen - count + first + rows.shape[2] if count > 1 else seen
            parts.append(
                mx.fast.scaled_dot_product_attention(
                    rows, keys[:, :, :end], values[:, :, :end], scale=scale, mask=mask
                )
            )
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return y[0].transpose(1, 0, 2)

    def swiglu(self, gate_up: mx.array) -> mx.array:
        gate, up = mx.split(gate_up, 2, axis=-1)
        return (delta.silu(gate.astype(mx.float32)) * up).astype(gate_up.dtype)

    def relu2_glu(self, gate_up: mx.array) -> mx.array:
        gate, up = mx.split(gate_up, 2, axis=-1)
        return (mx.square(mx.maximum(gate.astype(mx.float32), 0)) * up).astype(gate_up.dtype)

    def sigmoid_gate(self, x: mx.array, gate: mx.array) -> mx.array:
        return (x * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)

    def causal_conv_silu(self, x: mx.array, taps: Vector, state: MlxState, layer: int) -> mx.array:
        assert state.delta is not None
        count = x.shape[0]
        rows = mx.concatenate([state.delta.tails[layer], x.astype(mx.float32)])
        state.delta.store_tail(layer, rows[count:])
        return delta.conv_silu(rows, taps.exact, count)

    def gated_delta_gates(
        self, a: mx.array, b: mx.array, a_log: Vector, dt_bias: Vector
    ) -> tuple[mx.array, mx.array]:
        return delta.gates(a, b, a_log.exact, dt_bias.exact)

    def gated_delta_rule(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        decay: mx.array,
        beta: mx.array,
        state: MlxState,
        layer: int,
    ) -> mx.array:
        """One row by the recurrence, more in chunks, which is the same."""
        assert state.delta is not None
        share = v.shape[1] // k.shape[1]
        q, k = (mx.repeat(a.astype(mx.float32), share, axis=1) for a in (q, k))
        v, memory = v.astype(mx.float32), state.delta.memories[layer]
        if v.shape[0] == 1:
            y, memory = delta.one(q[0], k[0], v[0], decay[0], beta[0], memory)
            y = y[None]
        else:
            q, k, v = (a.transpose(1, 0, 2) for a in (q, k, v))
            y, memory = delta.through(q, k, v, decay.T, beta.T, memory)
            y = y.transpose(1, 0, 2)
        state.delta.store_memory(layer, memory)
        return y

    def gated_rms_norm(self, x: mx.array, z: mx.array, gain: Vector, eps: float) -> mx.array:
        y = mx.fast.rms_norm(x.astype(mx.float32), gain.exact, eps)
        return (y * delta.silu(z.astype(mx.float32))).astype(self.dtype)

    def sample(self, logits: mx.array, sampling: Sampling, seen: np.ndarray, uniform: float) -> int:
        """`bonsai.sampling.choose`, on the device; sessions never come here."""
        with scope():
            recipe = Recipe.of(sampling, logits.shape[0])
            mask = self.seen(logits.shape[0], seen) if recipe.penalized else None
            token = int(choose(logits, recipe, knobs(sampling, uniform), mask).item())
        if token < 0:
            raise NumericError(
                "the model's logits are not usable: there are NaN or infinite ones",
                hint="the weights may be damaged: bonsai verify; or try --backend reference",
            )
        return token

    def seen(self, vocab: int, ids: np.ndarray) -> mx.array:
        """bool [vocab]: the ids of a history."""
        mask = np.zeros(vocab, bool)
        mask[ids] = True
        return mx.array(mask)

    def _part(self, matrix: Matrix) -> Part:
        """The matrix on the device; the table's own when it is that matrix."""
        if self._table is not None and self._table.matrix is matrix:
            return self._table.part
        return part_of(matrix, lambda: self._release(matrix.name))

    def _turns(self, state: MlxState, spec: RopeSpec, count: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines [count, 1, dims / 2] of the rows from `state.start` on.

        Angles in float32 would be wrong at far positions. Those of each digit of a position come
        from tables made in float64, and are added by the formulas for sums of angles.
        """
        if spec not in self._angles:
            self._angles[spec] = _tables(spec)
        places = state.start + mx.arange(count)
        (c, s), *larger = self._angles[spec]
        cos, sin = c[places % DIGITS], s[places % DIGITS]
        for c, s in larger:
            places = places // DIGITS
            a, b = c[places % DIGITS], s[places % DIGITS]
            cos, sin = cos * a - sin * b, sin * a + cos * b
        return cos[:, None], sin[:, None]

    def _summed(self, y: mx.array) -> None:
        """A residual sum was added to the graph."""
        if self.sliced:
            self._sums += 1
            if self._sums % SLICE == 0:
                mx.async_eval(y)


def _tables(spec: RopeSpec) -> list[tuple[mx.array, mx.array]]:
    """Cosines and sines [DIGITS, dims / 2] of d, DIGITS d and DIGITS^2 d; the first are scaled."""
    found = []
    for power in range(3):
        places = np.arange(DIGITS, dtype=np.float64) * float(DIGITS) ** power
        angles = np.outer(places, spec.frequencies())
        scale = 1.0 if power else spec.amplitude
        found.append(
            tuple(mx.array((scale * f(angles)).astype(np.float32)) for f in (np.cos, np.sin))
        )
    return found
