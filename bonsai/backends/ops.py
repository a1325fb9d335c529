"""The ops contract: what a model may ask of a backend. The docstrings are the specification.

Tokens first, no batch axis: rows are [T, width], heads [T, H, D]. `state` is opaque to models:
which row belongs to which position is its business. Arrays are the backend's own; they support
slicing, `.shape` and `.reshape`, and nothing else is used. `reference/ops.py` is the NumPy meaning.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from bonsai.config import RopeSpec
from bonsai.matrix import Matrix
from bonsai.sampling import Sampling

__all__ = ["Array", "Linear", "Ops"]

Array = Any


class Linear(Protocol):
    """A linear map made by `Ops.linear`."""

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """T(x) @ W^T (+ residual); x [T, in] -> [T, out], accumulated in at least fp32."""
        ...


class Ops(Protocol):
    """About a dozen semantic operations. Routes are chosen inside an op from its shapes."""

    def vector(self, values: np.ndarray) -> Array:
        """A float32 vector (a norm gain) as the backend keeps it."""
        ...

    def table(self, matrix: Matrix) -> Any:
        """A matrix as the backend keeps it for `embed`."""
        ...

    def linear(self, *matrices: Matrix) -> Linear:
        """One linear whose output is the outputs of `matrices` side by side.

        They read the same input, so it is transformed and quantized once for each distinct need.
        """
        ...

    def embed(self, table: Any, tokens: Array) -> Array:
        """Rows of a packed or dense table, [T, hidden]; transformed back where it is folded."""
        ...

    def rms_norm(self, x: Array, gain: Array, eps: float) -> Array:
        """x * gain / sqrt(mean(x^2) + eps) over the last axis, fp32 inside."""
        ...

    def rope(self, x: Array, state: Any, spec: RopeSpec) -> Array:
        """Rotate x [T, H, D] by the positions of the rows in `state`.

        With n = spec.dims, angle[t, i] = position[t] * spec.frequencies()[i] for i < n/2:
        y[i] = a (x[i] cos - x[i + n/2] sin); y[i + n/2] = a (x[i + n/2] cos + x[i] sin), where
        a = spec.amplitude. Elements from n on are copied. Angles are computed in float64.
        """
        ...

    def attention(self, q: Array, k: Array, v: Array, state: Any, layer: int) -> Array:
        """Append k, v [T, Hkv, D] to the state of `layer`; causal attention over all of it.

        q [T, H, D] -> [T, H, D]; scores are q . k / sqrt(D), softmax in fp32; query head h reads
        KV head h // (H / Hkv).
        """
        ...

    def swiglu(self, gate_up: Array) -> Array:
        """[T, 2 n] -> silu(first n) * last n, with silu(a) = a / (1 + exp(-a))."""
        ...

    def relu2_glu(self, gate_up: Array) -> Array:
        """[T, 2 n] -> relu(first n)^2 * last n, with relu(a) = max(a, 0)."""
        ...

    def sample(self, logits: Array, sampling: Sampling, seen: np.ndarray, uniform: float) -> int:
        """One id from `logits` [vocab] by the rules of `bonsai.sampling.choose`.

        `seen` are the distinct ids of the history, `uniform` a number in [0, 1) that decides.
        Raises NumericError when a logit is NaN or +inf; ids at -inf are never chosen.
        """
        ...
