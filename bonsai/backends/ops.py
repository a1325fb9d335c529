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
        """A small float32 array (a norm gain, taps) as the backend keeps it."""
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

    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), element by element; both [T, n]."""
        ...

    def causal_conv_silu(self, x: Array, taps: Array, state: Any, layer: int) -> Array:
        """A convolution over time for each channel by itself, then silu; [T, C] -> [T, C].

        y[t, c] = silu(sum over j of taps[c, j] x[t - n + 1 + j, c]) for taps [C, n]: the last tap
        meets the current row. Rows before the first of x are the last n - 1 inputs of `layer` in
        the state, zeros at the start; the state keeps the last n - 1 of x for the next call.
        """
        ...

    def gated_delta_gates(
        self, a: Array, b: Array, a_log: Array, dt_bias: Array
    ) -> tuple[Array, Array]:
        """How much to forget and to write: (decay, beta), both fp32 [T, H], of a, b [T, H].

        decay = -exp(a_log) softplus(a + dt_bias) is the logarithm of a factor between 0 and 1, and
        is at most 0; softplus(x) = ln(1 + exp(x)), without overflow; beta = sigmoid(b).
        """
        ...

    def gated_delta_rule(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Any, layer: int
    ) -> Array:
        """Read and update the recurrent memory of `layer`, token after token, all in fp32.

        For each token t and value head h, with M [Dk, Dv] the memory of that head (zeros at the
        start) and g = h // (H / Hk):

            M    <- exp(decay[t, h]) M
            M    <- M + k[t, g] (beta[t, h] (v[t, h] - M^T k[t, g]))^T
            y[t, h] = M^T q[t, g]

        q, k [T, Hk, Dk] are already normalised and q carries the factor Dk^-1/2; v [T, H, Dv];
        decay, beta [T, H] are those of `gated_delta_gates`. Returns y [T, H, Dv]. Any
        way of computing many tokens at once that equals this is allowed.
        """
        ...

    def gated_rms_norm(self, x: Array, z: Array, gain: Array, eps: float) -> Array:
        """rms_norm(x, gain, eps) * silu(z) over the last axis, fp32 inside; x, z [T, H, D]."""
        ...

    def sample(self, logits: Array, sampling: Sampling, seen: np.ndarray, uniform: float) -> int:
        """One id from `logits` [vocab] by the rules of `bonsai.sampling.choose`.

        `seen` are the distinct ids of the history, `uniform` a number in [0, 1) that decides.
        Raises NumericError when a logit is NaN or +inf; ids at -inf are never chosen.
        """
        ...
