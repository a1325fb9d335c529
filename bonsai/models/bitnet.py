"""BitNet b1.58: the shared decoder with a norm before each of the two output linears of a block.

The gate goes through a squared ReLU (BitNet-b1.58-2B-4T), or through SiLU in older models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bonsai.backends.ops import Array, Ops
from bonsai.config import Fields
from bonsai.errors import UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.models import decoder
from bonsai.models.decoder import Layer, Progress, Reader, Weights

__all__ = ["Config", "forward", "load", "read_config"]

RELU2, SILU = ACTIVATIONS = ("relu2", "silu")


@dataclass(frozen=True, slots=True)
class Config(decoder.Config):
    """`activation` of the gate: "relu2" or "silu"."""

    activation: str


@dataclass(frozen=True, slots=True)
class Block:
    """`attn_sub_norm` comes before `layer.out`, `ffn_sub_norm` before `layer.down`."""

    layer: Layer
    attn_sub_norm: Array
    ffn_sub_norm: Array


def forward(ops: Ops, cfg: Config, weights: Weights, tokens: Array, state: Any) -> Array:
    """Run tokens [T] after those in `state`; return hidden rows [T, hidden], ready for the head."""
    glu = ops.relu2_glu if cfg.activation == RELU2 else ops.swiglu
    x = ops.embed(weights.embedding, tokens)
    for i, block in enumerate(weights.layers):
        layer = block.layer
        h = ops.rms_norm(x, layer.attn_norm, cfg.norm_eps)
        h = decoder.attention(ops, cfg, layer, h, state, i)
        x = layer.out(ops.rms_norm(h, block.attn_sub_norm, cfg.norm_eps), residual=x)
        h = glu(layer.gate_up(ops.rms_norm(x, layer.ffn_norm, cfg.norm_eps)))
        x = layer.down(ops.rms_norm(h, block.ffn_sub_norm, cfg.norm_eps), residual=x)
    return ops.rms_norm(x, weights.norm, cfg.norm_eps)


def read_config(values: Mapping[str, Any]) -> Config:
    """The config of a checkpoint whose architecture is "bitnet"."""
    fields = Fields(values, "config.json")
    activation = fields.take(str, "activation")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: 'activation' is {activation!r}; supported: {', '.join(ACTIVATIONS)}"
        )
    sizes = decoder.read_sizes(fields, "bitnet")
    fields.finish()
    return Config(**sizes, qk_norm=False, activation=activation)


def load(
    checkpoint: Checkpoint, cfg: Config, ops: Ops, progress: Progress | None = None
) -> Weights:
    """The weights as `ops` keeps them; errors as those of `decoder.load`."""

    def load_block(reader: Reader, i: int) -> Block:
        name = f"layers.{i}"
        return Block(
            layer=decoder.load_layer(reader, cfg, name),
            attn_sub_norm=reader.vector(f"{name}.attn.sub_norm", cfg.heads * cfg.head_dim),
            ffn_sub_norm=reader.vector(f"{name}.ffn.sub_norm", cfg.ffn),
        )

    return decoder.load_blocks(checkpoint, cfg, ops, progress, load_block)
