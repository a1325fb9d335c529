"""The memory of one conversation on the cpu backend: keys and values in native blocks.

Knows how many rows are held. Where they lie is the native cache's business: blocks of 256 positions
that never move, fp16, or float32 where the ops are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bonsai.backends.cpu import _native
from bonsai.backends.delta import DeltaMemory, SavedDelta
from bonsai.config import DeltaSpec

__all__ = ["CpuState", "SavedState"]


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A copy of the first `position` rows of every layer, and the delta memory after them."""

    position: int
    cache: Any = field(repr=False)
    delta: SavedDelta | None = field(repr=False)


class CpuState:
    """Rows [0, position) of keys and values per layer; `append` writes after them.

    Appending does not move `position`, so that every layer of one forward sees the same positions,
    and a forward that was interrupted can be run again.
    """

    def __init__(
        self,
        kernels: Any,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        delta: DeltaSpec | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.position = 0
        self.delta = None if delta is None else DeltaMemory(delta)
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * (4 if exact else 2)
        self._kernels = kernels
        self._layers = layers  # none in a model of delta nets alone; a cache has one at least
        self._cache = _native.KvCache(max(layers, 1), kv_heads, head_dim, max_context, exact)

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Store k, v [T, Hkv, D] at `position`; causal attention of q [T, H, D] over all rows."""
        out = np.empty(q.shape, np.float32)
        self._cache.append(self._kernels, layer, self.position, k, v)
        self._cache.attend(self._kernels, layer, self.position, q, out)
        return out

    def advance(self, count: int) -> None:
        """The last `count` rows that every layer appended are now held."""
        self.position += count
        if self.delta is not None:
            self.delta.advance()

    def mark(self) -> SavedDelta | None:
        """What `cut` needs to come back to the present position."""
        return None if self.delta is None else self.delta.save()

    def cut(self, length: int, mark: SavedDelta | None = None) -> None:
        """Forget all rows from `length` on; their memory is used again.

        A delta memory needs the mark that was made at that length, or 0.
        """
        self.position = min(self.position, length)
        if self.delta is not None and mark is not None:
            self.delta.load(mark)
        elif self.delta is not None:
            assert length == 0, "a delta memory cannot be cut"
            self.delta.clear()

    def save(self) -> SavedState:
        rows = self.position if self._layers else 0
        return SavedState(self.position, self._cache.copy(rows), self.mark())

    def load(self, saved: SavedState) -> None:
        """Become what was saved, which stays as it is."""
        self._cache = saved.cache.copy(saved.position if self._layers else 0)
        self.position = saved.position
        if self.delta is not None:
            assert saved.delta is not None
            self.delta.load(saved.delta)
