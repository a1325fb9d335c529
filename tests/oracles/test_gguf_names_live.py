"""Tiny GGUF files read by transformers and by us: the same weights under the same meaning."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))

import hf_writer as hf
import tiny_gguf

import bonsai.convert as convert
from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gguf", reason="transformers reads GGUF with the gguf package")

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.out": "self_attn.o_proj.weight",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
}


def name_in_transformers(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_same_weights(tmp_path, architecture):
    # transformers takes the rows of the table from the tokens, and 128 for the heads of qwen3.
    width = {"llama": 32, "qwen3": 128}[architecture]
    spec = hf.Tiny(architecture, heads=4, kv_heads=2, head_dim=width, vocab=300, tied=True)
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, **{"rope.dimension_count": width})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    theirs = {name: value.numpy() for name, value in model.state_dict().items()}
    convert(path, tmp_path / "out")
    ours = Checkpoint.open(tmp_path / "out")
    for name in ours.names():
        expected = theirs[name_in_transformers(name)]
        found = ours.vector(name) if expected.ndim == 1 else ours.matrix(name).rows()
        assert np.array_equal(found, expected), name
    assert model.config.rms_norm_eps == pytest.approx(ours.config["norm_eps"])
    assert model.config.rope_parameters["rope_theta"] == ours.config["rope"]["theta"]
