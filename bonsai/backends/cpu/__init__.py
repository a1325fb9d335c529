"""The cpu backend: native kernels chosen at run time for the CPU that is there.

The embedded default. Knows which kernels to use and on how many threads; what they compute is in
`ops.py` and `native/`.
"""

from __future__ import annotations

import importlib
import math
import os
from types import ModuleType

from bonsai.backends import MemoryLimit, Progress, streaming
from bonsai.backends.cpu.quota import quota
from bonsai.backends.eager import EagerEngine, State
from bonsai.backends.planner import Plan, refuse_gpu_limit
from bonsai.errors import BackendUnavailable, InvalidRequest
from bonsai.format import Checkpoint

__all__ = ["BACKEND", "EXACT", "CpuBackend", "usable_cpus"]

ISA_VARIABLE = "BONSAI_CPU_ISA"
MOST_THREADS = 1024


class CpuBackend:
    """`bonsai.backends.Backend` on native kernels.

    `exact` keeps activations, keys and values in float32: slower, for comparisons.
    """

    name = "cpu"

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    @property
    def _kv_bits(self) -> int:
        return 32 if self._exact else 16

    def plan(self, checkpoint: Checkpoint, memory: MemoryLimit) -> Plan:
        """What would lie in memory. Raises InvalidRequest where it does not fit."""
        return streaming.plan_memory(checkpoint, memory, self._kv_bits)

    def status(self) -> str:
        return f"{_isa(_library())}, {_count(usable_cpus(), 'thread')}"

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        threads: int | None = None,
        memory: MemoryLimit | None = None,
    ) -> EagerEngine:
        """The checkpoint's weights, where they lie: its files stay mapped.

        `threads` counts for the whole process; by default the CPUs that it may use.
        """
        refuse_gpu_limit(memory, self.name)
        native = _library()
        count = usable_cpus() if threads is None else threads
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_THREADS:
            raise InvalidRequest(f"threads is {threads!r}, expected 1 to {MOST_THREADS}")
        native.set_threads(count)
        from bonsai.backends.cpu.ops import CpuOps  # needs the native module

        ops = CpuOps(_isa(native), exact=self._exact)
        model, note = streaming.load(checkpoint, ops, memory, self._kv_bits, progress)
        spec = model.config.state

        def new_state(max_context: int) -> State:
            sizes = (spec.kv_layers, spec.kv_heads, spec.head_dim, max_context)
            return ops.new_state(*sizes, spec.delta)

        mode = ", exact" if self._exact else ""
        where = f"cpu: {ops.kernels.name}, {_count(count, 'thread')}{mode}{note}"
        return EagerEngine(model, ops, new_state, where)


def usable_cpus() -> int:
    """CPUs that this process may use: those it may run on, or fewer where a container gets less
    time than that."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        count = os.cpu_count() or 1
    limit = quota()
    return count if limit is None else min(count, math.ceil(limit))


def _library() -> ModuleType:
    try:
        return importlib.import_module("bonsai.backends.cpu._native")
    except ImportError as error:
        raise BackendUnavailable(
            f"the native library cannot be loaded: {error}",
            hint="build it: pip install . in the source folder, with a C++ compiler",
        ) from error


def _isa(native: ModuleType) -> str:
    """The best instruction set here, or the one that the environment asks for."""
    supported: list[str] = native.supported()
    wanted = os.environ.get(ISA_VARIABLE)
    if not wanted:
        return supported[0]
    if wanted not in supported:
        raise BackendUnavailable(
            f"{ISA_VARIABLE} is '{wanted}', which this CPU or this build does not have",
            hint=f"one of: {', '.join(supported)}",
        )
    return wanted


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


BACKEND = CpuBackend()
EXACT = CpuBackend(exact=True)
