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
        return gate * _sigmoid(gate) * up

    def relu2_glu(self, gate_up: np.ndarray) -> np.ndarray:
        """[T, 2 n] -> max(a, 0)^2 * b for a, b = the first and the last n."""
        gate, up = np.split(gate_up, 2, axis=-1)
        y: np.ndarray = np.square(np.maximum(gate, 0)) * up
        return y

    def sigmoid_gate(self, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
        """x * s(gate), s(a) = 1 / (1 + e^-a)."""
        return x * _sigmoid(gate)

    def causal_conv_silu(
        self, x: np.ndarray, taps: np.ndarray, state: KVState, layer: int
    ) -> np.ndarray:
        """y[t] = silu(sum over j < n of taps[:, j] rows[t + j]); rows: n - 1 before, then x."""
        assert state.delta is not None
        count, n = len(x), taps.shape[1]
        rows = np.concatenate([state.delta.tail(layer), x])
        y = sum(taps[:, j] * rows[j : j + count] for j in range(n))
        state.delta.store_tail(layer, rows[count:].copy())
        return y * _sigmoid(y)

    def gated_delta_gates(
        self, a: np.ndarray, b: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(-e^a_log softplus(a + dt_bias), s(b)).

        softplus(x) = ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), which does not overflow.
        """
        x = a + dt_bias
        return -np.exp(a_log) * (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))), _sigmoid(b)

    def gated_delta_rule(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        decay: np.ndarray,
        beta: np.ndarray,
        state: KVState,
        layer: int,
    ) -> np.ndarray:
        """For each token, on the memory M [Dk, Dv] of each head:

        M <- e^decay M; M <- M + k (beta (v - M^T k))^T; y = M^T q.
        """
        assert state.delta is not None
        memory = state.delta.memory(layer)  # [H, Dk, Dv]
        share = v.shape[1] // k.shape[1]
        q, k = np.repeat(q, share, axis=1), np.repeat(k, share, axis=1)
        y = np.empty_like(v)
        for t in range(len(v)):
            memory = memory * np.exp(decay[t])[:, None, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", memory, k[t]))
            memory = memory + np.einsum("hk,hv->hkv", k[t], error)
            y[t] = np.einsum("hkv,hk->hv", memory, q[t])
        state.delta.store_memory(layer, memory)
        return y

    def gated_rms_norm(
        self, x: np.ndarray, z: np.ndarray, gain: np.ndarray, eps: float
    ) -> np.ndarray:
        """rms_norm(x) * silu(z)."""
        return self.rms_norm(x, gain, eps) * (z * _sigmoid(z))

    def sample(
        self, logits: np.ndarray, sampling: Sampling, seen: np.ndarray, uniform: float
    ) -> int:
        """`bonsai.sampling.choose`."""
        return rules.choose(logits, sampling, seen, uniform)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # e^-x is inf for x below -88, and the result is then 0
        y: np.ndarray = 1 / (1 + np.exp(-x))
        return y


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
