"""Tiny "qwen35" models as GGUF: heads tiled, decays negated, matrices folded where asked."""

from __future__ import annotations

from typing import Any

import gguf_writer as gguf
import numpy as np
import tiny
import tiny_gguf
from tiny import Gdn, Tiny

from bonsai import ternary
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix

SPEC = Tiny(
    architecture="qwen35", layers=4, hidden=128, ffn=256, heads=2, head_dim=64, dims=16, vocab=320,
    tied=False, packing="f32", kinds=("delta", "delta", "delta", "attention"),
    gdn=Gdn(2, 6, 32, 128),
)  # fmt: skip
NAMES = {
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "post_attention_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.out": "attn_output.weight",
    "attn.q_norm": "attn_q_norm.weight",
    "attn.k_norm": "attn_k_norm.weight",
    "gdn.qkv": "attn_qkv.weight",
    "gdn.z": "attn_gate.weight",
    "gdn.a": "ssm_alpha.weight",
    "gdn.b": "ssm_beta.weight",
    "gdn.conv": "ssm_conv1d.weight",
    "gdn.a_log": "ssm_a",
    "gdn.dt_bias": "ssm_dt.bias",
    "gdn.norm": "ssm_norm.weight",
    "gdn.out": "ssm_out.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
}
ENDS = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
UNFOLDED = ("gdn.a", "gdn.b")


def name_of(ours: str) -> str:
    if ours in ENDS:
        return ENDS[ours]
    _, layer, part = ours.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}"


def metadata(spec: Tiny, **changes: Any) -> dict[str, Any]:
    """The keys of a file; those of the architecture are given without their prefix."""
    gdn = spec.gdn
    own = {
        "rope.dimension_count": spec.dims,
        "rope.dimension_sections": [spec.dims // 2 - 4, 2, 2, 0],
        "ssm.conv_kernel": gdn.taps,
        "ssm.state_size": gdn.key_dim,
        "ssm.group_count": gdn.key_heads,
        "ssm.time_step_rank": gdn.value_heads,
        "ssm.inner_size": gdn.value_heads * gdn.value_dim,
        "full_attention_interval": 4,
    }
    return tiny_gguf.metadata(spec, **{**own, **changes})


def tensors(spec: Tiny, made: tiny.Weights, columns: bool = True) -> dict[str, gguf.Tensor]:
    """The tensors of a file; `columns`: those of gdn.out are tiled too."""
    found = {}
    for name, matrix in made.matrices.items():
        part = name.split(".", 2)[-1]
        rows = tiled_rows(part, spec.gdn, matrix.shape[0])
        order = None
        if part == "gdn.out" and columns:
            order = tiled(spec.gdn, spec.gdn.value_dim)
        found[name_of(name)] = encoded(matrix, rows, order)
    for name, values in made.vectors.items():
        part = name.split(".", 2)[-1]
        rows = tiled_rows(part, spec.gdn, len(values))
        values = values if rows is None else values[rows]
        found[name_of(name)] = gguf.dense(-np.exp(values) if part == "gdn.a_log" else values)
    return found


def tiled(gdn: Gdn, width: int) -> list[int]:
    """Which of our rows each row of a tiled tensor is: head r * key_heads + g is our s * g + r."""
    share = gdn.value_heads // gdn.key_heads
    return [
        (g * share + r) * width + w
        for r in range(share)
        for g in range(gdn.key_heads)
        for w in range(width)
    ]


def tiled_rows(part: str, gdn: Gdn, count: int) -> list[int] | None:
    keys = 2 * gdn.key_heads * gdn.key_dim
    if part in ("gdn.qkv", "gdn.conv"):
        return [*range(keys), *(keys + row for row in tiled(gdn, gdn.value_dim))]
    if part == "gdn.z":
        return tiled(gdn, gdn.value_dim)
    return tiled(gdn, 1) if part in ("gdn.a", "gdn.b", "gdn.a_log", "gdn.dt_bias") else None


def encoded(matrix: Matrix, rows: list[int] | None, columns: list[int] | None) -> gguf.Tensor:
    """Plain float32, or PQ2_0 of a ternary matrix."""
    rows = list(range(matrix.shape[0])) if rows is None else rows
    columns = list(range(matrix.shape[1])) if columns is None else columns
    if isinstance(matrix, DenseMatrix):
        return gguf.dense(matrix.rows()[rows][:, columns])
    assert isinstance(matrix, PackedMatrix)
    trits = ternary.unpack(matrix.codes, matrix.packing, matrix.group, matrix.shape[1])
    scales = np.repeat(matrix.scales, matrix.group, axis=1)[rows][:, columns]
    return gguf.ternary(trits[rows][:, columns], scales[:, :: matrix.group], matrix.group)


def folded(made: tiny.Weights, block: int) -> tuple[tiny.Weights, dict[int, np.ndarray]]:
    """Every matrix but the gates as W diag(s) H, float32, and the signs of each width."""
    signs: dict[int, np.ndarray] = {}
    matrices = {}
    for name, matrix in made.matrices.items():
        if name.endswith(UNFOLDED):
            matrices[name] = matrix
            continue
        width = matrix.shape[1]
        transform = tiny.signs(tiny.Random(width), block, width)
        signs[width] = transform.signs
        values = transform.forward(matrix.rows().astype(np.float64)).astype(np.float32)
        matrices[name] = DenseMatrix(name, "f32", matrix.shape, values)
    return tiny.Weights(matrices, made.vectors), signs


def fold_keys(made: tiny.Weights, signs: dict[int, np.ndarray], block: int) -> dict[str, Any]:
    """The prism.hadamard.* keys of a model that `folded` made."""
    names = [name_of(n) for n in made.matrices if n != "embedding" and not n.endswith(UNFOLDED)]
    keys = {
        "version": 1,
        "block_size": block,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": sorted(signs),
        "sign_values": [int(s) for width in sorted(signs) for s in signs[width]],
        "weight_names": names,
        "inverse_weight_names": [ENDS["embedding"]],
        "gdn_v_grouped": True,
    }
    return {f"prism.hadamard.{key}": value for key, value in keys.items()}
