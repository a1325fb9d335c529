"""Write tests/data/models_golden.npz: logits of tiny random models by `transformers` in float32.

    python tests/oracles/make_models_golden.py

The models are those of tests/golden_models.py, their weights dequantized by tests/dense.py. Needs
the `oracles` extra; takes a few seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parent.parent))

import dense
import golden_models
import hybrid
import tiny

from bonsai.format import Checkpoint

CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen35": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def logits(checkpoint: Checkpoint, tokens: list[int]) -> np.ndarray:
    """Logits [T, vocab] float32 after each token, by transformers."""
    with torch.no_grad():
        found: np.ndarray = network(checkpoint)(torch.tensor([tokens])).logits[0].numpy()
    return found


def network(checkpoint: Checkpoint) -> torch.nn.Module:
    """The model of transformers with the weights of the checkpoint."""
    config, model = CLASSES[checkpoint.architecture]
    if checkpoint.architecture == "qwen35":
        values, tensors = hybrid.hf_config(checkpoint.config), hybrid.hf_tensors(_all(checkpoint))
    else:
        values = _config(checkpoint.config)
        tensors = {_name(name): _values(checkpoint, name) for name in checkpoint.names()}
    made = model(config(**values, attn_implementation="eager")).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if checkpoint.config["tied"] else [])
    return made


def _config(ours: dict) -> dict:
    rope = {"rope_type": "default", "rope_theta": ours["rope"]["theta"]}
    longest = ours["context"]
    if "yarn" in ours["rope"]:
        yarn = ours["rope"]["yarn"]
        longest = int(yarn["factor"] * yarn["original_context"])
        rope |= {
            "rope_type": "yarn",  # attention_factor is left to transformers' own formula
            "factor": yarn["factor"],
            "original_max_position_embeddings": yarn["original_context"],
            "beta_fast": yarn["beta_fast"],
            "beta_slow": yarn["beta_slow"],
        }
    return {
        "vocab_size": ours["vocab"],
        "hidden_size": ours["hidden"],
        "intermediate_size": ours["ffn"],
        "num_hidden_layers": ours["layers"],
        "num_attention_heads": ours["heads"],
        "num_key_value_heads": ours["kv_heads"],
        "head_dim": ours["head_dim"],
        "rms_norm_eps": ours["norm_eps"],
        "tie_word_embeddings": ours["tied"],
        "max_position_embeddings": longest,
        "rope_parameters": rope,
    }


def _name(ours: str) -> str:
    whole = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    if ours in whole:
        return f"{whole[ours]}.weight"
    _, layer, part = ours.split(".", 2)
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def _values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    if len(checkpoint.entry(name).shape) == 1:
        return checkpoint.vector(name)
    return dense.dequantized(checkpoint.matrix(name)).astype(np.float32)


def _all(checkpoint: Checkpoint) -> tiny.Weights:
    """Every tensor; the taps of convolutions count as vectors."""
    names = checkpoint.names()
    vectors = [n for n in names if len(checkpoint.entry(n).shape) == 1 or n.endswith(".conv")]
    return tiny.Weights(
        {name: checkpoint.matrix(name) for name in names if name not in vectors},
        {name: checkpoint.vector(name) for name in vectors},
    )


def main() -> None:
    kept = {}
    for name, spec in golden_models.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            with Checkpoint.open(tiny.write(Path(folder) / "m", spec)) as checkpoint:
                found = logits(checkpoint, golden_models.tokens(name))
        kept[name] = found[golden_models.positions(name)]
        print(f"{name}: largest logit {np.abs(found).max():.3f}")
    np.savez_compressed(golden_models.PATH, **kept)


if __name__ == "__main__":
    main()
