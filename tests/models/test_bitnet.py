"""BitNet: norms before the output linears and a squared ReLU, against float64 on every backend."""

from __future__ import annotations

from pathlib import Path

import dense
import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner
from tolerances import F32_REDUCTION

from bonsai import models
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.format import Checkpoint, CheckpointWriter

SPEC = tiny.Tiny(architecture="llama", heads=4, kv_heads=2, head_dim=32, ffn=192, tied=False)
TOKENS = np.array([5, 900, 17, 3, 3, 512, 64, 11])


def write(out: Path, activation: str = "relu2", without: str = "") -> Checkpoint:
    """A llama of tests/tiny.py with two more norms in each block."""
    made, rng = tiny.weights(SPEC), tiny.Random(7)
    vectors = dict(made.vectors)
    for i in range(SPEC.layers):
        for name, width in (("attn", SPEC.heads * SPEC.head_dim), ("ffn", SPEC.ffn)):
            gain = 1 + 0.3 * rng.standard_normal(width)
            vectors[f"layers.{i}.{name}.sub_norm"] = gain.astype(np.float32)
    vectors.pop(without, None)
    config = {**tiny.config(SPEC), "architecture": "bitnet", "activation": activation}
    with CheckpointWriter(out) as writer:
        for matrix in made.matrices.values():
            writer.matrix(matrix)
        for name, values in vectors.items():
            writer.vector(name, values)
        source = {"kind": "random", "files": []}
        writer.finish(architecture="bitnet", config=config, source=source)
    return Checkpoint.open(out)


def expected(checkpoint: Checkpoint, activation: str, sub_norms: bool = True) -> np.ndarray:
    """Logits [T, vocab] in float64 from the formulas."""
    cfg, eps = checkpoint.config, checkpoint.config["norm_eps"]

    def weight(name: str) -> np.ndarray:
        return dense.dequantized(checkpoint.matrix(name))

    def sub_norm(x: np.ndarray, name: str) -> np.ndarray:
        return dense.norm(x, checkpoint.vector(name), eps) if sub_norms else x

    x = weight("embedding")[TOKENS]
    for i in range(cfg["layers"]):
        name = f"layers.{i}"
        h = dense.norm(x, checkpoint.vector(f"{name}.attn_norm"), eps)
        q, k, v = ((h @ weight(f"{name}.attn.{p}").T).reshape(len(x), -1, 32) for p in "qkv")
        q, k = dense.rotated(q, cfg["rope"]), dense.rotated(k, cfg["rope"])
        h = dense.attended(q, k, v, 2).reshape(len(x), -1)
        x = x + sub_norm(h, f"{name}.attn.sub_norm") @ weight(f"{name}.attn.out").T
        h = dense.norm(x, checkpoint.vector(f"{name}.ffn_norm"), eps)
        gate, up = (h @ weight(f"{name}.ffn.{p}").T for p in ("gate", "up"))
        gate = np.maximum(gate, 0) ** 2 if activation == "relu2" else gate / (1 + np.exp(-gate))
        x = x + sub_norm(gate * up, f"{name}.ffn.sub_norm") @ weight(f"{name}.ffn.down").T
    return dense.norm(x, checkpoint.vector("norm"), eps) @ weight("head").T


def found(runner: Runner, checkpoint: Checkpoint, chunk: int = 512) -> np.ndarray:
    with runner.load(checkpoint, chunk).session(64, SPEC.vocab) as session:
        session.prefill(TOKENS.tolist())
        return session.logits()


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_logits_equal_float64(runner: Runner, tmp_path: Path, activation: str) -> None:
    checkpoint = write(tmp_path / "m", activation)
    y = expected(checkpoint, activation)[-1]
    assert_allclose(found(runner, checkpoint), y, **runner.model)
    assert_allclose(found(runner, checkpoint, chunk=3), y, **runner.model)
    other = expected(checkpoint, "silu" if activation == "relu2" else "relu2")[-1]
    assert np.abs(other - y).max() > 0.05 * np.abs(y).max()


def test_losing_the_norms_would_be_seen(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m")
    y = expected(checkpoint, "relu2")[-1]
    assert (
        np.abs(expected(checkpoint, "relu2", sub_norms=False)[-1] - y).max()
        > 0.05 * np.abs(y).max()
    )


@pytest.mark.parametrize("width", [1, 7, 64, 192, 1536])
def test_relu2_glu(runner: Runner, width: int) -> None:
    rng = np.random.default_rng(width)
    for rows in (1, 2, 33):
        x = (4 * rng.standard_normal((rows, 2 * width))).astype(np.float32)
        a, b = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
        y = np.asarray(runner.ops.relu2_glu(x))
        assert y.shape == (rows, width)
        assert_allclose(y, np.where(a > 0, a, 0) ** 2 * b, **F32_REDUCTION)


def test_missing_norm_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m", without="layers.1.ffn.sub_norm")
    from bonsai.backends.reference import BACKEND

    with pytest.raises(FormatError, match=r"no tensor 'layers.1.ffn.sub_norm'"):
        BACKEND.load(checkpoint)


def test_other_activations_are_refused() -> None:
    config = {**tiny.config(SPEC), "architecture": "bitnet", "activation": "gelu"}
    with pytest.raises(UnsupportedModel, match=r"'gelu'; supported: relu2, silu"):
        models.architecture("bitnet").read_config(config)
