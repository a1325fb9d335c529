"""The meaning of every op in NumPy: float32 values, formulas as the docstrings have them.

Small and obviously right; what other backends are compared with. Never fast. Weights stay as they
lie in the checkpoint and are dequantized block by block on every use.
"""

from __future__ import annotations

import numpy as np

from bonsai import sampling as rules
from bonsai.backends.reference.state import KVState
from bonsai.config import RopeSpec
from bonsai.matrix import Matrix
from bonsai.sampling import Sampling

__all__ = ["ReferenceLinear", "ReferenceOps"]

BLOCK_WEIGHTS = 2**20
"""Weights dequantized at a time: 4 MiB of float32, small beside any model."""


class ReferenceLinear:
    """y = T(x) @ W^T (+ residual) for the rows of several matrices, one after another."""

    def __init__(self, matrices: tuple[Matrix, ...]) -> None:
        self._matrices = matrices

    def __call__(self, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        y = np.concatenate([_product(x, matrix) for matrix in self._matrices], axis=1)
        return y if residual is None else residual + y


class ReferenceOps:
    """`bonsai.backends.ops.Ops` on NumPy arrays; the state is a `KVState`."""

    def vector(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values, dtype=np.float32)

    def table(self, matrix: Matrix) -> Matrix:
        return matrix

    def linear(self, *matrices: Matrix) -> ReferenceLinear:
        return ReferenceLinear(matrices)

    def embed(self, table: Matrix, tokens: np.ndarray) -> np.ndarray:
        """y[t] = W[tokens[t]]; a folded table holds T(W), so its rows go through T^-1."""
        rows = table.rows(np.asarray(tokens))
        return rows if table.transform is None else table.transform.inverse(rows)

    def rms_norm(self, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
        """y = x / sqrt(mean(x^2) + eps) * gain, the mean over the last axis and in float64."""
        mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        y: np.ndarray = (x / np.sqrt(mean + eps) * gain).astype(np.float32)
        return y

    def rope(self, x: np.ndarray, state: KVState, spec: RopeSpec) -> np.ndarray:
        """Rotate the pairs (x[i], x[i + n/2]), n = spec.dims, by position * frequency[i].

        a = spec.amplitude: y[i] = a (x[i] cos - x[i + n/2] sin),
        y[i + n/2] = a (x[i + n/2] cos + x[i] sin); the rest of each head is copied.
        """
        half = spec.dims // 2
        positions = np.arange(state.position, state.position + len(x), dtype=np.float64)
        angles = np.outer(positions, spec.frequencies())[:, None, :]  # [T, 1, n/2]
        cos = (spec.amplitude * np.cos(angles)).astype(np.float32)
        sin = (spec.amplitude * np.sin(angles)).astype(np.float32)
        a, b, rest = x[..., :half], x[..., half : spec.dims], x[..., spec.dims :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def attention(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, state: KVState, layer: int
    ) -> np.ndarray:
        """y[t, h] = sum over s <= position[t] of p[s] v[s, g], with g = h // (H / Hkv) and

        p = softmax(q[t, h] . k[s, g] / sqrt(D)) over s; k, v [S, Hkv, D] are all rows so far.
        """
        keys, values = state.append(layer, k, v)
        count, heads, width = q.shape
        group = heads // keys.shape[1]
        hidden = np.arange(len(keys)) > state.position + np.arange(count)[:, None]  # [T, S]
        out = np.empty_like(q)
        for h in range(heads):
            scores = q[:, h] @ keys[:, h // group].T / np.float32(np.sqrt(width))
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, h] = weights @ values[:, h // group]
        return out

    def swiglu(self, gate_up: np.ndarray) -> np.ndarray:
        """[T, 2 n] -> silu(a) * b for a, b = the first and the last n; silu(a) = a / (1 + e^-a)."""
        gate, up = np.split(gate_up, 2, axis=-1)
        with np.errstate(over="ignore"):  # e^-a is inf for a below -88, and silu(a) is then -0
            y: np.ndarray = gate / (1 + np.exp(-gate)) * up
            return y

    def relu2_glu(self, gate_up: np.ndarray) -> np.ndarray:
        """[T, 2 n] -> max(a, 0)^2 * b for a, b = the first and the last n."""
        gate, up = np.split(gate_up, 2, axis=-1)
        y: np.ndarray = np.square(np.maximum(gate, 0)) * up
        return y

    def sample(
        self, logits: np.ndarray, sampling: Sampling, seen: np.ndarray, uniform: float
    ) -> int:
        """`bonsai.sampling.choose`."""
        return rules.choose(logits, sampling, seen, uniform)


def _product(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """T(x) @ W^T, as many rows of W at a time as BLOCK_WEIGHTS allows."""
    if matrix.transform is not None:
        x = matrix.transform.forward(x)
    rows, columns = matrix.shape
    step = max(1, BLOCK_WEIGHTS // columns)
    y = np.empty((len(x), rows), np.float32)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        y[:, block] = x @ matrix.rows(block).T
    return y
