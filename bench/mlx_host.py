"""What the host does for each decoded token with MLX: building the graph, for the 27B shape.

    python bench/mlx_host.py [steps]

Graphs are built and not computed, so this runs anywhere and needs no memory for weights. Prints
milliseconds of CPU time per token: a graph built in Python for each token, and one that was traced
once. Each step starts from the state of the one before, as in decoding.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from bonsai import models
from bonsai.backends.mlx import linear, ops
from bonsai.backends.mlx.sampler import Recipe, knobs
from bonsai.backends.mlx.step import Choice, Stepper
from bonsai.models import qwen35
from bonsai.sampling import Sampling

VOCAB, LAYERS = 248320, 64
CONFIG = {
    "architecture": "qwen35", "activation": "silu", "layers": LAYERS, "hidden": 5120, "ffn": 17408,
    "heads": 24, "kv_heads": 4, "head_dim": 256, "vocab": VOCAB, "context": 262144, "tied": False,
    "norm_eps": 1e-6, "rope": {"theta": 1e7, "dims": 64}, "eos": [],
    "kinds": ["attention" if i % 4 == 3 else "delta" for i in range(LAYERS)],
    "gdn": {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "taps": 4},
}  # fmt: skip
GROUP = BLOCK = 128
FOLD = 1024


class Shapes:
    """Stands in for a checkpoint of zeros that are never computed."""

    path = "shapes"

    def has(self, name: str) -> bool:
        return True

    def unused(self) -> list[str]:
        return []

    def release(self, name: str) -> None:
        pass


class Lazy(models.decoder.Reader):
    """A reader that takes every shape it is asked for."""

    def matrix(self, name: str, rows: int, columns: int) -> Any:
        plain = name.endswith(("gdn.a", "gdn.b"))
        transform = None
        if not plain:
            transform = mock.Mock(block=FOLD, signs=np.ones(columns, np.int8))
        return mock.Mock(shape=(rows, columns), nbytes=0, transform=transform, plain=plain)

    def vector(self, name: str, *shape: int) -> Any:
        return self._ops.vector(np.zeros(shape, np.float32))


def part(matrix: Any, copied: Any) -> linear.Part:
    """As `part_of`, of zeros."""
    rows, columns = matrix.shape
    if matrix.plain:
        return linear.Dense(mx.zeros((rows, columns)))
    scales = mx.zeros((rows, columns // GROUP), mx.float16)
    codes = mx.zeros((rows, columns // 16), mx.uint32)
    return linear.Affine(rows, columns, 2, GROUP, codes, scales, scales)


def model(made: ops.MlxOps) -> models.Model:
    cfg = qwen35.read_config(CONFIG)
    with (
        mock.patch.object(models.decoder, "Reader", Lazy),
        mock.patch.object(ops, "part_of", part),
        mock.patch.object(mx, "eval", lambda *arrays: None),
    ):
        weights = qwen35.load(Shapes(), cfg, made)  # type: ignore[arg-type]
    return models.Model(models.architecture("qwen35"), cfg, weights)


def measure(compiled: bool, steps: int, sampling: Sampling) -> tuple[float, int]:
    """(ms of CPU time per token, traces); the first step, which traces, is left out."""
    made = ops.MlxOps(mx.float16)
    whole = model(made)
    spec = whole.config.state
    stepper = Stepper(whole, made, compiled=compiled)
    state = made.new_state(spec.kv_layers, spec.kv_heads, spec.head_dim, 4096, spec.delta)
    state.position = 100
    recipe = Recipe.of(sampling, VOCAB)
    choice = Choice(mx.array(5, mx.int32), mx.zeros((1, 5120), mx.float16), None)
    times = []
    for _ in range(steps + 1):
        started = time.process_time()
        choice = stepper.step(state, choice, recipe, knobs(sampling, 0.5))
        state.advance(1)
        times.append(time.process_time() - started)
        # the next step builds on inputs that are there, as when the device has computed them
        state.load(state.save())
    return 1e3 * float(np.median(times[1:])), stepper.traces


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for name, sampling in (("greedy", Sampling.greedy()), ("top_k 20", Sampling(top_k=20))):
        for compiled in (False, True):
            cost, traces = measure(compiled, steps, sampling)
            how = f"traced {traces}x" if compiled else "built in Python"
            print(f"{name:10} {how:16} {cost:6.2f} ms of CPU per token")


if __name__ == "__main__":
    main()
