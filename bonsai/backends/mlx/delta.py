"""Gated delta nets on MLX arrays: one token by the recurrence, many by chunks; float32 throughout.

Knows the formulas of `Ops.gated_delta_rule` and `Ops.causal_conv_silu`. Does not know states.
"""

from __future__ import annotations

import mlx.core as mx

__all__ = ["conv_silu", "gates", "one", "silu", "softplus", "through"]

CHUNK = 32
"""Tokens computed at once: the work inside a chunk grows with its square, the number of steps that
wait for each other falls with it."""


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def softplus(x: mx.array) -> mx.array:
    """ln(1 + exp(x)) without overflow."""
    return mx.maximum(x, 0) + mx.log1p(mx.exp(-mx.abs(x)))


def conv_silu(rows: mx.array, taps: mx.array, count: int) -> mx.array:
    """silu of the convolution of rows [count + n - 1, C] with taps [C, n]: [count, C]."""
    n = taps.shape[1]
    y = sum((rows[j : j + count] * taps[:, j] for j in range(1, n)), rows[:count] * taps[:, 0])
    return silu(y)


def gates(
    a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """(decay, beta) as `Ops.gated_delta_gates` says."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return -mx.exp(a_log) * softplus(a + dt_bias), mx.sigmoid(b)


def one(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """One token; q, k [H, Dk], v [H, Dv], decay, beta [H], memory [H, Dk, Dv]: (y [H, Dv], memory).

    Products and sums instead of matrix products, which are no faster for one row.
    """
    memory = memory * mx.exp(decay)[:, None, None]
    error = beta[:, None] * (v - (memory * k[:, :, None]).sum(axis=1))
    memory = memory + k[:, :, None] * error[:, None, :]
    return (memory * q[:, :, None]).sum(axis=1), memory


def through(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Many tokens, heads first: q, k [H, T, Dk], v [H, T, Dv], decay, beta [H, T]; (y, memory).

    As `bonsai.backends.delta.chunk`, but what does not need the memory is computed for all chunks
    together. With g[i, j] the sum of decay over (j, i], D = exp(g) for j <= i and 0 else, and
    A = the part of (beta K K^T) * D below the diagonal, what the tokens of a chunk write is

        U = (I + A)^-1 (beta V) - (I + A)^-1 (beta K exp(c)) M        c[i]: decay up to i

    Each g is a sum of its own, not a difference of sums, so float32 is enough. Padded tokens have
    decay and beta 0: they change nothing.
    """
    count = v.shape[1]
    size = min(CHUNK, count)
    parts = -(-count // size)
    q, k, v, decay, beta = (
        _split(x, parts, size, parts * size - count) for x in (q, k, v, decay, beta)
    )
    c = mx.cumsum(decay, axis=2)  # [H, N, S]
    below = mx.tril(mx.ones((size, size), mx.bool_), -1)
    ones = mx.where(below, decay[..., None], 0)  # [H, N, i, j]: decay of i where j < i
    gap = mx.cumsum(ones, axis=2)
    kept = mx.tril(mx.ones((size, size), mx.bool_))
    D = mx.where(kept, mx.exp(mx.where(kept, gap, 0)), 0)
    kt, weighted = k.swapaxes(2, 3), beta[..., None] * k
    inverse = _inverse(mx.where(below, (weighted @ kt) * D, 0))
    grown = mx.exp(c)[..., None]
    fixed = inverse @ (beta[..., None] * v)
    through_memory = inverse @ (weighted * grown)
    inner, reading = (q @ kt) * D, q * grown
    left = k * D[:, :, -1, :, None]  # exp(c_end - c_j)
    out = []
    for n in range(parts):
        written = fixed[:, n] - through_memory[:, n] @ memory
        out.append(reading[:, n] @ memory + inner[:, n] @ written)
        memory = grown[:, n, -1:] * memory + left[:, n].swapaxes(1, 2) @ written
    y = out[0] if parts == 1 else mx.concatenate(out, axis=1)
    return y[:, :count], memory


def _split(x: mx.array, parts: int, size: int, missing: int) -> mx.array:
    """[H, T, ...] as [H, parts, size, ...], padded with zeros."""
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], parts, size, *x.shape[2:])


def _inverse(below: mx.array) -> mx.array:
    """(I + A)^-1 for A [..., S, S] with nothing on and above the diagonal.

    By halves: the inverse of [[P, 0], [R, S]] is [[P', 0], [-S' R P', S']].
    """
    size = below.shape[-1]
    if size == 1:
        return mx.ones_like(below)
    half = size // 2
    first, second = _inverse(below[..., :half, :half]), _inverse(below[..., half:, half:])
    corner = -(second @ (below[..., half:, :half] @ first))
    right = mx.zeros((*below.shape[:-2], half, size - half), below.dtype)
    top = mx.concatenate([first, right], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
