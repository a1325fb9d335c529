"""Engine and session of the backends that compute at once (reference, cpu): ids in, ids out.

Knows when something is computed: chunks of a prompt, one token at a time, what is still pending.
Does not know how: that is `models` over `ops` and a state; nor text. Arrays here are NumPy's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from bonsai.backends import Progress
from bonsai.backends.marks import Mark, Marks
from bonsai.backends.ops import Array, Ops
from bonsai.errors import ContextOverflow, InvalidRequest, NumericError
from bonsai.models import Model
from bonsai.sampling import Sampling

__all__ = ["EagerEngine", "EagerSession", "State"]

CHUNK = 512
"""Rows of one forward in prefill: enough for matrix products, few enough to bound activations."""
LONGEST = 1 << 30
"""Positions that every state can count."""
SCORED = 1 << 22
"""Logits of one block of `score`: 16 MB of float32, which is 27 rows of a vocabulary of 150,000."""


class State(Protocol):
    """The memory of one conversation: rows [0, position). Layouts and types are the backend's."""

    position: int
    bytes_per_token: int

    def advance(self, count: int) -> None:
        """The last `count` rows that a forward appended are now held.

        Until then a forward may be run again: it appends at `position`.
        """
        ...

    def cut(self, length: int) -> None:
        """Forget all rows from `length` on."""
        ...

    def save(self) -> Any:
        """A copy of the rows held, which any state of the same model can `load`, many times."""
        ...

    def load(self, saved: Any) -> None:
        """Hold what was saved."""
        ...


class RecurrentState(State, Protocol):
    """A state with a recurrent memory, which cannot be cut at any length."""

    def mark(self) -> Any:
        """A copy of the recurrent memory after the rows held; small, and never changed."""
        ...

    def cut(self, length: int, mark: Any = None) -> None:
        """Forget all rows from `length` on; `mark` was made at that length, None is for 0."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `EagerSession.snapshot` returns; opaque to everyone else."""

    tokens: tuple[int, ...]
    state: Any = field(repr=False)
    last: Array | None = field(repr=False)
    marks: tuple[Mark, ...] = field(repr=False)
    engine: EagerEngine = field(repr=False)


class EagerEngine:
    """A model on ops that compute at once; makes sessions over states from `new_state`.

    `new_state(max_context)` must not allocate for all of max_context, which may be huge.
    `chunk` is the number of prompt rows in one forward; the result does not depend on it.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        new_state: Callable[[int], State],
        description: str,
        chunk: int = CHUNK,
    ) -> None:
        self.model = model
        self.ops = ops
        self.new_state = new_state
        self.description = description
        self.chunk = chunk
        self.context: int = model.config.context
        self.vocab: int = model.config.vocab
        self.bytes_per_token: int = model.weights.bytes_per_token
        self.recurrent: bool = model.config.state.delta is not None

    def session(self, max_context: int, valid_ids: int) -> EagerSession:
        """A fresh session. Ids at or above `valid_ids` are never sampled."""
        for name, value in (("max_context", max_context), ("valid_ids", valid_ids)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name} is {value!r}, expected a whole number above 0")
        if max_context > LONGEST:
            raise InvalidRequest(f"max_context is {max_context}, expected at most {LONGEST}")
        return self.open_session(max_context, valid_ids)

    def open_session(self, max_context: int, valid_ids: int) -> EagerSession:
        """The same, of sizes that were checked."""
        return EagerSession(self, max_context, valid_ids)


class EagerSession:
    """`bonsai.backends.Session`: the ids beyond `state.position` are pending, not yet computed."""

    def __init__(self, engine: EagerEngine, max_context: int, valid_ids: int) -> None:
        self.max_context = max_context
        self._engine = engine
        self._valid_ids = valid_ids
        self._tokens: list[int] = []
        self._seen: set[int] = set()
        self._open_state: State | None = engine.new_state(max_context)
        self._last: Array | None = None  # hidden row [1, hidden] of the last computed token
        self._marks = Marks()  # stays empty where the state can be cut at any length

    def __enter__(self) -> EagerSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokens(self) -> Sequence[int]:
        """The ids held, pending ones included. A copy."""
        self._state()
        return tuple(self._tokens)

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Append ids and compute everything pending; progress("prefill", rows done, rows).

        Raises ContextOverflow or InvalidRequest before anything changes. If it is interrupted
        later, the ids are held and the uncomputed ones pending.
        """
        self._state()
        new = self._checked(ids)
        self._check_room(len(self._tokens) + len(new))
        self._seen.update(new)
        self._tokens += new
        self._compute(progress)

    def logits(self) -> np.ndarray:
        """Logits after the last token, float32 [vocab]; -inf for ids at or above `valid_ids`.

        Raises NumericError when the model's own logits are not finite.
        """
        return self._head(self._ready(), len(self._tokens)).reshape(-1)

    def _ready(self) -> Array:
        """The hidden row [1, hidden] of the last token, with nothing pending."""
        state = self._state()
        if not self._tokens:
            raise InvalidRequest("there is nothing to continue: the session holds no tokens")
        if state.position == len(self._tokens) and self._last is None:
            self._go_back(len(self._tokens) - 1)  # after a rewind: its hidden row is not kept
        self._compute(None)
        return self._last

    def score(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append ids; yield the logits after each, as those of `logits`: float32 [n, vocab].

        A block has at most `SCORED` logits, but at least one row. Raises ContextOverflow or
        InvalidRequest at the call, before anything changes. Where the iterator is closed early,
        the ids are held and the uncomputed ones pending.
        """
        self._state()
        new = self._checked(ids)
        self._check_room(len(self._tokens) + len(new))
        self._compute(None)
        self._seen.update(new)
        self._tokens += new
        return self._score(len(self._tokens))

    def _score(self, end: int) -> Iterator[np.ndarray]:
        step = max(1, SCORED // self._engine.vocab)
        while (start := self._state().position) < end:
            rows = self._forward()
            for first in range(0, len(rows), step):
                block = rows[first : first + step]
                yield self._head(block, start + first + len(block))

    def _head(self, rows: Array, tokens: int) -> np.ndarray:
        """The logits of hidden rows, the last of them after `tokens` tokens; float32 [n, vocab]."""
        logits = self._raw_logits(rows)
        if not np.isfinite(logits).all():
            bad = logits.size - int(np.isfinite(logits).sum())
            raise NumericError(
                f"the model computed {bad} of {logits.size} logits that are not finite "
                f"after {tokens} tokens",
                hint="the weights may be damaged: bonsai verify; or keys or values do not fit into "
                "fp16: --backend cpu-exact",
            )
        logits[:, self._valid_ids :] = -np.inf
        return logits

    def _raw_logits(self, rows: Array) -> np.ndarray:
        """What the head makes of hidden rows, float32 [n, vocab], in an array of its own."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.array(self._engine.model.weights.head(rows), dtype=np.float32)

    def decode(self, sampling: Sampling) -> Iterator[int]:
        """Yield sampled ids until the context is full; each is computed when the next is asked for.

        Closing the iterator leaves the session as it was after the last id that came out.
        """
        self._state()
        return self._decode(sampling)

    def _decode(self, sampling: Sampling) -> Iterator[int]:
        for uniform in sampling.uniforms():
            if len(self._tokens) >= self.max_context:
                return
            logits = self.logits()
            token = self._engine.ops.sample(logits, sampling, self._history(sampling), uniform)
            self._seen.add(token)
            self._tokens.append(token)
            yield token

    def rewind(self, length: int) -> int:
        """Forget all but the first `length` tokens; returns how many stay.

        With a recurrent memory these are fewer, unless there is a mark at `length`.
        """
        state = self._state()
        if length < 0:
            raise InvalidRequest(f"rewind to {length} tokens: expected 0 or more")
        if length < len(self._tokens):
            if length < state.position:
                length = self._go_back(length)
            del self._tokens[length:]
            self._seen = set(self._tokens)
        return len(self._tokens)

    def snapshot(self) -> Snapshot:
        """A copy of the state, which `restore` of any session of the same engine takes."""
        saved = self._state().save()
        return Snapshot(tuple(self._tokens), saved, self._last, tuple(self._marks), self._engine)

    def restore(self, snapshot: Any) -> None:
        """Hold what the snapshot holds; a snapshot can be restored any number of times."""
        state = self._state()
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not self._engine:
            raise InvalidRequest("restore: this is not a snapshot of a session of the same model")
        self._check_room(len(snapshot.tokens))
        self._last, self._marks = None, Marks()
        self._tokens = list(snapshot.tokens)
        state.load(snapshot.state)
        self._seen = set(snapshot.tokens)
        self._marks = Marks(snapshot.marks)
        self._last = snapshot.last

    def close(self) -> None:
        """Free the state; every later call but `close` raises InvalidRequest."""
        self._open_state = None
        self._last = None
        self._marks = Marks()

    def _state(self) -> State:
        if self._open_state is None:
            raise InvalidRequest("the session is closed")
        return self._open_state

    def _go_back(self, length: int) -> int:
        """Let the state forget tokens from `length` on, or from the last mark before it."""
        state = self._state()
        self._last = None
        if not self._engine.recurrent:
            state.cut(length)
            return length
        mark = self._marks.back(length)
        if mark is None:
            state.cut(0)
            return 0
        cast(RecurrentState, state).cut(mark.length, mark.memory)
        self._last = mark.last
        return mark.length

    def _end_of_chunk(self, position: int) -> int:
        """Where the forward that starts at `position` ends."""
        end = position + self._engine.chunk
        if self._engine.recurrent:
            end = self._marks.stop(position, end, len(self._tokens))
        return end

    def _keep_mark(self, state: State) -> None:
        if self._engine.recurrent and self._marks.due(state.position, len(self._tokens)):
            memory = cast(RecurrentState, state).mark()
            self._marks.add(Mark(state.position, memory, self._last))

    def _compute(self, progress: Progress | None) -> None:
        """Run the pending ids, a chunk at a time, and keep the hidden row of the last."""
        state = self._state()
        start = state.position
        total = len(self._tokens) - start
        while state.position < len(self._tokens):
            self._forward()
            if progress is not None:
                progress("prefill", state.position - start, total)

    def _forward(self) -> Array:
        """Run the next chunk of pending ids; returns its hidden rows and keeps the last."""
        state, engine = self._state(), self._engine
        chunk = self._tokens[state.position : self._end_of_chunk(state.position)]
        ids = np.array(chunk, dtype=np.int32)
        with np.errstate(over="ignore", invalid="ignore"):  # `_head` reports what it led to
            rows = engine.model.forward(engine.ops, ids, state)
        self._last = None  # an interrupt between the next two lines must not leave an old row
        state.advance(len(chunk))
        self._last = rows[-1:].copy()  # not a view that keeps the whole chunk alive
        self._keep_mark(state)
        return rows

    def _history(self, sampling: Sampling) -> np.ndarray:
        """The distinct ids held, int64, sorted; empty where the sampling does not look at them."""
        if sampling.repetition_penalty == 1.0:
            return np.empty(0, np.int64)
        return np.sort(np.fromiter(self._seen, np.int64, len(self._seen)))

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """The ids as ints, each a row of the table."""
        checked = []
        for token in ids:
            try:
                number = -1 if isinstance(token, (bool, np.bool_)) else operator.index(token)
            except TypeError:
                number = -1
            if not 0 <= number < self._engine.vocab:
                raise InvalidRequest(
                    f"token id {token!r} is not one of the model's (0 to {self._engine.vocab - 1})",
                    hint="the tokenizer and the weights may belong to different models",
                )
            checked.append(number)
        return checked

    def _check_room(self, total: int) -> None:
        if total <= self.max_context:
            return
        made_for = self._engine.context
        hint = f"shorten it: the model was made for {made_for:,} tokens"
        if total <= made_for:
            roomy = min(2 ** (total - 1).bit_length(), made_for)
            more = (roomy - self.max_context) * self._state().bytes_per_token
            hint = f"--max-context {roomy} (needs about {_size(more)} more)"
        raise ContextOverflow(
            f"prompt has {total:,} tokens, max_context is {self.max_context:,}", hint=hint
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
