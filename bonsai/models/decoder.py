"""The dense decoder that several architectures share: config, tensors and forward, written once.

Knows which tensors there are, their shapes, and what is computed. Does not know positions, caches,
devices or number types; those are the business of `ops` and `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bonsai.backends.ops import Array, Linear, Ops
from bonsai.config import Fields, RopeSpec, StateSpec, read_rope
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.matrix import Matrix

__all__ = [
    "Config",
    "Layer",
    "Reader",
    "Sizes",
    "Weights",
    "forward",
    "load",
    "load_blocks",
    "load_layer",
    "read_config",
    "read_sizes",
]

Progress = Callable[[str, int, int], None]
CONVERT_AGAIN = "the tensors and config.json come from different models; convert it again"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every decoder has. `context` is the number of tokens it was made for.

    `tied`: the head is the embedding table. `eos`: ids that end a reply, as far as config.json
    knows them.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    context: int
    eos: tuple[int, ...]

    @property
    def state(self) -> StateSpec:
        """What a conversation remembers."""
        return StateSpec(self.layers, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Config(Sizes):
    """`qk_norm`: each query and key head is normalised before the rotation."""

    qk_norm: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Linears that read the same input are joined: qkv, and gate with up."""

    attn_norm: Array
    qkv: Linear
    q_norm: Array | None
    k_norm: Array | None
    out: Linear
    ffn_norm: Array
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that `forward` and the head read. `layers` is iterated, never indexed.

    `bytes_per_token` counts the weight bytes of the checkpoint that one decoded token reads.
    """

    embedding: Any
    layers: Sequence[Any]
    norm: Array
    head: Linear
    bytes_per_token: int


def forward(ops: Ops, cfg: Config, weights: Weights, tokens: Array, state: Any) -> Array:
    """Run tokens [T] after those in `state`; return hidden rows [T, hidden], ready for the head."""
    x = ops.embed(weights.embedding, tokens)
    for i, layer in enumerate(weights.layers):
        h = ops.rms_norm(x, layer.attn_norm, cfg.norm_eps)
        x = layer.out(attention(ops, cfg, layer, h, state, i), residual=x)
        h = ops.rms_norm(x, layer.ffn_norm, cfg.norm_eps)
        x = layer.down(ops.swiglu(layer.gate_up(h)), residual=x)
    return ops.rms_norm(x, weights.norm, cfg.norm_eps)


def attention(ops: Ops, cfg: Config, layer: Layer, x: Array, state: Any, i: int) -> Array:
    """Attention of block `i`: [T, hidden] -> [T, heads * head_dim], before the output linear."""
    T, kv = x.shape[0], cfg.kv_heads
    heads = layer.qkv(x).reshape(T, cfg.heads + 2 * kv, cfg.head_dim)
    q, k, v = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
    if cfg.qk_norm:
        q = ops.rms_norm(q, layer.q_norm, cfg.norm_eps)
        k = ops.rms_norm(k, layer.k_norm, cfg.norm_eps)
    q, k = ops.rope(q, state, cfg.rope), ops.rope(k, state, cfg.rope)
    return ops.attention(q, k, v, state, i).reshape(T, cfg.heads * cfg.head_dim)


def read_config(values: Mapping[str, Any], architecture: str, *, qk_norm: bool) -> Config:
    """The config from config.json. Raises UnsupportedModel naming the key that it cannot honour."""
    fields = Fields(values, "config.json")
    sizes = read_sizes(fields, architecture)
    fields.finish()
    return Config(**sizes, qk_norm=qk_norm)


def read_sizes(fields: Fields, architecture: str) -> dict[str, Any]:
    """The fields of `Sizes`; what else there is stays in `fields`."""
    fields.require("architecture", architecture)
    fields.require("activation", "silu")
    heads, kv_heads = fields.take_size("heads"), fields.take_size("kv_heads")
    if heads % kv_heads:
        raise UnsupportedModel(f"config.json: {heads} heads cannot share {kv_heads} kv_heads")
    head_dim, vocab = fields.take_size("head_dim"), fields.take_size("vocab")
    rope = fields.take_object("rope")
    if rope is None:
        raise UnsupportedModel("config.json: 'rope' is missing")
    norm_eps = fields.take(float, "norm_eps")
    if norm_eps <= 0:
        raise UnsupportedModel(f"config.json: 'norm_eps' is {norm_eps}, expected more than 0")
    return {
        "layers": fields.take_size("layers"),
        "hidden": fields.take_size("hidden"),
        "ffn": fields.take_size("ffn"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "norm_eps": norm_eps,
        "rope": read_rope(rope, head_dim),
        "tied": fields.take(bool, "tied"),
        "context": fields.take_size("context"),
        "eos": _read_eos(fields, vocab),
    }


def _read_eos(fields: Fields, vocab: int) -> tuple[int, ...]:
    ids = fields.take_any("eos", [])
    if not isinstance(ids, list):
        raise UnsupportedModel(f"config.json: 'eos' is {ids!r}, expected a list of token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise UnsupportedModel(f"config.json: 'eos' has {token!r}, expected ids below {vocab}")
    return tuple(ids)


def load(
    checkpoint: Checkpoint, cfg: Config, ops: Ops, progress: Progress | None = None
) -> Weights:
    """The weights as `ops` keeps them; progress counts blocks.

    Raises FormatError naming the tensor when one is missing, has another shape than the config
    says, or is read by nobody.
    """
    return load_blocks(
        checkpoint, cfg, ops, progress, lambda reader, i: load_layer(reader, cfg, f"layers.{i}")
    )


def load_blocks(
    checkpoint: Checkpoint,
    cfg: Sizes,
    ops: Ops,
    progress: Progress | None,
    load_block: Callable[[Reader, int], Any],
) -> Weights:
    """`load` for any decoder: `load_block(reader, i)` makes what `weights.layers` yields."""
    _check_head(checkpoint, cfg)
    reader = Reader(checkpoint, ops)
    table = reader.matrix("embedding", cfg.vocab, cfg.hidden)
    layers = []
    for i in range(cfg.layers):
        if progress is not None:
            progress("load", i, cfg.layers)
        layers.append(load_block(reader, i))
    head = table if cfg.tied else reader.matrix("head", cfg.vocab, cfg.hidden)
    weights = Weights(
        embedding=ops.table(table),
        layers=tuple(layers),
        norm=reader.vector("norm", cfg.hidden),
        head=ops.linear(head),
        bytes_per_token=reader.nbytes - (0 if cfg.tied else table.nbytes),
    )
    unused = checkpoint.unused()
    if unused:
        raise FormatError(
            f"{checkpoint.path}: {len(unused)} tensors that this model does not use: "
            f"{', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}",
            hint=CONVERT_AGAIN,
        )
    if progress is not None:
        progress("load", cfg.layers, cfg.layers)
    return weights


def _check_head(checkpoint: Checkpoint, cfg: Sizes) -> None:
    if cfg.tied == checkpoint.has("head"):
        state = "and there is a tensor 'head'" if cfg.tied else "but there is no tensor 'head'"
        raise FormatError(
            f'{checkpoint.path}: config.json says "tied": {str(cfg.tied).lower()}, {state}',
            hint=CONVERT_AGAIN,
        )


def load_layer(reader: Reader, cfg: Config, name: str) -> Layer:
    """The block whose tensors are named `name`.*, as `attention` and `forward` read it."""
    hidden, ffn = cfg.hidden, cfg.ffn
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    attn, feed = f"{name}.attn", f"{name}.ffn"
    return Layer(
        attn_norm=reader.vector(f"{name}.attn_norm", hidden),
        qkv=reader.linear(
            (f"{attn}.q", q_width, hidden),
            (f"{attn}.k", kv_width, hidden),
            (f"{attn}.v", kv_width, hidden),
        ),
        q_norm=reader.vector(f"{attn}.q_norm", cfg.head_dim) if cfg.qk_norm else None,
        k_norm=reader.vector(f"{attn}.k_norm", cfg.head_dim) if cfg.qk_norm else None,
        out=reader.linear((f"{attn}.out", hidden, q_width)),
        ffn_norm=reader.vector(f"{name}.ffn_norm", hidden),
        gate_up=reader.linear((f"{feed}.gate", ffn, hidden), (f"{feed}.up", ffn, hidden)),
        down=reader.linear((f"{feed}.down", hidden, ffn)),
    )


class Reader:
    """Takes tensors out of a checkpoint by name and shape, and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self.nbytes = 0

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        self._check(name, (rows, columns))
        matrix = self._checkpoint.matrix(name)
        self.nbytes += matrix.nbytes
        return matrix

    def vector(self, name: str, *shape: int) -> Array:
        self._check(name, shape)
        values = self._checkpoint.vector(name)
        self.nbytes += values.nbytes
        return self._ops.vector(values)

    def linear(self, *parts: tuple[str, int, int]) -> Linear:
        linear = self._ops.linear(*(self.matrix(*part) for part in parts))
        for name, _, _ in parts:
            self._checkpoint.release(name)  # a backend that keeps a copy need not hold both
        return linear

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        needed = " x ".join(map(str, shape))
        if not self._checkpoint.has(name):
            raise FormatError(
                f"{self._checkpoint.path}: no tensor '{name}', the config needs one of {needed}",
                hint=CONVERT_AGAIN,
            )
        found = tuple(self._checkpoint.entry(name).shape)
        if found != shape:
            raise FormatError(
                f"{self._checkpoint.path}: {name} is {' x '.join(map(str, found))}, "
                f"the config needs {needed}",
                hint=CONVERT_AGAIN,
            )
