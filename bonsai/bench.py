"""How fast a model runs here: prefill and decode of made-up ids, in the habit of llama-bench.

Knows sessions and clocks. Does not know text: the ids are random, so nothing ends a run early.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bonsai.errors import InvalidRequest
from bonsai.sampling import Sampling

if TYPE_CHECKING:
    from bonsai.generate import Model

__all__ = ["Bench", "Rate", "peak_bytes", "run"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of each repetition, the warm-up left out."""

    tps: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.tps)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.tps) - min(self.tps)) / self.median


@dataclass(frozen=True, slots=True)
class Bench:
    """One measurement. `prefill` is None when no prompt was asked for, `decode` likewise.

    `bytes_per_token` are the weight bytes that one decoded token reads, `load_s` the time from a
    name to a model that is ready, `peak_bytes` the most memory that the process ever had.
    """

    prefill: Rate | None
    decode: Rate | None
    prompt_tokens: int
    reply_tokens: int
    depth: int
    bytes_per_token: int
    load_s: float
    peak_bytes: int

    @property
    def decode_gbps(self) -> float | None:
        """Weight bytes read per second in decode, 1e9 bytes; None without a decode."""
        return None if self.decode is None else self.bytes_per_token * self.decode.median / 1e9


def run(
    model: Model,
    *,
    prompt: int = 512,
    reply: int = 128,
    depth: int = 0,
    repetitions: int = 3,
    load_s: float = 0.0,
    progress: Progress = lambda stage, done, total: None,
) -> Bench:
    """Time `prompt` ids at once and `reply` ids one by one, each after `depth` ids of context.

    Each starts with a session of its own, and with one repetition that does not count.
    Raises InvalidRequest when the ids do not fit into the model's context.
    """
    needed = depth + max(prompt, reply + 2)
    if needed > model.max_context:
        raise InvalidRequest(
            f"the bench needs {needed:,} tokens of context, max_context is {model.max_context:,}",
            hint=f"--max-context {needed}, or smaller -p, -n and -d"
            if needed <= model.engine.context
            else f"smaller -p, -n and -d: the model was made for {model.engine.context:,} tokens",
        )
    steps = [0, (repetitions + 1) * ((prompt > 0) + (reply > 0))]

    def rate(stage: str, measure: Callable[[], float]) -> Rate:
        found = []
        for _ in range(repetitions + 1):
            found.append(measure())
            steps[0] += 1
            progress(stage, *steps)
        return Rate(tuple(found[1:]))

    ids = _ids(model, depth + prompt + 1)
    prefill = (
        rate("prefill", lambda: _prefill(model, ids[:depth], ids[depth:-1])) if prompt else None
    )
    decode = rate("decode", lambda: _decode(model, ids[: depth + 1], reply)) if reply else None
    return Bench(
        prefill, decode, prompt, reply, depth, model.engine.bytes_per_token, load_s, peak_bytes()
    )


def _ids(model: Model, count: int) -> list[int]:
    """Random ids below those of the tokenizer's last third: ordinary tokens in every model."""
    high = max(1, min(model.tokenizer.size, model.engine.vocab) * 2 // 3)
    return np.random.default_rng(0).integers(0, high, count).tolist()  # type: ignore[no-any-return]


def _prefill(model: Model, before: list[int], ids: list[int]) -> float:
    with model.session() as session:
        if before:
            session.prefill(before)
            session.logits()
        started = time.perf_counter()
        session.prefill(ids)
        session.logits()  # some backends compute only when somebody asks
        return len(ids) / (time.perf_counter() - started)


def _decode(model: Model, ids: list[int], count: int) -> float:
    """The first id comes out of the prefill, so the clock starts when it is there."""
    with model.session() as session:
        session.prefill(ids)
        stream: Iterator[int] = session.decode(Sampling.greedy())
        with closing(stream):  # type: ignore[type-var]
            next(stream)
            started = time.perf_counter()
            for _ in range(count):
                next(stream)
            return count / (time.perf_counter() - started)


def peak_bytes() -> int:
    """The most memory that this process had at one time, mapped files included; 0 if unknown."""
    if sys.platform == "win32":
        return _windows_peak()
    try:  # Linux: unlike getrusage's, this value starts anew with the program
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def _windows_peak() -> int:
    class Counters(ctypes.Structure):
        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            ("WorkingSetSize", ctypes.c_size_t),
            ("QuotaPeakPagedPoolUsage", ctypes.c_size_t),
            ("QuotaPagedPoolUsage", ctypes.c_size_t),
            ("QuotaPeakNonPagedPoolUsage", ctypes.c_size_t),
            ("QuotaNonPagedPoolUsage", ctypes.c_size_t),
            ("PagefileUsage", ctypes.c_size_t),
            ("PeakPagefileUsage", ctypes.c_size_t),
        )

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    ask = kernel.K32GetProcessMemoryInfo
    ask.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    good = ask(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return int(counters.PeakWorkingSetSize) if good else 0
