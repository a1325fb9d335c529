"""The ops of every backend as tests use them, one line each, and how exact each one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import tolerances

from bonsai import models
from bonsai.backends.eager import EagerEngine, State
from bonsai.format import Checkpoint


@dataclass(frozen=True, slots=True)
class Runner:
    """`new_state(layers, kv_heads, head_dim, max_context, delta)`; bounds from `tolerances`.

    `delta` is a `DeltaSpec`, or None or absent where there is no recurrent memory.
    """

    name: str
    ops: Any
    new_state: Callable[..., State] = field(repr=False)
    linear: dict[str, float]  # one linear
    attention: dict[str, float]
    model: dict[str, float]  # logits of a whole tiny model against float64
    same: dict[str, float]  # logits of one history computed in two ways
    hybrid: dict[str, float]  # `model` where there are gated delta nets
    one_sign: float = 1e-5  # relative error of a sum of 17,408 equal numbers
    nearly_one: float = 1 - 2**-53  # the largest number below 1 that its sampler can tell from 1

    def bound(self, architecture: str) -> dict[str, float]:
        """How far the logits of such a model may be from the truth."""
        return self.hybrid if architecture == "qwen35" else self.model

    def load(self, checkpoint: Checkpoint, chunk: int = 512) -> EagerEngine:
        """An engine on these ops."""
        model = models.load(checkpoint, self.ops)
        spec = model.config.state
        sizes = (spec.kv_layers, spec.kv_heads, spec.head_dim)

        def new_state(max_context: int) -> State:
            if spec.delta is None:
                return self.new_state(*sizes, max_context)
            return self.new_state(*sizes, max_context, spec.delta)

        return EagerEngine(model, self.ops, new_state, self.name, chunk)


def _reference() -> Runner:
    from bonsai.backends.reference.ops import ReferenceOps
    from bonsai.backends.reference.state import KVState

    op, model = tolerances.F32_REDUCTION, tolerances.F32_MODEL
    return Runner("reference", ReferenceOps(), KVState, op, op, model, model, model)


def _defaults() -> Runner:
    """The reference, but with the compositions that backends without own kernels start from."""
    from bonsai.backends.delta import DeltaOps
    from bonsai.backends.reference.ops import ReferenceOps

    class DefaultOps(DeltaOps, ReferenceOps):
        pass

    return replace(_reference(), name="defaults", ops=DefaultOps())


def on_cpu(isa: str | None, exact: bool) -> Runner:
    from bonsai.backends.cpu.ops import CpuOps

    ops = CpuOps(isa, exact=exact)
    name = "-".join(["cpu", *["exact"] * exact, *[isa] * (isa is not None)])
    if exact:
        op, model = tolerances.F32_REDUCTION, tolerances.F32_MODEL
        return Runner(name, ops, ops.new_state, op, op, model, model, model)
    linear, attention = tolerances.INT8_ACTIVATIONS, tolerances.FP16_STATE
    whole = (tolerances.INT8_MODEL, tolerances.INT8_SAME, tolerances.INT8_HYBRID)
    return Runner(name, ops, ops.new_state, linear, attention, *whole)


class _Face:
    """MLX's ops with NumPy arrays in and out, as tests of the contract use them."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        import mlx.core as mx

        found = getattr(self._ops, name)
        if name in ("table", "vector", "new_state"):
            return found

        def given(x: Any) -> Any:
            return mx.array(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x

        def run(*args: Any, **more: Any) -> Any:
            if name == "linear":
                return linear(found(*args))
            return taken(found(*map(given, args), **{key: given(x) for key, x in more.items()}))

        def sample(logits: np.ndarray, *rest: Any) -> Any:
            return found(mx.array(logits), *rest)

        def linear(made: Any) -> Any:
            def apply(x: np.ndarray, residual: np.ndarray | None = None) -> Any:
                return taken(made(mx.array(x), None if residual is None else mx.array(residual)))

            return apply

        def taken(y: Any) -> Any:
            if isinstance(y, tuple):
                return tuple(map(taken, y))
            return np.array(y.astype(mx.float32)) if isinstance(y, mx.array) else y

        return sample if name == "sample" else run


@dataclass(frozen=True, slots=True)
class MlxRunner(Runner):
    """Engines are those of the backend: its sessions run one step ahead."""

    dtype: str = "float32"
    compiled: bool = False

    def load(self, checkpoint: Checkpoint, chunk: int = 512) -> EagerEngine:
        from bonsai.backends.mlx import MlxBackend

        engine = MlxBackend(self.dtype, compiled=self.compiled).load(checkpoint)
        engine.chunk = chunk
        return engine


def _mlx(dtype: str) -> Runner:
    from bonsai.backends.mlx.device import TYPES
    from bonsai.backends.mlx.ops import MlxOps

    ops = _Face(MlxOps(TYPES[dtype]))
    op, model = tolerances.F32_REDUCTION, tolerances.F32_MODEL
    bounds = (op, op, model, model, model)
    about = {"one_sign": 1e-4, "nearly_one": 1 - 2**-24}  # it adds one by one in float32
    return MlxRunner("mlx", ops, ops.new_state, *bounds, **about, dtype=dtype)


_MAKERS = {
    "defaults": _defaults,
    "reference": _reference,
    "cpu": partial(on_cpu, None, False),
    "cpu-exact": partial(on_cpu, None, True),
    "mlx": partial(_mlx, "float32"),
    "cpu-portable": partial(on_cpu, "portable", False),
    "cpu-exact-portable": partial(on_cpu, "portable", True),
}


def get(name: str) -> Runner:
    """The runner of that name, or a skip that says why there is none."""
    try:
        return _MAKERS[name]()
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
