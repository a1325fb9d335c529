"""BitNet saved by transformers, converted, and run on the reference backend: the same logits."""

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

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def saved(folder: Path, activation: str, tied: bool):
    """A random model as save_pretrained writes it, with norms that are not 1."""
    torch.manual_seed(0)
    config = transformers.BitNetConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        hidden_act=activation,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    made = transformers.BitNetForCausalLM(config).eval()
    with torch.no_grad():
        for name, values in made.named_parameters():
            if "norm" in name:
                values.uniform_(0.5, 1.5)
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(hf.tokenizer()))
    return made


def both(made, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits after 200 tokens: ours of the checkpoint in `folder`, and those of `made`."""
    ids = np.random.default_rng(1).integers(0, 320, 200).tolist()
    with torch.no_grad():
        expected = made(torch.tensor([ids])).logits[0, -1].numpy()
    with BACKEND.load(Checkpoint.open(folder)).session(512, 320) as session:
        session.prefill(ids)
        return session.logits(), expected


@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits(tmp_path, activation, tied):
    made = saved(tmp_path / "hf", activation, tied)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.relative_error == 0
    found, expected = both(made, tmp_path / "out")
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_master_weights_are_used_as_transformers_uses_them(tmp_path):
    """`online`: its own rounding is put into the float model, whose logits must be ours."""
    from transformers.integrations.bitnet import WeightQuant

    made = saved(tmp_path / "hf", "relu2", True)
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    path.write_text(json.dumps(config))
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert {t.packing for t in report.tensors if t.name.startswith("layers.0.ffn.")} == {
        "t2", "f32",
    }  # fmt: skip
    rounding = getattr(WeightQuant.forward, "__wrapped__", WeightQuant.forward)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if name.split(".")[-2] in LINEARS:
                values.copy_(rounding(None, values))
    found, expected = both(made, tmp_path / "out")
    assert np.abs(found - expected).max() < 3e-3 * np.abs(expected).max()  # fp16 scales
