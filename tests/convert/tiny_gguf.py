"""Tiny llama and qwen3 models as GGUF: metadata with a byte vocabulary, and random tensors."""

from __future__ import annotations

from typing import Any

import gguf_writer as gguf
import hf_writer as hf
import numpy as np

HF_TO_GGUF = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(hf_name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight"""
    if hf_name in HF_TO_GGUF:
        return HF_TO_GGUF[hf_name]
    _, _, layer, part = hf_name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[part]}.weight"


def metadata(spec: hf.Tiny, **changes: Any) -> dict[str, Any]:
    """Keys of a file; the architecture's keys are given without their prefix."""
    own = {
        "block_count": spec.layers,
        "context_length": 4096,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": spec.theta,
    }
    own.update(changes)
    words = list(hf.tokenizer()["model"]["vocab"])
    return {
        "general.architecture": spec.architecture,
        "general.name": "tiny",
        "general.file_type": 40,  # wrong on purpose: nothing may be decided from it
        **{f"{spec.architecture}.{k}": v for k, v in own.items() if v is not None},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (len(words) - 256),
        "tokenizer.ggml.merges": ["a b"][:0],
        "tokenizer.ggml.eos_token_id": 257,
    }


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama files have them: row 2 i + j of a head is our row i + j * half."""
    rows, columns = weight.shape
    half = rows // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            for j in range(2):
                out[start + 2 * i + j] = weight[start + i + j * half]
    return out.reshape(rows, columns)


def tensors(spec: hf.Tiny, weights: dict[str, np.ndarray], kind: str = "F32") -> dict:
    """GGUF tensors of HF weights; llama's q and k rows are interleaved."""
    found = {}
    for name, values in weights.items():
        if spec.architecture == "llama" and "q_proj" in name:
            values = interleaved(values, spec.heads)
        if spec.architecture == "llama" and "k_proj" in name:
            values = interleaved(values, spec.kv_heads)
        found[name_of(name)] = gguf.dense(values, kind if values.ndim == 2 else "F32")
    return found


def write(path, spec: hf.Tiny, parts: dict | None = None, **changes: Any):
    """A file of random float32 weights, or of `parts`."""
    parts = tensors(spec, hf.weights(spec)) if parts is None else parts
    return gguf.write(path, metadata(spec, **changes), parts)
