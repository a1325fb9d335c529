"""What `bonsai doctor --full` tries on the actual device: each part against NumPy, and speed.

Knows small problems with known answers. Needs no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from bonsai import affine, ternary
from bonsai.backends import Check
from bonsai.backends import delta as numpy_delta
from bonsai.backends.mlx import costs, delta
from bonsai.backends.mlx.device import TYPES, facts, scope
from bonsai.backends.mlx.linear import part_of
from bonsai.backends.mlx.load import dtype_for
from bonsai.backends.mlx.ops import MlxOps
from bonsai.backends.mlx.state import MlxState
from bonsai.matrix import PackedMatrix, SignedHadamard
from bonsai.sampling import Sampling, choose

__all__ = ["checks"]

WIDTH, ROWS = 1024, 96
BOUNDS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error beside the largest output."""
SPEED_ROWS, SPEED_WIDTH, SPEED_COPIES = 8192, 8192, 16
"""16 matrices of 17 MB: together more than any cache."""


def checks() -> Iterator[Check]:
    """One after another, since some take a while."""
    here = facts()
    names = ["float32"]
    if here.metal:
        names.insert(0, dtype_for("qwen3", True))
    for name in names:
        for packing in (*ternary.PACKINGS, *affine.BITS):
            for rows in (1, 5, 40):
                yield _try(f"linear {packing}, {rows} rows, {name}", _linear(packing, rows, name))
        yield _try(f"rotated linear, {name}", _linear("t2", 3, name, 256))
    yield _try("recurrent memory", _recurrence)
    yield _try("attention", _attention)
    yield _try("sampling", _sampling)
    if here.metal:
        yield _try("speed of t2, one row", _speed)


def _try(name: str, work: Callable[[], tuple[bool, str]]) -> Check:
    try:
        with scope():
            good, detail = work()
    except Exception as error:  # whatever it is belongs into the report
        return Check(name, False, f"{type(error).__name__}: {str(error)[:300]}")
    return Check(name, good, detail)


def _near(found: mx.array, expected: np.ndarray, bound: float) -> tuple[bool, str]:
    y = np.array(found.astype(mx.float32), np.float64)
    error = float(np.abs(y - expected).max() / np.abs(expected).max())
    return error <= bound, f"error {error:.1e}, at most {bound:.0e}"


def _linear(packing: str, rows: int, dtype: str, block: int = 0) -> Callable[[], tuple[bool, str]]:
    def work() -> tuple[bool, str]:
        rng = np.random.default_rng(1)
        signs = (2 * rng.integers(0, 2, WIDTH) - 1).astype(np.int8)
        transform = SignedHadamard(block, signs) if block else None
        matrix = _matrix(rng, packing, ROWS + 3, WIDTH, transform)
        x = (rng.integers(-8, 9, (rows, WIDTH)) / 4).astype(np.float32)  # exact in every type
        turned = x if transform is None else transform.forward(x)
        kind = TYPES[dtype]
        y = MlxOps(kind).linear(matrix)(mx.array(x).astype(kind))
        expected = turned.astype(np.float64) @ matrix.rows().astype(np.float64).T
        return _near(y, expected, BOUNDS[dtype])

    return work


def _matrix(
    rng: np.random.Generator,
    packing: str,
    rows: int,
    width: int,
    transform: SignedHadamard | None = None,
) -> PackedMatrix:
    if packing in affine.BITS:
        values = rng.standard_normal((rows, width)).astype(np.float32)
        codes, scales, biases = affine.quantize(values, packing, 64)
        return PackedMatrix("w", packing, values.shape, 64, codes, scales, biases, transform)
    trits = rng.integers(-1, 2, (rows, width))
    codes = ternary.pack(np.where(trits == 0, 1, trits) if packing == "b1" else trits, packing, 128)
    scales = (0.5 + rng.random((rows, width // 128))).astype(np.float16)
    return PackedMatrix("w", packing, (rows, width), 128, codes, scales, None, transform)


def _recurrence() -> tuple[bool, str]:
    """Chunks and single tokens against the same in NumPy, float64."""
    rng = np.random.default_rng(2)
    heads, count, width = 4, 70, 64
    q, k, v = (rng.standard_normal((heads, count, width)) / 8 for _ in range(3))
    k /= np.linalg.norm(k, axis=2, keepdims=True)
    decay, beta = -rng.random((heads, count)), rng.random((heads, count))
    memory = np.zeros((heads, width, width))
    expected, _ = numpy_delta.chunk(q, k, v, decay, beta, memory)
    a, b, c, d, e, m = (mx.array(x.astype(np.float32)) for x in (q, k, v, decay, beta, memory))
    first, m = delta.through(a[:, :69], b[:, :69], c[:, :69], d[:, :69], e[:, :69], m)
    last, _ = delta.one(a[:, 69], b[:, 69], c[:, 69], d[:, 69], e[:, 69], m)
    return _near(mx.concatenate([first, last[:, None]], axis=1), expected, BOUNDS["float32"])


def _attention() -> tuple[bool, str]:
    """Eleven rows, then one, then two, over a state that grows."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((14, h, 64)).astype(np.float32) for h in (4, 2, 2))
    state, ops, found = MlxState(1, 2, 64, 100), MlxOps(), []
    for part in (slice(0, 11), slice(11, 12), slice(12, 14)):
        rows = [mx.array(a[part]) for a in (q, k, v)]
        found.append(ops.attention(rows[0], rows[1], rows[2], state, 0))
        state.advance(part.stop - part.start)
    keys, shared = (np.repeat(a, 2, axis=1).astype(np.float64) for a in (k, v))
    scores = np.einsum("thd,shd->hts", q, keys) / 8
    scores[:, np.triu(np.ones((14, 14), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    expected = np.einsum("hts,shd->thd", weights, shared)
    return _near(mx.concatenate(found), expected, BOUNDS["float32"])


def _sampling() -> tuple[bool, str]:
    rng, ops, good = np.random.default_rng(4), MlxOps(), 0
    settings = (Sampling.greedy(), Sampling(), Sampling(0.7, 20, 0.8), Sampling(1.2, 0, 0.9, 0.05))
    for trial in range(20):
        logits = (3 * rng.standard_normal(20_000)).astype(np.float32)
        uniform, seen = float(rng.random()), np.empty(0, np.int64)
        sampling = settings[trial % 4]
        token = ops.sample(mx.array(logits), sampling, seen, uniform)
        good += token == choose(logits, sampling, seen, uniform)
    return good == 20, f"{good} of 20 ids"


def _speed() -> tuple[bool, str]:
    """GB/s of codes and scales in products of one row, one after another."""
    rng = np.random.default_rng(5)
    matrix = _matrix(rng, "t2", SPEED_ROWS, SPEED_WIDTH)
    parts = [part_of(matrix) for _ in range(SPEED_COPIES)]
    x = mx.ones((1, SPEED_WIDTH), mx.float16)

    def through() -> float:
        started, y = time.perf_counter(), x
        for part in parts:
            y = part.product(y) * 1e-3
        mx.eval(y)
        return time.perf_counter() - started

    through()
    rate = SPEED_COPIES * matrix.nbytes / min(through() for _ in range(5)) / 1e9
    known = costs.bandwidth(facts().name)
    share = "" if known is None else f", {100 * rate / known[1]:.0f} % of {known[1]:.0f}"
    return True, f"{rate:.1f} GB/s of weights{share}"
