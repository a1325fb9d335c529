"""config.json of Hugging Face folders: every key is understood, harmless by name, or refused."""

from __future__ import annotations

import contextlib
import math

import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.convert.config_hf import read_hf_config
from bonsai.errors import BonsaiError, ConversionError, FormatError, UnsupportedModel
from bonsai.format import Checkpoint


def read(**changes):
    """(our config, quantization, warnings)."""
    spec = hf.Tiny(changes.pop("architecture", "llama"))
    return read_hf_config(hf.config(spec, **changes), "config.json")[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": None, "rope_scaling": {"rope_theta": 1000000, "type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "type": "default"}},
    ],
)
def test_theta_is_found_at_the_top_and_nested(changes):
    config, _, warnings = read(**changes)
    assert config["rope"] == {"theta": 1e6, "dims": 64}
    assert warnings == []


def test_missing_theta_is_a_default_that_is_said():
    config, _, warnings = read(rope_theta=None)
    assert config["rope"]["theta"] == 10000
    assert warnings == ["config.json: rope_theta is missing: 10000, the default, is used"]


def test_two_thetas_that_differ_are_refused():
    with pytest.raises(
        UnsupportedModel, match=r"rope_theta is given twice, as 10000.0 and 1000000.0"
    ):
        read(rope_theta=1e6, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})


def test_yarn_is_read_in_both_spellings():
    new = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    usual = 0.1 * math.log(4) + 1
    for changes in (
        {"rope_scaling": new},
        {"rope_scaling": old},
        {"rope_theta": None, "rope_parameters": {**new, "rope_theta": 1e6}},
    ):
        config, _, warnings = read(**changes)
        assert config["rope"]["yarn"] == {
            "factor": 4.0,
            "original_context": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": usual,
        }
        assert warnings == []


def test_yarn_options_are_kept():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    scaling |= {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25}
    config, _, warnings = read(rope_scaling=scaling)
    yarn = config["rope"]["yarn"]
    assert (yarn["beta_fast"], yarn["beta_slow"], yarn["attention_factor"]) == (16, 2, 1.25)
    assert "factor is 2, and 4096 / 1024 positions is 4" in warnings[0]


REFUSED = {
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "relu2"},
    "sliding_window": {"sliding_window": 512, "use_sliding_window": True},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "architectures": {"architectures": ["LlamaForSequenceClassification"]},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "truncate": {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "rope_interleaved": {"rope_interleaved": True},
    "embedding_multiplier": {"embedding_multiplier": 12.0},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "KV heads": {"num_key_value_heads": 0},
    "num_hidden_layers": {"num_hidden_layers": 10**9},
    "hidden_size": {"hidden_size": -128},
    "vocab_size": {"vocab_size": "320"},
    "rms_norm_eps": {"rms_norm_eps": True},
    "eos_token_id": {"eos_token_id": [1.5]},
    "rope_parameters": {"rope_scaling": "yarn"},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_the_maths_is_refused_by_name(key):
    named = "KV heads" if key == "num_key_value_heads" else key
    with pytest.raises(UnsupportedModel, match=named):
        read(**REFUSED[key])


def test_a_window_that_is_switched_off_is_fine():
    read(architecture="qwen3", sliding_window=4096, use_sliding_window=False)
    read(architecture="qwen3", sliding_window=4096)
    with pytest.raises(UnsupportedModel, match="sliding_window is 4096"):
        read(architecture="llama", sliding_window=4096)


def test_unknown_model_type_lists_the_supported_ones_and_a_repair_helps(tmp_path):
    folder = hf.write(tmp_path / "hf", values=hf.config(model_type="qwen9"))
    (folder / "model.safetensors").write_bytes(b"never looked at")
    with pytest.raises(
        UnsupportedModel, match="'qwen9' is not supported; supported: bitnet, llama, qwen3"
    ):
        convert(folder, tmp_path / "out")
    hf.write(folder)
    convert(folder, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").architecture == "llama"


@pytest.mark.parametrize("bits", [7, 9, 0, -1, "2", None, 2.0, True])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_unsupported_bits_are_refused_before_weights_are_read(tmp_path, key, bits):
    values = hf.config(**{key: {"group_size": 64, "bits": bits}})
    folder = hf.write(tmp_path / "hf", values=values)
    (folder / "model.safetensors").write_bytes(b"never looked at")
    with pytest.raises(
        UnsupportedModel, match=rf"bits is {bits!r}; supported: 1, 2, 3, 4, 5, 6, 8"
    ):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_unsupported_quantization_methods_are_refused(method):
    with pytest.raises(UnsupportedModel, match=rf"quant_method '{method}' is not supported"):
        read(quantization_config={"quant_method": method, "bits": 4})


@pytest.mark.parametrize(
    "changes",
    [{"quantization_mode": "online"}, {"use_rms_norm": True}, {"linear_class": "other"}],
)
def test_unsupported_bitnet_variants_are_refused(changes):
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        read(quantization_config={"quant_method": "bitnet", **changes})


@pytest.mark.parametrize("group", [0, 16, "64", 256])
def test_unsupported_group_sizes_are_refused(group):
    with pytest.raises(UnsupportedModel, match="group_size is"):
        read(quantization={"group_size": group, "bits": 4})


def test_code_named_in_a_config_is_never_run(tmp_path):
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\n"
    values = hf.config(model_file="x.py", auto_map={"AutoModelForCausalLM": "x.Model"})
    files = {"x.py": code, "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["x.T", None]}}}
    report = convert(hf.write(tmp_path / "hf", values=values, files=files), tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out/x.py").exists()
    for key in ("model_file", "auto_map"):
        assert any(f"'{key}' names Python code" in text for text in report.warnings)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10_000, '{"a": 1, "a": 2}', "\udcff"])
def test_broken_config_json_is_refused(tmp_path, text):
    folder = hf.write(tmp_path / "hf")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError, match=r"config.json"):
        convert(folder, tmp_path / "out")


ODD = ([], {}, [{}], {"a": []}, "x", "", -1, 0, 2**70, 1e300, True, [None], {"rope_type": []})
KEYS = ("rope_parameters", "layer_types", "quantization", "quantization_config", "sliding_window")


@pytest.mark.parametrize("key", [*hf.config(), *KEYS])
def test_odd_values_never_escape_as_another_error(key):
    for odd in ODD:
        with contextlib.suppress(BonsaiError):
            read_hf_config({**hf.config(), key: odd}, "config.json")


def tied_case(tmp_path, tied, head):
    """A folder whose flag and head are as given; returns (report, checkpoint)."""
    source = hf.weights(hf.Tiny(tied=True))
    if head == "same":
        source["lm_head.weight"] = source["model.embed_tokens.weight"]
    elif head == "different":
        source["lm_head.weight"] = source["model.embed_tokens.weight"] + np.float32(1)
    folder = hf.write(tmp_path / "hf", tensors=source, values=hf.config(tie_word_embeddings=tied))
    report = convert(folder, tmp_path / "out")
    return report, Checkpoint.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("tied", "head", "stored", "warned"),
    [
        (True, "absent", False, False),
        (True, "same", False, False),
        (True, "different", False, True),
        (False, "same", True, False),
        (False, "different", True, False),
    ],
)
def test_tied_flag_and_head(tmp_path, tied, head, stored, warned):
    report, checkpoint = tied_case(tmp_path, tied, head)
    assert checkpoint.has("head") is stored
    assert checkpoint.config["tied"] is not stored
    assert any("differs from the embedding" in text for text in report.warnings) is warned


def test_untied_without_a_head_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="no output head"):
        tied_case(tmp_path, False, "absent")


def test_head_of_no_bytes_is_refused(tmp_path):
    source = hf.weights(hf.Tiny(tied=True))
    source["lm_head.weight"] = np.zeros((0, 128), "<f4")
    folder = hf.write(tmp_path / "hf", tensors=source)
    with pytest.raises(FormatError, match=r"lm_head.weight"):
        convert(folder, tmp_path / "out")
