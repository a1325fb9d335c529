"""Models saved by transformers, converted, and run on the reference backend: the same logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))

import hf_writer as hf

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "yarn": {**YARN, "rope_theta": 1e6},
    "yarn with options": {**YARN, "rope_theta": 1e5, "beta_fast": 16.0, "attention_factor": 1.3},
}


def saved(folder: Path, architecture: str, rope: str, tied: bool):
    """A random model as save_pretrained writes it, in two shards, with a tokenizer.json."""
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config, model = kinds[architecture]
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters=dict(ROPES[rope]),
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    ).eval()
    made.save_pretrained(folder, max_shard_size="300KB")
    (folder / "tokenizer.json").write_text(json.dumps(hf.tokenizer()))
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_at_position_500(tmp_path, architecture, rope, tied):
    made = saved(tmp_path / "hf", architecture, rope, tied)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.relative_error == 0
    ids = np.random.default_rng(1).integers(0, 320, 500).tolist()
    with torch.no_grad():
        expected = made(torch.tensor([ids])).logits[0, -1].numpy()
    engine = BACKEND.load(Checkpoint.open(tmp_path / "out"))
    with engine.session(512, 320) as session:
        session.prefill(ids)
        found = session.logits()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.filterwarnings("ignore")
def test_losing_theta_would_be_seen(tmp_path):
    """The negative control: with the default theta the logits are far off."""
    made = saved(tmp_path / "hf", "llama", "default", True)
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 1e4
    path.write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "out")
    ids = np.random.default_rng(1).integers(0, 320, 500).tolist()
    with torch.no_grad():
        expected = made(torch.tensor([ids])).logits[0, -1].numpy()
    with BACKEND.load(Checkpoint.open(tmp_path / "out")).session(512, 320) as session:
        session.prefill(ids)
        assert np.abs(session.logits() - expected).max() > 1e-2 * np.abs(expected).max()
