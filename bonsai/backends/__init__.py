"""What a backend is, which ones exist, and which can run here. `bonsai.backends()` is `status()`.

Knows names and how to import a backend when it is asked for. Does not know text: above this line
are `generate` and `chat`, below it ids and weights.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bonsai.callable_module import make_callable
from bonsai.errors import BackendUnavailable, BonsaiError
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling

__all__ = [
    "MODES",
    "NAMES",
    "Backend",
    "Check",
    "Engine",
    "MemoryLimit",
    "Progress",
    "Session",
    "automatic",
    "get",
    "select",
    "status",
]

NAMES = ("mlx", "cpu", "reference")
"""Every backend in the package. "auto" takes the first of `automatic()` that works."""

MODES = ("cpu-exact", "mlx-exact")
"""Other ways to run a backend, never chosen by "auto": slower, for comparisons."""

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): called from the thread that works, often, cheaply."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What may be in use while one session of `context` tokens runs; None is all there is.

    limit            bytes of memory for the process. Mapped pages count, but not what the system
                     caches of files by itself and takes back at will
    gpu_limit        bytes of GPU memory, what its driver takes included
    prefetch_layers  streamed layers that are fetched before they are needed
    """

    limit: int | None
    context: int
    gpu_limit: int | None = None
    prefetch_layers: int = 1


@dataclass(frozen=True, slots=True)
class Check:
    """What a backend's `self_check` found out about one of its parts."""

    name: str
    good: bool
    detail: str


class Session(Protocol):
    """One conversation on one backend: ids in, ids out. Not shareable between threads.

    `tokens` lists the ids that the state holds. The last ids may be pending (held but not computed
    yet); nobody can tell the difference, since every method that needs them computes them first.
    """

    max_context: int

    @property
    def tokens(self) -> Sequence[int]: ...

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Append ids to the state. Raises ContextOverflow, before computing, if they do not fit."""
        ...

    def logits(self) -> np.ndarray:
        """Logits after the last token, float32 [vocab]; -inf for ids that the tokenizer lacks."""
        ...

    def score(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append ids and yield the logits after each of them: blocks float32 [n, vocab], in order.

        They are as those of `logits`, and n is small enough to bound memory. Errors are those of
        `prefill`, at the call, and NumericError. The ids whose logits were not asked for may be
        pending when the iterator is closed.
        """
        ...

    def decode(self, sampling: Sampling) -> Iterator[int]:
        """Yield sampled ids until the context is full; at each yield `tokens` ends with the id.

        Closing the iterator stops the work. Raises NumericError when the logits are not finite.
        """
        ...

    def rewind(self, length: int) -> int:
        """Forget all but the first tokens; returns how many stay, at most `length`.

        A state that can be cut keeps exactly `length`; another goes back to a point that it kept.
        """
        ...

    def snapshot(self) -> Any:
        """An opaque copy of the state, for `restore`."""
        ...

    def restore(self, snapshot: Any) -> None: ...

    def close(self) -> None:
        """Free the state; every later call raises. Leaving a `with` block does it too."""
        ...

    def __enter__(self) -> Session: ...

    def __exit__(self, *exception: object) -> None: ...


class Engine(Protocol):
    """The weights of one checkpoint on one backend; shareable."""

    description: str
    """Where it runs, for people: "cpu: avx2, 2 threads"."""
    context: int
    """Tokens the model was made for."""
    vocab: int
    """Rows of the output head; may exceed the tokenizer's ids."""
    bytes_per_token: int
    """Weight bytes that one decoded token reads."""

    def session(self, max_context: int, valid_ids: int) -> Session:
        """A fresh session. Ids at or above `valid_ids` are never sampled."""
        ...


class Backend(Protocol):
    """A way to run models. `backends/<name>/__init__.py` exposes one as `BACKEND`."""

    name: str

    def status(self) -> str:
        """What it would run on here ("avx2, 2 threads"). Raises BackendUnavailable: why not."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        threads: int | None = None,
        memory: MemoryLimit | None = None,
    ) -> Engine:
        """The checkpoint's weights, ready to run.

        `threads` CPU threads, 1 or more; None is the backend's choice. Where there is nothing to
        choose a number is refused with InvalidRequest. So is a `memory` that is too small, and any
        where weights cannot come and go. With a limit the checkpoint must stay open as long as the
        engine is used.
        """
        ...


def get(name: str) -> Backend:
    """The backend of that name, imported now. Raises BackendUnavailable where it cannot run."""
    if name not in NAMES + MODES:
        raise BackendUnavailable(
            f"no backend is called '{name}'", hint=f"one of: auto, {', '.join(NAMES + MODES)}"
        )
    home, _, mode = name.partition("-")
    try:
        module = importlib.import_module(f"bonsai.backends.{home}")
        backend: Backend = module.EXACT if mode else module.BACKEND
    except ImportError as error:
        raise BackendUnavailable(f"backend '{name}' cannot be imported: {error}") from error
    backend.status()
    return backend


def select(name: str = "auto") -> Backend:
    """The named backend, or for "auto" the first that works here."""
    if name != "auto":
        return get(name)
    reasons, hints = [], []
    for candidate in automatic():
        try:
            return get(candidate)
        except BackendUnavailable as error:
            reasons.append(f"{candidate}: {error}")
            hints += [error.hint] if error.hint else []
    raise BackendUnavailable(
        f"no backend can run here ({'; '.join(reasons)})",
        hint=f"{hints[0] if hints else 'reinstall bonsai-lm'}, or --backend reference: it is slow",
    )


def automatic() -> tuple[str, ...]:
    """The backends that "auto" tries on this machine, best first: never one that is for tests."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return ("mlx", "cpu") if apple else ("cpu",)


def status() -> dict[str, str]:
    """Each backend and what it would run on, or "unavailable: why"."""
    found = {}
    for name in NAMES:
        try:
            found[name] = get(name).status()
        except BonsaiError as error:
            found[name] = f"unavailable: {error}"
    return found


make_callable(__name__, "status")
