"""Tiny random models in our own format: seeded, any architecture, size and packing.

    path = tiny.write(tmp_path / "m", tiny.Tiny(architecture="llama", ffn=192, packing="t5"))

`weights` makes the tensors and `save` writes them, for tests that change some in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bonsai import affine, ternary
from bonsai.config import Yarn
from bonsai.format import CheckpointWriter
from bonsai.matrix import DENSE, DenseMatrix, Matrix, PackedMatrix, SignedHadamard


class Random:
    """Random numbers that no version or platform of NumPy changes, so golden files stay true.

    Only the raw words of PCG64 and exact arithmetic are used. The methods are named as those of
    `numpy.random.Generator`, which may stand in for it where nothing golden depends on it.
    """

    def __init__(self, seed: int) -> None:
        self._words = np.random.PCG64(seed)

    def integers(self, low: int, high: int, shape: int | tuple[int, ...]) -> np.ndarray:
        """low <= n < high, int64."""
        count = int(np.prod(shape))
        raw = self._words.random_raw(count) % np.uint64(high - low)
        return low + raw.astype(np.int64).reshape(shape)

    def random(self, shape: int | tuple[int, ...]) -> np.ndarray:
        """0 <= u < 1, float64."""
        raw = self._words.random_raw(int(np.prod(shape))) >> np.uint64(11)
        return (raw.astype(np.float64) * 2.0**-53).reshape(shape)

    def standard_normal(self, shape: int | tuple[int, ...]) -> np.ndarray:
        """Nearly: the sum of twelve uniform numbers, mean 0 and variance 1."""
        count = int(np.prod(shape))
        total = np.full(count, -6.0)
        for _ in range(12):
            total += self.random(count)
        return total.reshape(shape)


MATRICES = ("attn.q", "attn.k", "attn.v", "attn.out", "ffn.gate", "ffn.up", "ffn.down")


@dataclass(frozen=True, slots=True)
class Tiny:
    """What to make. `table` is the packing of embedding and head; None is that of the rest.

    `hadamard` is a block size: the input of every matrix but the dense ones is transformed.
    """

    architecture: str = "qwen3"
    layers: int = 2
    hidden: int = 128
    ffn: int = 256
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    vocab: int = 1000
    tied: bool = True
    packing: str = "t2"
    table: str | None = None
    group: int = 128
    hadamard: int | None = None
    theta: float = 1e4
    yarn: Yarn | None = None
    context: int = 4096
    eos: tuple[int, ...] = ()
    container: str = "safetensors"
    shard_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Logical name -> tensor."""

    matrices: dict[str, Matrix]
    vectors: dict[str, np.ndarray]


def write(out: Path, spec: Tiny = Tiny(), files: dict[str, bytes] | None = None) -> Path:
    """A checkpoint folder of `spec`, with `files` (a tokenizer, say) in it."""
    return save(out, spec, weights(spec), files)


def save(out: Path, spec: Tiny, made: Weights, files: dict[str, bytes] | None = None) -> Path:
    """A checkpoint folder of these tensors."""
    with CheckpointWriter(out, container=spec.container, shard_bytes=spec.shard_bytes) as writer:
        for matrix in made.matrices.values():
            writer.matrix(matrix)
        for name, values in made.vectors.items():
            writer.vector(name, values)
        for name, data in (files or {}).items():
            writer.file(name, data)
        source = {"kind": "random", "files": []}
        writer.finish(architecture=spec.architecture, config=config(spec), source=source)
    return out


def config(spec: Tiny) -> dict:
    """The config.json of `spec`."""
    rope: dict = {"theta": spec.theta, "dims": spec.head_dim}
    if spec.yarn is not None:
        rope["yarn"] = {name: getattr(spec.yarn, name) for name in spec.yarn.__slots__}
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context", "tied")
    return {
        "architecture": spec.architecture,
        **{name: getattr(spec, name) for name in sizes},
        "norm_eps": 1e-6,
        "activation": "silu",
        "rope": rope,
        "eos": list(spec.eos),
    }


def weights(spec: Tiny) -> Weights:
    """Random tensors of every name that `spec` needs."""
    rng = Random(spec.seed)
    table = spec.table or spec.packing
    matrices = [_made(rng, spec, "embedding", spec.vocab, spec.hidden, table)]
    if not spec.tied:
        matrices.append(_made(rng, spec, "head", spec.vocab, spec.hidden, table))
    vectors = {"norm": _gain(rng, spec.hidden)}
    shapes = _shapes(spec)
    for i in range(spec.layers):
        for part in MATRICES:
            matrices.append(_made(rng, spec, f"layers.{i}.{part}", *shapes[part], spec.packing))
        vectors[f"layers.{i}.attn_norm"] = _gain(rng, spec.hidden)
        vectors[f"layers.{i}.ffn_norm"] = _gain(rng, spec.hidden)
        if spec.architecture == "qwen3":
            vectors[f"layers.{i}.attn.q_norm"] = _gain(rng, spec.head_dim)
            vectors[f"layers.{i}.attn.k_norm"] = _gain(rng, spec.head_dim)
    return Weights({m.name: m for m in matrices}, vectors)


def matrix(
    rng: Random,
    rows: int,
    columns: int,
    packing: str = "t2",
    group: int = 128,
    transform: SignedHadamard | None = None,
    name: str = "w",
) -> Matrix:
    """A random matrix whose rows have outputs of size about 1; scales vary and are never 1."""
    size = 1 / np.sqrt(columns)
    shape = (rows, columns)
    if packing in DENSE:
        values = (size * rng.standard_normal(shape)).astype(np.float32)
        return DenseMatrix(name, packing, shape, _narrow(values, packing), transform)
    if packing in affine.BITS:
        values = (size * rng.standard_normal(shape)).astype(np.float32)
        codes, scales, biases = affine.quantize(values, packing, group)
        return PackedMatrix(name, packing, shape, group, codes, scales, biases, transform)
    trits = rng.integers(-1, 2, shape) if packing != "b1" else 2 * rng.integers(0, 2, shape) - 1
    groups = ternary.padded(columns, group) // group
    scales = (size * (0.6 + rng.random((rows, groups)))).astype(np.float16)
    codes = ternary.pack(trits, packing, group)
    return PackedMatrix(name, packing, shape, group, codes, scales, None, transform)


def signs(rng: Random, block: int, width: int) -> SignedHadamard:
    """A random signed block transform of inputs of `width`."""
    return SignedHadamard(block, (2 * rng.integers(0, 2, width) - 1).astype(np.int8))


def _made(rng: Random, spec: Tiny, name: str, rows: int, columns: int, packing: str) -> Matrix:
    transform = None
    if spec.hadamard is not None and packing not in DENSE:
        transform = signs(Random(columns), spec.hadamard, columns)
    return matrix(rng, rows, columns, packing, spec.group, transform, name)


def _shapes(spec: Tiny) -> dict[str, tuple[int, int]]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, ffn = spec.hidden, spec.ffn
    shapes = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q))
    return dict(zip(MATRICES, (*shapes, (ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True))


def _gain(rng: Random, width: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)


def _narrow(values: np.ndarray, packing: str) -> np.ndarray:
    """float32 rounded to the dense packing (bf16: cut, as bits)."""
    if packing == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(DENSE[packing])
