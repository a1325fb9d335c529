"""The reference backend: NumPy, the meaning of every op, and an oracle for all other backends."""

from __future__ import annotations

import numpy as np

from bonsai.backends import MemoryLimit, Progress, streaming
from bonsai.backends.eager import EagerEngine
from bonsai.backends.planner import Plan, refuse_gpu_limit
from bonsai.backends.reference.ops import ReferenceOps
from bonsai.backends.reference.state import KVState
from bonsai.errors import InvalidRequest
from bonsai.format import Checkpoint

__all__ = ["BACKEND", "ReferenceBackend"]


class ReferenceBackend:
    """`bonsai.backends.Backend` on NumPy."""

    name = "reference"

    def status(self) -> str:
        return f"NumPy {np.__version__}, float32, slow"

    def plan(self, checkpoint: Checkpoint, memory: MemoryLimit) -> Plan:
        """What would lie in memory. Raises InvalidRequest where it does not fit."""
        return streaming.plan_memory(checkpoint, memory, 32)

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        threads: int | None = None,
        memory: MemoryLimit | None = None,
    ) -> EagerEngine:
        """The checkpoint's weights, where they lie: its files stay mapped."""
        if threads is not None:
            raise InvalidRequest(
                f"threads is {threads}, but backend 'reference' uses as many as NumPy does",
                hint="leave --threads out (in Python: threads=None)",
            )
        refuse_gpu_limit(memory, self.name)
        ops = ReferenceOps()
        model, note = streaming.load(checkpoint, ops, memory, 32, progress)
        spec = model.config.state

        def new_state(max_context: int) -> KVState:
            return KVState(spec.kv_layers, spec.kv_heads, spec.head_dim, max_context, spec.delta)

        return EagerEngine(model, ops, new_state, f"reference: {self.status()}{note}")


BACKEND = ReferenceBackend()
