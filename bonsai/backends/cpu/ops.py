"""The ops on native kernels: float32 NumPy arrays in and out, weights where the checkpoint is.

Knows how arrays must lie for the kernels, which check every shape again. Ternary linears multiply
int8 activations, q4 and q8 ones int16 activations, dense ones float32; with `exact` every linear
multiplies float32 and keys and values are float32 too. native/kernels.h describes the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bonsai.backends.cpu import _native
from bonsai.backends.cpu.state import CpuState
from bonsai.backends.delta import DeltaOps
from bonsai.config import DeltaSpec, RopeSpec
from bonsai.errors import NumericError
from bonsai.matrix import Matrix, PackedMatrix
from bonsai.sampling import Sampling

__all__ = ["CpuLinear", "CpuOps"]

ROPE_BLOCK = 1024
"""Positions by which the tables of cosines grow: a few hundred kilobytes each time."""


class CpuLinear:
    """y = T(x) @ W^T (+ residual) for several matrices side by side, in one native call."""

    def __init__(self, kernels: Any, matrices: tuple[Matrix, ...], exact: bool) -> None:
        self._linear = _native.PackedLinear(kernels, [native_matrix(m) for m in matrices], exact)

    @property
    def routes(self) -> list[str]:
        """The kernel of each matrix, such as "ternary_dot_t2_i8_avx2"."""
        routes: list[str] = self._linear.routes
        return routes

    def __call__(self, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        out = np.empty((len(x), self._linear.rows), np.float32)
        self._linear.run(_packed(x), out, None if residual is None else _packed(residual))
        return out


class CpuOps(DeltaOps):
    """`bonsai.backends.ops.Ops` on one table of kernels; the state is a `CpuState`."""

    def __init__(self, isa: str | None = None, *, exact: bool = False) -> None:
        """`isa` is one of `_native.supported()`; by default the best of them."""
        self.kernels = _native.kernels(isa or _native.supported()[0])
        self.exact = exact
        self._angles: dict[RopeSpec, tuple[np.ndarray, np.ndarray]] = {}

    def new_state(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        delta: DeltaSpec | None = None,
    ) -> CpuState:
        """The state of a fresh conversation; `layers` are those that keep keys and values."""
        sizes = (layers, kv_heads, head_dim, max_context)
        return CpuState(self.kernels, *sizes, delta, exact=self.exact)

    def vector(self, values: np.ndarray) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    def table(self, matrix: Matrix) -> Any:
        return native_matrix(matrix), matrix.shape[1]

    def linear(self, *matrices: Matrix) -> CpuLinear:
        return CpuLinear(self.kernels, matrices, self.exact)

    def embed(self, table: Any, tokens: np.ndarray) -> np.ndarray:
        matrix, width = table
        out = np.empty((len(tokens), width), np.float32)
        _native.embed(self.kernels, matrix, np.ascontiguousarray(tokens, np.int32), out)
        return out

    def rms_norm(self, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
        out = np.empty(x.shape, np.float32)
        _native.rms_norm(self.kernels, _heads(x), gain, eps, _heads(out))
        return out

    def rope(self, x: np.ndarray, state: CpuState, spec: RopeSpec) -> np.ndarray:
        cos, sin = self._rotation(spec, state.position + len(x))
        rows = slice(state.position, state.position + len(x))
        out = np.empty(x.shape, np.float32)
        _native.rope(self.kernels, _heads(x), cos[rows], sin[rows], out)
        return out

    def attention(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, state: CpuState, layer: int
    ) -> np.ndarray:
        return state.attend(layer, _heads(q), _heads(k), _heads(v))

    def swiglu(self, gate_up: np.ndarray) -> np.ndarray:
        out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        _native.swiglu(self.kernels, _packed(gate_up), out)
        return out

    def relu2_glu(self, gate_up: np.ndarray) -> np.ndarray:
        gate, up = np.split(gate_up, 2, axis=-1)  # few numbers beside a linear: NumPy will do
        out = np.maximum(gate, np.float32(0))
        out *= out
        out *= up
        return out

    def sample(
        self, logits: np.ndarray, sampling: Sampling, seen: np.ndarray, uniform: float
    ) -> int:
        """The native twin of `bonsai.sampling.choose`, which says what is chosen."""
        chosen: int = _native.sample(
            _packed(logits),
            sampling.temperature,
            min(sampling.top_k, len(logits)),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            np.ascontiguousarray(seen, np.int64),
            uniform,
        )
        if chosen < 0:
            raise NumericError(
                f"the model's logits are not usable (their maximum is {logits.max()})",
                hint="the weights may be damaged: bonsai verify; or try --backend reference",
            )
        return chosen

    def _rotation(self, spec: RopeSpec, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [at least `positions`, dims / 2], from angles in float64."""
        found = self._angles.get(spec)
        if found is None or len(found[0]) < positions:
            count = -(-positions // ROPE_BLOCK) * ROPE_BLOCK
            angles = np.outer(np.arange(count, dtype=np.float64), spec.frequencies())
            found = (
                (spec.amplitude * np.cos(angles)).astype(np.float32),
                (spec.amplitude * np.sin(angles)).astype(np.float32),
            )
            self._angles[spec] = found
        return found


def native_matrix(matrix: Matrix) -> Any:
    """The matrix as kernels see it: its planes as bytes, where they lie."""
    rows, columns = matrix.shape
    kind, transform = matrix.packing, matrix.transform
    signs = None if transform is None else np.ascontiguousarray(transform.signs, np.int8)
    block = 0 if transform is None else transform.block
    if not isinstance(matrix, PackedMatrix):
        values = _bytes(matrix.values)
        return _native.PackedMatrix(kind, rows, columns, 0, values, None, None, signs, block)
    codes, scales, group = _bytes(matrix.codes), _bytes(matrix.scales), matrix.group
    biases = None if matrix.biases is None else _bytes(matrix.biases)
    return _native.PackedMatrix(kind, rows, columns, group, codes, scales, biases, signs, block)


def _bytes(plane: np.ndarray) -> np.ndarray:
    """A plane [rows, n] as uint8 [rows, bytes], without a copy where it is contiguous."""
    return np.ascontiguousarray(plane).view(np.uint8)


def _packed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def _heads(x: np.ndarray) -> np.ndarray:
    """Rows [T, n] as one head each; heads [T, H, D] stay, also when they are a slice of more."""
    if x.ndim == 2:
        return x.reshape(len(x), 1, -1)
    inner = x.shape[2] * x.itemsize
    tight = x.strides[1:] == (inner, x.itemsize)
    return x if x.dtype == np.float32 and tight else _packed(x)
