"""A checkpoint as an engine on MLX: number types, memory, and what is compiled.

Knows what the device can hold. Does not know ops or sessions from inside.
"""

from __future__ import annotations

import mlx.core as mx

from bonsai import models
from bonsai.backends import MemoryLimit, Progress, streaming
from bonsai.backends.mlx.costs import predict
from bonsai.backends.mlx.device import TYPES, facts, scope
from bonsai.backends.mlx.ops import MlxOps
from bonsai.backends.mlx.session import MlxEngine
from bonsai.backends.mlx.state import MlxState
from bonsai.backends.planner import refuse_gpu_limit
from bonsai.errors import InvalidRequest
from bonsai.format import Checkpoint
from bonsai.sizes import show_size

__all__ = ["dtype_for", "engine"]

WIDE = ("bitnet",)
"""Architectures that were trained in bfloat16 and square their activations, beyond float16."""


def engine(
    checkpoint: Checkpoint,
    progress: Progress | None,
    memory: MemoryLimit | None,
    dtype: str | None,
    compiled: bool | None,
) -> MlxEngine:
    """The weights in MLX's memory; the pages of the files are let go as they are copied."""
    refuse_gpu_limit(memory, "mlx")
    here = facts()
    name = dtype or dtype_for(checkpoint.architecture, here.metal)
    if memory is not None and memory.limit is not None:
        _check_memory(checkpoint, memory, TYPES[name].size)
    with scope():
        ops = MlxOps(TYPES[name], release=checkpoint.release)
        model = models.load(checkpoint, ops, progress)
        mx.clear_cache()
    spec = model.config.state

    def new_state(max_context: int) -> MlxState:
        sizes = (spec.kv_layers, spec.kv_heads, spec.head_dim, max_context)
        return ops.new_state(*sizes, spec.delta)

    where = here.name if here.metal else "CPU"
    traced = here.metal if compiled is None else compiled
    predicted = predict(here.name, ops.linear_bytes) if here.metal else None
    return MlxEngine(
        model,
        ops,
        new_state,
        f"mlx: {where}, {name}",
        compiled=traced,
        prediction=predicted,
    )


def dtype_for(architecture: str, metal: bool) -> str:
    """The type of activations: half precision is fast with Metal only."""
    if not metal:
        return "float32"
    return "bfloat16" if architecture in WIDE else "float16"


def _check_memory(checkpoint: Checkpoint, memory: MemoryLimit, token_bytes: int) -> None:
    """Raises InvalidRequest where not everything fits: layers cannot come and go here."""
    plan = streaming.plan_memory(checkpoint, memory, 8 * token_bytes)
    if plan.streams:
        total = sum(plan.needs.values()) + sum(plan.layers)
        raise InvalidRequest(
            f"memory_limit is {show_size(memory.limit or 0)}, but backend 'mlx' keeps all layers "
            f"in memory and needs about {show_size(total)}",
            hint="--backend cpu lets layers come and go; or a smaller --max-context",
        )
