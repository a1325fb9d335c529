"""The memory of one conversation on MLX: arrays that are replaced, never written by anyone else.

Knows how many rows are held, as an int for the host and as an array for compiled code. An op
stores new arrays; what it appended counts from `advance` on, so that a forward can be run again.
Arrays that a snapshot holds too are copied by MLX when the next row is written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from bonsai.backends.mlx.device import scope
from bonsai.config import DeltaSpec, StateSpec

__all__ = ["Arrays", "DeltaArrays", "MlxState", "SavedState", "flat"]

BLOCK = 256
"""Rows by which keys and values grow at least. A compiled step is traced again at each growth, and
attention of one token looks at every row there is, so there is neither one fixed size nor a row at
a time (bench/RESULTS.md)."""
GROWTH = 4
"""They grow by a quarter at least, so that copying and tracing stay small beside the tokens."""

Arrays = dict[str, list[mx.array]]
"""What a compiled step takes and gives: "keys", "values", "tails", "memories", one per layer."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The arrays at some position; rows of keys and values beyond it mean nothing."""

    position: int
    arrays: Arrays = field(repr=False)


class DeltaArrays:
    """Conv tails [taps - 1, channels] and memories [H, Dk, Dv] per layer, float32."""

    def __init__(self, tails: list[mx.array], memories: list[mx.array]) -> None:
        self.tails, self.memories = tails, memories
        self._next_tails, self._next_memories = list(tails), list(memories)

    @classmethod
    def zeros(cls, spec: DeltaSpec) -> DeltaArrays:
        """As at the start of a conversation."""
        tail = mx.zeros((spec.taps - 1, spec.channels), mx.float32)
        memory = mx.zeros((spec.heads, spec.key_dim, spec.value_dim), mx.float32)
        return cls([tail] * spec.layers, [memory] * spec.layers)

    def store_tail(self, layer: int, tail: mx.array) -> None:
        assert tail.dtype == mx.float32
        self._next_tails[layer] = tail

    def store_memory(self, layer: int, memory: mx.array) -> None:
        assert memory.dtype == mx.float32
        self._next_memories[layer] = memory

    def stored(self) -> tuple[list[mx.array], list[mx.array]]:
        """Tails and memories after the forward that is not held yet."""
        return self._next_tails, self._next_memories

    def advance(self) -> None:
        """What was stored is now held."""
        self.tails, self.memories = list(self._next_tails), list(self._next_memories)


class MlxState:
    """Keys and values [1, Hkv, S, D] per layer, S at least `position` + what is appended.

    `version` changes whenever what is held does.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        delta: DeltaSpec | None = None,
        *,
        dtype: Any = mx.float32,
    ) -> None:
        self.version = 0
        self.dtype = dtype
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.size
        self.delta: DeltaArrays | None = None
        self._spec = StateSpec(layers, kv_heads, head_dim, delta)
        self._max_context = max_context
        self._position = 0
        self._frame: dict[Hashable, Any] = {}
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        with scope():
            self._clear()

    @property
    def position(self) -> int:
        """Rows held."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = value
        self._frame = {}
        self.version += 1

    @property
    def start(self) -> mx.array:
        """`position` as int32 [1], for compiled code."""
        return self.once("start", lambda: mx.array([self._position], mx.int32))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What layers share during one forward: made by the first that asks."""
        if key not in self._frame:
            self._frame[key] = make()
        return self._frame[key]

    @property
    def capacity(self) -> int:
        return int(self.keys[0].shape[2]) if self.keys else self._max_context

    def reserve(self, count: int) -> None:
        """Room for `count` more rows in every layer."""
        needed, now = self._position + count, self.capacity
        assert needed <= self._max_context
        if needed <= now:
            return
        wanted = -(-max(needed, now + now // GROWTH) // BLOCK) * BLOCK
        more = mx.zeros((1, self._spec.kv_heads, wanted - now, self._spec.head_dim), self.dtype)
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                arrays[layer] = mx.concatenate([old, more], axis=2) if now else more

    def append(self, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array, Any]:
        """Store k, v [T, Hkv, D] after the rows held; all rows, and the mask over them.

        One row is attended over every row there is room for, so that the shapes of a step do not
        change with each token; more rows over those that are held.
        """
        count = k.shape[0]
        self.reserve(count)
        for arrays, rows in ((self.keys, k), (self.values, v)):
            row = rows.astype(self.dtype).transpose(1, 0, 2)[None]
            arrays[layer] = mx.slice_update(arrays[layer], row, self.start, axes=(2,))
        keys, values = self.keys[layer], self.values[layer]
        if count == 1:
            return keys, values, self.once("mask", lambda: _until(self.start, keys.shape[2]))
        end = self._position + count
        return keys[:, :, :end], values[:, :, :end], "causal"

    def advance(self, count: int) -> None:
        """The last `count` rows that a forward appended are now held."""
        if self.delta is not None:
            self.delta.advance()
        self.position += count

    def mark(self) -> Any:
        """What `cut` needs to come back to the present position; shares the arrays."""
        return None if self.delta is None else (list(self.delta.tails), list(self.delta.memories))

    def cut(self, length: int, mark: Any = None) -> None:
        """Forget all rows from `length` on. A delta memory needs the mark of that length, or 0."""
        with scope():
            if length == 0:
                self._clear()
            elif length < self._position:
                self._wipe(length)
            if self.delta is not None and mark is not None:
                self.delta = DeltaArrays(list(mark[0]), list(mark[1]))
            assert self.delta is None or mark is not None or length == 0
        self.position = min(self._position, length)

    def save(self) -> SavedState:
        """The arrays themselves: they are copied when one side writes."""
        return SavedState(self._position, {k: list(v) for k, v in self.arrays().items()})

    def load(self, saved: SavedState) -> None:
        """Become what was saved, which stays as it is."""
        self.keys, self.values = list(saved.arrays["keys"]), list(saved.arrays["values"])
        if self.delta is not None:
            self.delta = DeltaArrays(list(saved.arrays["tails"]), list(saved.arrays["memories"]))
        self.position = saved.position

    def arrays(self) -> Arrays:
        """What is held, for a compiled step."""
        tails, memories = (
            ([], []) if self.delta is None else (self.delta.tails, self.delta.memories)
        )
        return {"keys": self.keys, "values": self.values, "tails": tails, "memories": memories}

    def stored(self) -> Arrays:
        """What is there after a forward that is not held yet."""
        tails, memories = ([], []) if self.delta is None else self.delta.stored()
        return {"keys": self.keys, "values": self.values, "tails": tails, "memories": memories}

    def put(self, arrays: Arrays) -> None:
        """Take the arrays of a compiled step as those of a forward that is not held yet."""
        self.keys, self.values = list(arrays["keys"]), list(arrays["values"])
        if self.delta is not None:
            for layer, (tail, memory) in enumerate(
                zip(arrays["tails"], arrays["memories"], strict=True)
            ):
                self.delta.store_tail(layer, tail)
                self.delta.store_memory(layer, memory)

    def traced(self, arrays: Arrays, start: mx.array) -> MlxState:
        """A state of the same kind over the arrays of a trace, for one row at `start`."""
        view = object.__new__(MlxState)
        view.version, view.dtype = 0, self.dtype
        view.bytes_per_token, view._spec = self.bytes_per_token, self._spec
        view._max_context, view._position = self._max_context, 0
        view.keys, view.values = list(arrays["keys"]), list(arrays["values"])
        view.delta = None
        if self.delta is not None:
            view.delta = DeltaArrays(list(arrays["tails"]), list(arrays["memories"]))
        view._frame = {"start": start}
        return view

    def _clear(self) -> None:
        spec = self._spec
        empty = mx.zeros((1, spec.kv_heads, 0, spec.head_dim), self.dtype)
        self.keys = [empty] * spec.kv_layers
        self.values = [empty] * spec.kv_layers
        if spec.delta is not None:
            self.delta = DeltaArrays.zeros(spec.delta)

    def _wipe(self, length: int) -> None:
        """Values from `length` on become 0: one that is not a number would spoil a sum even with
        weight 0. Keys need not, since the mask replaces their scores."""
        for layer, values in enumerate(self.values):
            kept = mx.arange(values.shape[2]) < length
            self.values[layer] = mx.where(kept[:, None], values, mx.array(0, self.dtype))


def _until(start: mx.array, capacity: int) -> mx.array:
    """bool [capacity]: the rows that a token at `start` may look at."""
    return mx.arange(capacity) <= start


def flat(arrays: Arrays) -> Sequence[mx.array]:
    """All of them in one list."""
    return [a for part in arrays.values() for a in part]
