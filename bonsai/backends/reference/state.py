"""The memory of one conversation on the reference backend, in float32.

Keys and values of every token and, for models with gated delta nets, a memory of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bonsai.backends.delta import DeltaMemory, SavedDelta
from bonsai.config import DeltaSpec

__all__ = ["KVState", "SavedKV"]

BLOCK = 256
"""Tokens by which the arrays grow at least: a huge context costs nothing until it is used."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedKV:
    """A copy of the first `position` rows of every layer, and the delta memory after them."""

    position: int
    keys: tuple[np.ndarray, ...] = field(repr=False)
    values: tuple[np.ndarray, ...] = field(repr=False)
    delta: SavedDelta | None = field(repr=False)


class KVState:
    """Rows [0, position) of keys and values [S, Hkv, D] per layer, in arrays that grow.

    `append` writes at `position` and does not move it, so that every layer of one forward sees the
    same positions, and a forward that was interrupted can be run again.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        delta: DeltaSpec | None = None,
    ) -> None:
        self.position = 0
        self.delta = None if delta is None else DeltaMemory(delta)
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * 4  # keys and values, float32
        self._max_context = max_context
        empty = np.empty((0, kv_heads, head_dim), np.float32)
        self._keys = [empty] * layers
        self._values = [empty] * layers

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store k, v [T, Hkv, D] after the rows held; returns all of them, [position + T, ...]."""
        end = self.position + len(k)
        assert end <= self._max_context
        if end > len(self._keys[layer]):
            self._keys[layer] = self._grown(self._keys[layer], end)
            self._values[layer] = self._grown(self._values[layer], end)
        self._keys[layer][self.position : end] = k
        self._values[layer][self.position : end] = v
        return self._keys[layer][:end], self._values[layer][:end]

    def advance(self, count: int) -> None:
        """The last `count` rows that every layer appended are now held."""
        self.position += count
        if self.delta is not None:
            self.delta.advance()

    def mark(self) -> SavedDelta | None:
        """What `cut` needs to come back to the present position."""
        return None if self.delta is None else self.delta.save()

    def cut(self, length: int, mark: SavedDelta | None = None) -> None:
        """Forget all rows from `length` on. A delta memory needs the mark of that length, or 0."""
        self.position = min(self.position, length)
        if self.delta is not None and mark is not None:
            self.delta.load(mark)
        elif self.delta is not None:
            assert length == 0, "a delta memory cannot be cut"
            self.delta.clear()

    def save(self) -> SavedKV:
        keys = tuple(a[: self.position].copy() for a in self._keys)
        values = tuple(a[: self.position].copy() for a in self._values)
        return SavedKV(self.position, keys, values, self.mark())

    def load(self, saved: SavedKV) -> None:
        """Become what was saved, which stays as it is."""
        self._keys = [a.copy() for a in saved.keys]
        self._values = [a.copy() for a in saved.values]
        self.position = saved.position
        if self.delta is not None:
            assert saved.delta is not None
            self.delta.load(saved.delta)

    def _grown(self, array: np.ndarray, rows: int) -> np.ndarray:
        """A copy with room for `rows`, and half as much again, in whole blocks."""
        wanted = -(-max(rows, len(array) * 3 // 2) // BLOCK) * BLOCK
        bigger = np.empty((min(wanted, self._max_context), *array.shape[1:]), array.dtype)
        bigger[: self.position] = array[: self.position]
        return bigger
