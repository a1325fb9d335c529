"""The device that MLX computes on, and whose turn it is: one stream, used by one thread at a time.

Knows streams, locks and what the machine has. Does not know models. MLX gives each thread streams
of its own, which no other thread may use; a session may be used by one thread after another, so
everything here runs on one stream that any thread may use, under a lock.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx

from bonsai.errors import BackendUnavailable
from bonsai.sizes import show_size

__all__ = ["TYPES", "Facts", "facts", "on_metal", "scope", "waiting"]

TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
NEEDED = (0, 32, 4)
"""The first MLX whose streams can be shared by threads and which has 1-bit matrices."""

_turn = threading.RLock()


@dataclass(frozen=True, slots=True)
class Facts:
    """`memory` bytes of the machine, `wired` those that the GPU may keep; 0 where unknown."""

    version: str
    metal: bool
    name: str
    memory: int
    wired: int

    def __str__(self) -> str:
        if not self.metal:
            return f"MLX {self.version} on the CPU, for tests: slow"
        return (
            f"MLX {self.version}, Metal, {self.name}, {show_size(self.memory)} of memory, "
            f"{show_size(self.wired)} for the GPU"
        )


def on_metal() -> bool:
    """Whether Metal kernels can run here."""
    return bool(mx.metal.is_available())


@functools.cache
def facts() -> Facts:
    """What MLX runs on here. Raises BackendUnavailable where this MLX is too old."""
    version = metadata.version("mlx")
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if found < NEEDED:
        raise BackendUnavailable(
            f"MLX {version} is too old, {'.'.join(map(str, NEEDED))} is needed",
            hint="pip install -U mlx",
        )
    info: dict[str, Any] = mx.device_info()
    metal = on_metal()
    return Facts(
        version,
        metal,
        str(info.get("device_name") or platform.processor() or "unknown"),
        int(info.get("memory_size", 0)),
        int(info.get("max_recommended_working_set_size", 0)) if metal else 0,
    )


@functools.cache
def _stream() -> Any:
    return mx.new_thread_unsafe_stream(mx.default_device())


@contextmanager
def scope() -> Iterator[None]:
    """Every MLX graph is built and handed over in here."""
    with _turn, mx.stream(_stream()), waiting():
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """Turns MLX's errors about memory into ours; for places that wait for results."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(
            part in text.lower() for part in ("allocate", "out of memory", "insufficient memory")
        ):
            raise
        raise BackendUnavailable(
            f"MLX ran out of memory: {text[:200]}",
            hint="a smaller --max-context or a smaller model; docs/mac.md plans memory",
        ) from error
