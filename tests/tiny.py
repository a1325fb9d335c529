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
DELTA = ("gdn.qkv", "gdn.z", "gdn.a", "gdn.b", "gdn.out", *MATRICES[4:])


@dataclass(frozen=True, slots=True)
class Gdn:
    """Sizes of the gated delta nets of a "qwen35"."""

    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 16
    value_dim: int = 32
    taps: int = 4


@dataclass(frozen=True, slots=True)
class Tiny:
    """What to make. `table` is the packing of embedding and head; None is that of the rest.

    `hadamard` is a block size: the input of every matrix but the dense ones is transformed.
    `dims` are the rotated ones of each head, None for all. `kinds` and `gdn` are for "qwen35".
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
    dims: int | None = None
    kinds: tuple[str, ...] = ("delta", "attention")
    gdn: Gdn = Gdn()


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
    rope: dict = {"theta": spec.theta, "dims": spec.dims or spec.head_dim}
    if spec.yarn is not None:
        rope["yarn"] = {name: getattr(spec.yarn, name) for name in spec.yarn.__slots__}
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context", "tied")
    values = {
        "architecture": spec.architecture,
        **{name: getattr(spec, name) for name in sizes},
        "norm_eps": 1e-6,
        "activation": "silu",
        "rope": rope,
        "eos": list(spec.eos),
    }
    if spec.architecture == "qwen35":
        gdn = {name: getattr(spec.gdn, name) for name in spec.gdn.__slots__}
        values |= {"output_gate": "sigmoid", "kinds": list(spec.kinds), "gdn": gdn}
    return values


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
        delta = spec.architecture == "qwen35" and spec.kinds[i] == "delta"
        for part in DELTA if delta else MATRICES:
            packing = "f32" if part in ("gdn.a", "gdn.b") else spec.packing
            matrices.append(_made(rng, spec, f"layers.{i}.{part}", *shapes[part], packing))
        vectors[f"layers.{i}.attn_norm"] = _gain(rng, spec.hidden)
        vectors[f"layers.{i}.ffn_norm"] = _gain(rng, spec.hidden)
        if delta:
            vectors |= {f"layers.{i}.gdn.{k}": v for k, v in _delta_vectors(rng, spec.gdn).items()}
        elif spec.architecture in ("qwen3", "qwen35"):
            vectors[f"layers.{i}.attn.q_norm"] = _gain(rng, spec.head_dim)
            vectors[f"layers.{i}.attn.k_norm"] = _gain(rng, spec.head_dim)
    return Weights({m.name: m for m in matrices}, vectors)


def _delta_vectors(rng: Random, gdn: Gdn) -> dict[str, np.ndarray]:
    """Taps of size 1/2; decays between about 0.5 and 0.99 a token."""
    channels = 2 * gdn.key_heads * gdn.key_dim + gdn.value_heads * gdn.value_dim
    found = {
        "conv": 0.5 * rng.standard_normal((channels, gdn.taps)),
        "a_log": 3 * rng.random(gdn.value_heads) - 3,
        "dt_bias": rng.random(gdn.value_heads) - 1,
        "norm": _gain(rng, gdn.value_dim),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


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
    hidden, ffn, gdn = spec.hidden, spec.ffn, spec.gdn
    values = gdn.value_heads * gdn.value_dim
    gated = 2 * q if spec.architecture == "qwen35" else q
    return {
        "attn.q": (gated, hidden),
        "attn.k": (kv, hidden),
        "attn.v": (kv, hidden),
        "attn.out": (hidden, q),
        "gdn.qkv": (2 * gdn.key_heads * gdn.key_dim + values, hidden),
        "gdn.z": (values, hidden),
        "gdn.a": (gdn.value_heads, hidden),
        "gdn.b": (gdn.value_heads, hidden),
        "gdn.out": (hidden, values),
        "ffn.gate": (ffn, hidden),
        "ffn.up": (ffn, hidden),
        "ffn.down": (hidden, ffn),
    }


def _gain(rng: Random, width: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)


def _narrow(values: np.ndarray, packing: str) -> np.ndarray:
    """float32 rounded to the dense packing (bf16: cut, as bits)."""
    if packing == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(DENSE[packing])
