"""The bridge to mlx-lm: its own text for identical weights, its caches, its server, over ours."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import hybrid
import numpy as np
import pytest
import tiny
import vocab
from numpy.testing import assert_allclose
from tiny import Gdn, Tiny
from tolerances import F16_MODEL, F32_MODEL

from bonsai.errors import InvalidRequest, UnsupportedModel

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

HYBRID = {"architecture": "qwen35", "dims": 16, "vocab": 300}
SPECS = {
    "qwen3": Tiny(vocab=300, group=64, ffn=192),
    "qwen3-untied-t5": Tiny(vocab=300, tied=False, packing="t5", table="q8", group=64),
    "llama": Tiny(architecture="llama", vocab=300, packing="b1", ffn=192),
    "llama-folded": Tiny(architecture="llama", vocab=300, hadamard=64, tied=False),
    "qwen35": Tiny(**HYBRID, layers=4, kinds=("delta", "delta", "delta", "attention")),
    "qwen35-folded": Tiny(**HYBRID, hadamard=64, gdn=Gdn(2, 4, 16, 16), tied=False),
}
IDS = tiny.Random(3).integers(0, 256, 40).tolist()
FILES = {
    "tokenizer.json": json.dumps(vocab.byte_level(["the", "moss"], ["<|im_end|>"])).encode(),
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": vocab.CHATML,
        }
    ).encode(),
}


@pytest.fixture
def bridge() -> Any:
    pytest.importorskip("mlx.core", reason="needs MLX")
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    from bonsai.integrations import mlx_lm

    return mlx_lm


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / name
        return path if path.exists() else tiny.write(path, SPECS[name], FILES)

    return make


def own(spec: Tiny) -> Any:
    """mlx-lm's own model, with plain linears of the same weights in float32."""
    import importlib

    import mlx.core as mx

    made = tiny.weights(spec)
    if spec.architecture == "qwen35":
        module = importlib.import_module("mlx_lm.models.qwen3_5")
        config = {**hybrid.config(spec), "model_type": "qwen3_5"}
        config["full_attention_interval"] = spec.layers
        model = module.Model(module.ModelArgs.from_dict(config))
        named = model.sanitize({k: mx.array(v) for k, v in hybrid.sanitized(spec, made).items()})
    else:
        module = importlib.import_module(f"mlx_lm.models.{spec.architecture}")
        model = module.Model(module.ModelArgs.from_dict(_config(spec)))
        named = {
            hybrid.hf_name(n): mx.array(dense.dequantized(m)) for n, m in made.matrices.items()
        }
        named |= {hybrid.hf_name(n): mx.array(v) for n, v in made.vectors.items()}
    named = {k: v.astype(mx.float32) for k, v in named.items()}
    model.load_weights(list(named.items()))
    return model


def _config(spec: Tiny) -> dict[str, Any]:
    return {
        "model_type": spec.architecture, "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers, "intermediate_size": spec.ffn,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "rms_norm_eps": 1e-6, "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context, "rope_theta": spec.theta,
        "tie_word_embeddings": spec.tied,
    }  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_text_and_logits_are_those_of_mlx_lm_itself(bridge, folder, name: str) -> None:
    import mlx.core as mx
    import mlx_lm

    model, tokenizer = bridge.load(folder(name))
    expected = own(SPECS[name])
    ids = mx.array([IDS])
    found, wanted = (np.array(m(ids)) for m in (model, expected))
    assert np.abs(wanted).max() > 0.5
    assert_allclose(found, wanted, **F32_MODEL)
    texts = [mlx_lm.generate(m, tokenizer, prompt=IDS, max_tokens=30) for m in (model, expected)]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("name", ["qwen3", "qwen35-folded"])
def test_the_backend_and_the_bridge_agree(bridge, folder, name: str) -> None:
    import mlx.core as mx

    import bonsai

    model, _ = bridge.load(folder(name))
    found = np.array(model(mx.array([IDS])))[0, -1]
    with bonsai.load(folder(name), backend="mlx") as ours, ours.session() as session:
        session.prefill(IDS)
        logits = session.logits()
    kept = np.isfinite(logits)  # ids that the tokenizer lacks are masked in ours
    assert kept.sum() > 250
    assert_allclose(found[kept], logits[kept], **F32_MODEL)


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_prompt_caches_are_saved_loaded_and_continued(
    bridge, folder, tmp_path: Path, name: str
) -> None:
    import mlx_lm
    from mlx_lm.models import cache

    model, tokenizer = bridge.load(folder(name))
    whole = mlx_lm.generate(model, tokenizer, prompt=IDS, max_tokens=12)
    kept = cache.make_prompt_cache(model)
    for _ in mlx_lm.stream_generate(model, tokenizer, IDS[:30], max_tokens=1, prompt_cache=kept):
        pass
    if name == "qwen3":  # a recurrent memory cannot be cut; it keeps the id that was generated
        cache.trim_prompt_cache(kept, kept[0].offset - 30)
        cache.save_prompt_cache(str(tmp_path / "c.safetensors"), kept)
        kept = cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
        rest = mlx_lm.generate(model, tokenizer, prompt=IDS[30:], max_tokens=12, prompt_cache=kept)
        assert rest == whole
    else:
        cache.save_prompt_cache(str(tmp_path / "c.safetensors"), kept)
        again = cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
        texts = [
            mlx_lm.generate(model, tokenizer, prompt=[5, 6], max_tokens=8, prompt_cache=c)
            for c in (kept, again)
        ]
        assert texts[0] == texts[1]


def test_its_server_answers_with_our_weights(bridge, folder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bonsai.integrations.mlx_lm", "server"]
    command += ["--model", str(folder("qwen3")), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            answer = _ask(port, {"prompt": "the moss", "max_tokens": 8, "temperature": 0}, server)
        finally:
            server.terminate()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"]


def _ask(port: int, asked: dict[str, Any], server: subprocess.Popen) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    for _ in range(150):
        assert server.poll() is None, server.stderr.read().decode()
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError:
            raise
        except OSError:  # not yet there
            time.sleep(0.2)
    raise AssertionError("the server did not start")


def test_half_precision_is_an_option(bridge, folder) -> None:
    import mlx.core as mx

    model, _ = bridge.load(folder("qwen3"), dtype="float16")
    y = model(mx.array([IDS]))
    assert y.dtype == mx.float16
    expected = np.array(own(SPECS["qwen3"])(mx.array([IDS])))
    assert_allclose(np.array(y.astype(mx.float32)), expected, **F16_MODEL)
    with pytest.raises(InvalidRequest, match="int8"):
        bridge.load(folder("qwen3"), dtype="int8")


def test_models_that_mlx_lm_cannot_run_are_refused(bridge, tmp_path: Path) -> None:
    spec = Tiny(**HYBRID, layers=3, kinds=("delta", "attention", "attention"))
    with pytest.raises(UnsupportedModel, match="every n blocks"):
        bridge.load(tiny.write(tmp_path / "m", spec, FILES))


def test_other_models_go_to_mlx_lm(bridge, tmp_path: Path) -> None:
    asked = []
    load = bridge._either(lambda *args, **more: asked.append((args, more)) or "theirs")
    (tmp_path / "config.json").write_text("{}")
    assert load(str(tmp_path), return_config=True) == "theirs"
    assert load("somebody/else") == "theirs"
    assert asked == [((str(tmp_path),), {"return_config": True}), (("somebody/else",), {})]
