"""Qwen3.5 (and 3.6, 3.8), text: blocks of gated delta nets with gated attention between them.

Knows the tensors of both kinds of block and what is computed. Does not know positions, caches,
convolution tails or recurrent memories; those are the business of `ops` and `state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bonsai.backends.ops import Array, Linear, Ops
from bonsai.config import DeltaSpec, Fields, StateSpec
from bonsai.errors import UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.models import decoder
from bonsai.models.decoder import Progress, Reader, Sizes, Weights

__all__ = ["Config", "forward", "load", "read_config"]

DELTA, ATTENTION = KINDS = ("delta", "attention")


@dataclass(frozen=True, slots=True)
class Config(Sizes):
    """`kinds`: the mixer of each block, "delta" or "attention". `gdn`: sizes of the delta nets."""

    kinds: tuple[str, ...]
    gdn: Delta

    @property
    def state(self) -> StateSpec:
        """What a conversation remembers: keys and values of the attention blocks only."""
        deltas = self.kinds.count(DELTA)
        g = self.gdn
        memory = DeltaSpec(deltas, g.channels, g.taps, g.value_heads, g.key_dim, g.value_dim)
        kv_layers = self.layers - deltas
        return StateSpec(kv_layers, self.kv_heads, self.head_dim, memory if deltas else None)


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of a gated delta net: value head j reads key head j // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values, of the gate z and of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what the convolution runs over: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class Attention:
    """`slot` counts the blocks of this kind. The rows of `qkv` are, for each query head, its query
    and its gate; then the keys; then the values."""

    slot: int
    qkv: Linear
    q_norm: Array
    k_norm: Array


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """`slot` counts the blocks of this kind. `q_gain` and `k_gain` make rms_norm the L2 norm."""

    slot: int
    qkv_z: Linear
    ab: Linear
    taps: Array
    a_log: Array
    dt_bias: Array
    q_gain: Array
    k_gain: Array
    norm: Array


@dataclass(frozen=True, slots=True)
class Block:
    """A mixer of either kind, then a feed-forward net."""

    attn_norm: Array
    mixer: Attention | DeltaNet
    out: Linear
    ffn_norm: Array
    gate_up: Linear
    down: Linear


def forward(ops: Ops, cfg: Config, weights: Weights, tokens: Array, state: Any) -> Array:
    """Run tokens [T] after those in `state`; return hidden rows [T, hidden], ready for the head."""
    x = ops.embed(weights.embedding, tokens)
    for block in weights.layers:
        mixer = block.mixer
        mix = attention if isinstance(mixer, Attention) else delta_net
        h = ops.rms_norm(x, block.attn_norm, cfg.norm_eps)
        x = block.out(mix(ops, cfg, mixer, h, state), residual=x)
        h = ops.rms_norm(x, block.ffn_norm, cfg.norm_eps)
        x = block.down(ops.swiglu(block.gate_up(h)), residual=x)
    return ops.rms_norm(x, weights.norm, cfg.norm_eps)


def attention(ops: Ops, cfg: Config, mixer: Attention, x: Array, state: Any) -> Array:
    """Attention whose output is gated: [T, hidden] -> [T, heads * head_dim]."""
    T, H, kv = x.shape[0], cfg.heads, cfg.kv_heads
    heads = mixer.qkv(x).reshape(T, 2 * H + 2 * kv, cfg.head_dim)
    q, gate = heads[:, 0 : 2 * H : 2], heads[:, 1 : 2 * H : 2]
    k, v = heads[:, 2 * H : -kv], heads[:, -kv:]
    q = ops.rope(ops.rms_norm(q, mixer.q_norm, cfg.norm_eps), state, cfg.rope)
    k = ops.rope(ops.rms_norm(k, mixer.k_norm, cfg.norm_eps), state, cfg.rope)
    y = ops.attention(q, k, v, state, mixer.slot).reshape(T, H * cfg.head_dim)
    return ops.sigmoid_gate(y, gate.reshape(T, H * cfg.head_dim))


def delta_net(ops: Ops, cfg: Config, mixer: DeltaNet, x: Array, state: Any) -> Array:
    """A gated delta net: [T, hidden] -> [T, value_heads * value_dim]."""
    T, g = x.shape[0], cfg.gdn
    joined, ab = mixer.qkv_z(x), mixer.ab(x)
    z = joined[:, g.channels :].reshape(T, g.value_heads, g.value_dim)
    mixed = ops.causal_conv_silu(joined[:, : g.channels], mixer.taps, state, mixer.slot)
    q = mixed[:, : g.keys].reshape(T, g.key_heads, g.key_dim)
    k = mixed[:, g.keys : 2 * g.keys].reshape(T, g.key_heads, g.key_dim)
    v = mixed[:, 2 * g.keys :].reshape(T, g.value_heads, g.value_dim)
    q = ops.rms_norm(q, mixer.q_gain, UNIT_EPS / g.key_dim)
    k = ops.rms_norm(k, mixer.k_gain, UNIT_EPS / g.key_dim)
    a, b = ab[:, : g.value_heads], ab[:, g.value_heads :]
    decay, beta = ops.gated_delta_gates(a, b, mixer.a_log, mixer.dt_bias)
    y = ops.gated_delta_rule(q, k, v, decay, beta, state, mixer.slot)
    return ops.gated_rms_norm(y, z, mixer.norm, cfg.norm_eps).reshape(T, g.values)


UNIT_EPS = 1e-6
"""x / sqrt(sum(x^2) + 1e-6) for queries and keys, whatever `norm_eps` is: x * gain /
sqrt(mean(x^2) + 1e-6 / D) with gain = D^-1/2. Queries are also multiplied by D^-1/2."""


def read_config(values: Mapping[str, Any]) -> Config:
    """The config of a checkpoint whose architecture is "qwen35"."""
    fields = Fields(values, "config.json")
    sizes = decoder.read_sizes(fields, "qwen35")
    fields.require("output_gate", "sigmoid")
    kinds, gdn = _read_kinds(fields, sizes["layers"]), _read_delta(fields)
    fields.finish()
    return Config(**sizes, kinds=kinds, gdn=gdn)


def _read_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    kinds = fields.take_any("kinds")
    if not isinstance(kinds, list) or len(kinds) != layers:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise UnsupportedModel(
            f"config.json: 'kinds' is {found:.60}, expected a list of one kind for each of "
            f"{layers} layers"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedModel(
                f"config.json: 'kinds' has {kind!r:.60}; supported: {', '.join(KINDS)}"
            )
    return tuple(kinds)


def _read_delta(fields: Fields) -> Delta:
    inner = fields.take_object("gdn")
    if inner is None:
        raise UnsupportedModel("config.json: 'gdn' is missing")
    gdn = Delta(
        key_heads=inner.take_size("key_heads"),
        value_heads=inner.take_size("value_heads"),
        key_dim=inner.take_size("key_dim"),
        value_dim=inner.take_size("value_dim"),
        taps=inner.take_size("taps", 65),
    )
    inner.finish()
    if gdn.value_heads % gdn.key_heads:
        raise UnsupportedModel(
            f"{inner.where}: {gdn.value_heads} value_heads cannot share {gdn.key_heads} key_heads"
        )
    return gdn


def load(
    checkpoint: Checkpoint, cfg: Config, ops: Ops, progress: Progress | None = None
) -> Weights:
    """The weights as `ops` keeps them; errors as in `decoder.load`."""
    return decoder.load_blocks(
        checkpoint, cfg, ops, progress, lambda reader, i: _load_block(reader, cfg, ops, i)
    )


def _load_block(reader: Reader, cfg: Config, ops: Ops, i: int) -> Block:
    hidden, ffn, kind = cfg.hidden, cfg.ffn, cfg.kinds[i]
    slot = cfg.kinds[:i].count(kind)
    name, feed = f"layers.{i}", f"layers.{i}.ffn"
    mixer: Attention | DeltaNet
    if kind == ATTENTION:
        mixer = _load_attention(reader, cfg, f"{name}.attn", slot)
        out = (f"{name}.attn.out", hidden, cfg.heads * cfg.head_dim)
    else:
        mixer = _load_delta(reader, cfg, ops, f"{name}.gdn", slot)
        out = (f"{name}.gdn.out", hidden, cfg.gdn.values)
    return Block(
        attn_norm=reader.vector(f"{name}.attn_norm", hidden),
        mixer=mixer,
        out=reader.linear(out),
        ffn_norm=reader.vector(f"{name}.ffn_norm", hidden),
        gate_up=reader.linear((f"{feed}.gate", ffn, hidden), (f"{feed}.up", ffn, hidden)),
        down=reader.linear((f"{feed}.down", hidden, ffn)),
    )


def _load_attention(reader: Reader, cfg: Config, name: str, slot: int) -> Attention:
    width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    return Attention(
        slot=slot,
        qkv=reader.linear(
            (f"{name}.q", 2 * width, cfg.hidden),
            (f"{name}.k", kv_width, cfg.hidden),
            (f"{name}.v", kv_width, cfg.hidden),
        ),
        q_norm=reader.vector(f"{name}.q_norm", cfg.head_dim),
        k_norm=reader.vector(f"{name}.k_norm", cfg.head_dim),
    )


def _load_delta(reader: Reader, cfg: Config, ops: Ops, name: str, slot: int) -> DeltaNet:
    gdn, hidden = cfg.gdn, cfg.hidden
    unit = np.full(gdn.key_dim, gdn.key_dim**-0.5, np.float32)
    return DeltaNet(
        slot=slot,
        qkv_z=reader.linear(
            (f"{name}.qkv", gdn.channels, hidden), (f"{name}.z", gdn.values, hidden)
        ),
        ab=reader.linear(
            (f"{name}.a", gdn.value_heads, hidden), (f"{name}.b", gdn.value_heads, hidden)
        ),
        taps=reader.vector(f"{name}.conv", gdn.channels, gdn.taps),
        a_log=reader.vector(f"{name}.a_log", gdn.value_heads),
        dt_bias=reader.vector(f"{name}.dt_bias", gdn.value_heads),
        q_gain=ops.vector(unit * np.float32(gdn.key_dim**-0.5)),
        k_gain=ops.vector(unit),
        norm=reader.vector(f"{name}.norm", gdn.value_dim),
    )
