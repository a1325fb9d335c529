"""Hybrids saved by transformers and by mlx-lm, converted and run here: their makers' logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from tolerances import F32_MODEL

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))

import hf_writer as hf

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.format import Checkpoint

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

IDS = np.random.default_rng(1).integers(0, 320, 100).tolist()
SIZES = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_section": [4, 2, 2], "mrope_interleaved": True,
}  # fmt: skip


def ours(folder: Path) -> np.ndarray:
    with Checkpoint.open(folder) as checkpoint:
        engine = BACKEND.load(checkpoint)
    with engine.session(128, 320) as session:
        session.prefill(IDS)
        return session.logits()


def randomized(torch, model):
    """Every parameter away from its default, norms too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.3 if parameter.ndim == 1 else 1 / np.sqrt(parameter.shape[-1])
            if not name.endswith("A_log"):
                parameter.add_(size * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_a_folder_saved_by_transformers(tmp_path: Path, tied: bool, images: bool) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    library = pytest.importorskip("transformers.models.qwen3_5", reason="needs Qwen3.5")
    sizes = {**SIZES, "rope_parameters": dict(ROPE), "tie_word_embeddings": tied}
    text = library.Qwen3_5TextConfig(**sizes)
    if images:
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        config = library.Qwen3_5Config(
            text_config=text.to_dict(),
            vision_config={**vision, "out_hidden_size": 128},
            tie_word_embeddings=tied,
        )
        model = randomized(torch, library.Qwen3_5ForConditionalGeneration(config))
    else:
        model = randomized(torch, library.Qwen3_5ForCausalLM(text))
    model.save_pretrained(tmp_path / "hf", max_shard_size="300KB")
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(hf.tokenizer()))
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.relative_error == 0
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0, -1].numpy()
    assert_allclose(ours(tmp_path / "out"), expected, **F32_MODEL)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_folder_saved_by_mlx_lm(tmp_path: Path, bits: int | None) -> None:
    mx = pytest.importorskip("mlx.core", reason="needs mlx")
    library = pytest.importorskip("mlx_lm.models.qwen3_5", reason="needs mlx-lm with Qwen3.5")
    nn, utils = pytest.importorskip("mlx.nn"), pytest.importorskip("mlx.utils")
    text = {"model_type": "qwen3_5_text", **SIZES, "rope_parameters": ROPE}
    text["full_attention_interval"] = 4
    args = {"model_type": "qwen3_5", "text_config": text}
    model = library.Model(library.ModelArgs.from_dict(args))
    rng = np.random.default_rng(0)
    parameters = {}
    for name, value in utils.tree_flatten(model.parameters()):
        size = 0.3 if value.ndim == 1 else 1 / np.sqrt(value.shape[1])
        noise = size * rng.standard_normal(value.shape)
        parameters[name] = mx.array((noise + (np.ones(1) if value.ndim == 1 else 0)).astype("<f4"))
    model.load_weights(list(parameters.items()))
    config = dict(args)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    tensors = {name: np.array(v) for name, v in utils.tree_flatten(model.parameters())}
    hf.write(tmp_path / "mlx", hf.Tiny(), tensors, config)
    convert(tmp_path / "mlx", tmp_path / "out")
    expected = np.array(model(mx.array([IDS]))[0, -1])
    # mlx-lm adds 1e-6 to the mean of squares of queries and keys, and not to their sum
    assert_allclose(ours(tmp_path / "out"), expected, rtol=0, atol=1e-3)
