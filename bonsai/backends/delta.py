"""Gated delta nets on NumPy: the memory of a conversation, and ops that backends may start from.

Knows what must be remembered, that it cannot be cut to a length, and how many tokens are computed
at once. A backend with kernels of its own replaces the methods of `DeltaOps` one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bonsai.config import DeltaSpec

__all__ = ["DeltaMemory", "DeltaOps", "SavedDelta", "gates", "sigmoid", "silu"]

CHUNK = 32
"""Tokens computed at once. OpenBLAS multiplies [32, 128] with [128, 128] on the calling thread;
with 64 it wakes others, which took 14 times as long on two busy cores (48 heads, 512 tokens)."""
ROWS = 16
"""Rows of a convolution at a time: what is between its steps stays in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedDelta:
    """What a `DeltaMemory` held at some length. The arrays are shared, since nobody writes them."""

    tails: tuple[np.ndarray, ...] = field(repr=False)
    memories: tuple[np.ndarray, ...] = field(repr=False)


class DeltaMemory:
    """Conv tails [taps - 1, channels] and memories [H, Dk, Dv] per layer, float32.

    An op reads what is held and stores a new array, which counts from `advance` on: a forward that
    was interrupted can be run again. Arrays that were stored are never written again.
    """

    def __init__(self, spec: DeltaSpec) -> None:
        self._spec = spec
        self.clear()

    def clear(self) -> None:
        """Be as at the start of a conversation."""
        s = self._spec
        tail = np.zeros((s.taps - 1, s.channels), np.float32)
        memory = np.zeros((s.heads, s.key_dim, s.value_dim), np.float32)
        self.load(SavedDelta((tail,) * s.layers, (memory,) * s.layers))

    def tail(self, layer: int) -> np.ndarray:
        """The last inputs of the convolution, oldest first."""
        return self._tails[layer]

    def memory(self, layer: int) -> np.ndarray:
        return self._memories[layer]

    def store_tail(self, layer: int, tail: np.ndarray) -> None:
        assert tail.dtype == np.float32
        self._next_tails[layer] = tail

    def store_memory(self, layer: int, memory: np.ndarray) -> None:
        assert memory.dtype == np.float32
        self._next_memories[layer] = memory

    def advance(self) -> None:
        """What was stored since the last call is now held."""
        for layer, tail in self._next_tails.items():
            self._tails[layer] = tail
        for layer, memory in self._next_memories.items():
            self._memories[layer] = memory
        self._next_tails.clear()
        self._next_memories.clear()

    def save(self) -> SavedDelta:
        return SavedDelta(tuple(self._tails), tuple(self._memories))

    def load(self, saved: SavedDelta) -> None:
        self._tails, self._memories = list(saved.tails), list(saved.memories)
        self._next_tails: dict[int, np.ndarray] = {}
        self._next_memories: dict[int, np.ndarray] = {}


class HasDelta(Protocol):
    """What `DeltaOps` needs of a state."""

    delta: DeltaMemory | None


class DeltaOps:
    """The ops of gated delta nets and gated attention, over a state that has a `DeltaMemory`."""

    def sigmoid_gate(self, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
        return x * sigmoid(gate)

    def causal_conv_silu(
        self, x: np.ndarray, taps: np.ndarray, state: HasDelta, layer: int
    ) -> np.ndarray:
        assert state.delta is not None
        n = taps.shape[1]
        rows = np.concatenate([state.delta.tail(layer), x])  # [n - 1 + T, C]
        out = np.empty(x.shape, np.float32)
        for start in range(0, len(x), ROWS):
            part = rows[start : start + ROWS + n - 1]
            count = len(part) - n + 1
            y = part[n - 1 :] * taps[:, n - 1]
            for j in range(n - 1):
                y += part[j : j + count] * taps[:, j]
            out[start : start + count] = silu(y)
        state.delta.store_tail(layer, rows[len(x) :].copy())
        return out

    def gated_delta_gates(
        self, a: np.ndarray, b: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return gates(a, b, a_log, dt_bias)

    def gated_delta_rule(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        decay: np.ndarray,
        beta: np.ndarray,
        state: HasDelta,
        layer: int,
    ) -> np.ndarray:
        """One row by the recurrence, more in chunks, which is the same."""
        assert state.delta is not None
        share = v.shape[1] // k.shape[1]
        # heads first: [H, T, D]
        q, k = (np.repeat(a.transpose(1, 0, 2), share, axis=0) for a in (q, k))
        v, decay, beta = v.transpose(1, 0, 2), decay.T, beta.T
        memory = state.delta.memory(layer)
        out = np.empty((v.shape[1], len(v), v.shape[2]), np.float32)
        step = _one if v.shape[1] == 1 else chunk
        for start in range(0, v.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            y, memory = step(
                q[:, part], k[:, part], v[:, part], decay[:, part], beta[:, part], memory
            )
            out[part] = y.transpose(1, 0, 2)
        state.delta.store_memory(layer, memory)
        return out

    def gated_rms_norm(
        self, x: np.ndarray, z: np.ndarray, gain: np.ndarray, eps: float
    ) -> np.ndarray:
        mean = np.mean(np.square(x, dtype=np.float32), axis=-1, keepdims=True)
        y: np.ndarray = x * (1 / np.sqrt(mean + np.float32(eps))) * gain * silu(z)
        return y


def gates(
    a: np.ndarray, b: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(decay, beta) as `Ops.gated_delta_gates` says."""
    decay = -np.exp(a_log) * np.logaddexp(np.float32(0), a + dt_bias)
    return decay, sigmoid(b)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)); exp(-x) is inf for x below -88, and the result then 0."""
    with np.errstate(over="ignore"):
        y: np.ndarray = 1 / (1 + np.exp(-x))
        return y


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def _one(q: Any, k: Any, v: Any, decay: Any, beta: Any, memory: Any) -> Any:
    """One token of the recurrence. q, k [H, 1, Dk], v [H, 1, Dv]; returns (y, memory)."""
    memory = memory * np.exp(decay)[:, :, None]
    error = beta[:, :, None] * (v - k @ memory)
    memory += k.transpose(0, 2, 1) * error
    return q @ memory, memory


def chunk(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    memory: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of a chunk at once; q, k [H, T, Dk], v [H, T, Dv], decay, beta [H, T].

    With c[i] = sum of decay up to i, D[i, j] = exp(c[i] - c[j]) for j <= i and 0 else, and the rows
    of K scaled by beta in K', A = the part of (K' K^T) * D below the diagonal. What the recurrence
    writes at each token, u = beta (v - M^T k), solves

        (I + A) U = beta V - (K' exp(c)) M        M: the memory before the chunk

    and then Y = (Q exp(c)) M + ((Q K^T) * D) U, and the memory after the chunk is
    exp(c_end) M + (K exp(c_end - c))^T U. Sums of decay are in float64: their differences count.
    No exponent is above 0. The result has the type of `memory`.
    """
    kind = memory.dtype
    c = np.cumsum(decay, axis=1, dtype=np.float64)  # [H, T]
    below = np.tril(np.ones((c.shape[1], c.shape[1]), bool))
    gap = np.where(below, c[:, :, None] - c[:, None, :], -np.inf)
    D = np.exp(gap).astype(kind)  # [H, T, T]
    grown = np.exp(c).astype(kind)[:, :, None]
    left = np.exp(c[:, -1:] - c).astype(kind)[:, :, None]
    kt, weighted = k.transpose(0, 2, 1), beta[:, :, None] * k
    A = np.tril((weighted @ kt) * D, -1)
    written = _inverse(A) @ (beta[:, :, None] * v - (weighted * grown) @ memory)
    y = (q * grown) @ memory + ((q @ kt) * D) @ written
    after = grown[:, -1:] * memory + (k * left).transpose(0, 2, 1) @ written
    return y, after


def _inverse(below: np.ndarray) -> np.ndarray:
    """(I + A)^-1 for A [H, T, T] with nothing on and above the diagonal.

    By halves: the inverse of [[P, 0], [R, S]] is [[P', 0], [-S' R P', S']]. One matrix after
    another, LAPACK takes ten times as long, and its threads get into the way of others.
    """
    heads, count, _ = below.shape
    size = 1 << (count - 1).bit_length()
    A = np.zeros((heads, size, size), below.dtype)
    A[:, :count, :count] = below
    found = np.zeros_like(A)
    found[:, range(size), range(size)] = 1
    half = 1
    while half < size:
        for start in range(0, size, 2 * half):
            p, s = slice(start, start + half), slice(start + half, start + 2 * half)
            found[:, s, p] = -(found[:, s, s] @ (A[:, s, p] @ found[:, p, p]))
        half *= 2
    return found[:, :count, :count]
