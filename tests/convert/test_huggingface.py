"""Hugging Face folders: every class of weights arrives unchanged; what is wrong is said early."""

from __future__ import annotations

import json

import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.errors import BonsaiError, ConversionError, FormatError, UnsupportedModel
from bonsai.format import Checkpoint

DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
LOGICAL = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "model.norm.weight": "norm",
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "self_attn.q_proj.weight": "attn.q",
    "self_attn.k_proj.weight": "attn.k",
    "self_attn.v_proj.weight": "attn.v",
    "self_attn.o_proj.weight": "attn.out",
    "self_attn.q_norm.weight": "attn.q_norm",
    "self_attn.k_norm.weight": "attn.k_norm",
    "mlp.gate_proj.weight": "ffn.gate",
    "mlp.up_proj.weight": "ffn.up",
    "mlp.down_proj.weight": "ffn.down",
}


def logical(name: str) -> str:
    if name in LOGICAL:
        return LOGICAL[name]
    _, _, layer, part = name.split(".", 3)
    return f"layers.{layer}.{LOGICAL[part]}"


def converted(tmp_path, folder, **options) -> Checkpoint:
    convert(folder, tmp_path / "out", **options)
    return Checkpoint.open(tmp_path / "out", check="always")


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    if len(checkpoint.entry(name).shape) == 1:
        return checkpoint.vector(name)
    return checkpoint.matrix(name).rows()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_float_weights_arrive_bit_for_bit(tmp_path, architecture, tied, shards):
    spec = hf.Tiny(architecture, tied=tied)
    source = hf.weights(spec)
    folder = hf.write(tmp_path / "hf", spec, source, shards=shards)
    checkpoint = converted(tmp_path, folder)
    assert {logical(name) for name in source} == set(checkpoint.names())
    for name, expected in source.items():
        assert np.array_equal(values(checkpoint, logical(name)), expected), name
    assert checkpoint.config["tied"] is tied
    assert checkpoint.architecture == architecture


def test_each_float_class_is_kept_and_norms_become_float32(tmp_path):
    source = hf.weights()
    wide = {name: hf.bf16(array) for name, array in source.items()}
    wide[DOWN] = source[DOWN].astype("<f2")
    checkpoint = converted(tmp_path, hf.write(tmp_path / "hf", tensors=wide))
    assert checkpoint.entry("layers.0.ffn.down").packing == "f16"
    assert checkpoint.entry("layers.0.ffn.up").packing == "bf16"
    assert checkpoint.entry("embedding").packing == "bf16"
    assert checkpoint.entry("norm").packing == "f32"
    widened = (wide["model.norm.weight"].astype("<u4") << 16).view("<f4")
    assert np.array_equal(checkpoint.vector("norm"), widened)
    assert np.array_equal(values(checkpoint, "layers.0.ffn.down"), wide[DOWN].astype("<f4"))


def test_config_is_translated(tmp_path):
    spec = hf.Tiny("qwen3", tied=True)
    folder = hf.write(tmp_path / "hf", spec, values=hf.config(spec, eos_token_id=[7, 5, 999]))
    report = convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        "architecture": "qwen3",
        "layers": 2,
        "hidden": 128,
        "ffn": 192,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "vocab": 320,
        "norm_eps": 1e-6,
        "activation": "silu",
        "context": 4096,
        "rope": {"theta": 1e6, "dims": 64},
        "tied": True,
        "eos": [5, 7],
    }
    assert "end token 999 is left out" in " ".join(report.warnings)


def test_tokenizer_files_and_sampling_are_carried_over(tmp_path):
    files = {
        "tokenizer_config.json": {"chat_template": "{{ x }}"},
        "chat_template.jinja": "{{ messages }}ü",
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.5,
            "top_k": 20,
            "top_p": 0.9,
        },
        "notes.txt": "not ours",
    }
    folder = hf.write(tmp_path / "hf", files=files)
    checkpoint = converted(tmp_path, folder)
    for name in (*list(files)[:3], "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "out/notes.txt").exists()
    assert checkpoint.manifest.sampling == {"temperature": 0.5, "top_k": 20, "top_p": 0.9}
    assert checkpoint.manifest.tokenizer_size == 300


@pytest.mark.parametrize(
    ("generation", "warned"),
    [({"temperature": 0.5}, False), ({"do_sample": True, "temperature": -1}, True)],
)
def test_unusable_sampling_is_left_out(tmp_path, generation, warned):
    folder = hf.write(tmp_path / "hf", files={"generation_config.json": generation})
    report = convert(folder, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").manifest.sampling is None
    assert any("sampling" in text for text in report.warnings) is warned


def test_provenance_names_the_shards_with_their_hashes(tmp_path):
    folder = hf.write(tmp_path / "hf", shards=2)
    source = converted(tmp_path, folder).manifest.source
    assert source.kind == "huggingface"
    assert sorted(source.files) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def bitnet(weight: np.ndarray) -> np.ndarray:
    """Trits [out, in] as uint8 [out / 4, in], one byte at a time."""
    rows, columns = weight.shape
    packed = np.zeros((rows // 4, columns), np.uint8)
    for row in range(rows):
        packed[row % (rows // 4)] |= (weight[row] + 1).astype(np.uint8) << (
            2 * (row // (rows // 4))
        )
    return packed


def bitnet_folder(tmp_path, scale: float, quantization: dict):
    rng = np.random.default_rng(3)
    source, trits = hf.weights(), {}
    for name, shape in hf.linear_shapes(hf.Tiny()).items():
        trits[name] = rng.integers(-1, 2, shape)
        source[name] = bitnet(trits[name])
        source[name.replace(".weight", ".weight_scale")] = np.array([scale], "<f4")
    quantization = {"quant_method": "bitnet", "modules_to_not_convert": None, **quantization}
    settings = hf.config(quantization_config=quantization)
    return hf.write(tmp_path / "hf", tensors=source, values=settings), source, trits


@pytest.mark.parametrize(
    ("quantization", "factor"),
    [
        ({}, 1 / 1.555),
        ({"linear_class": "bitlinear"}, 1 / 1.555),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, 1.555),
    ],
)
def test_bitnet_packing_with_both_scale_conventions(tmp_path, quantization, factor):
    folder, source, trits = bitnet_folder(tmp_path, 1.555, quantization)
    report = convert(folder, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, expected in trits.items():
        matrix = checkpoint.matrix(logical(name))
        assert matrix.packing == "t2"
        assert np.array_equal(matrix.rows(), expected * np.float32(np.float16(factor)))
    assert np.array_equal(values(checkpoint, "head"), source["lm_head.weight"])
    # One scale is rounded to fp16, and that is said.
    rounding = abs(float(np.float16(factor)) - factor) / factor
    assert report.relative_error == pytest.approx(rounding, rel=0.01)


def test_bitnet_code_3_names_tensor_and_row(tmp_path):
    folder, source, _ = bitnet_folder(tmp_path, 1.0, {})
    source[Q] = source[Q].copy()
    source[Q][5, 9] |= 0b110000  # row 2 * 32 + 5
    hf.write_shards(folder, source, 1)
    with pytest.raises(ConversionError, match=rf"{Q}.*row 69 has the code 3"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan, 1e-9])
def test_bitnet_scale_that_cannot_be_used(tmp_path, scale):
    folder, _, _ = bitnet_folder(tmp_path, scale, {})
    with pytest.raises(ConversionError, match="weight_scale"):
        convert(folder, tmp_path / "out")


def test_bitnet_without_scale(tmp_path):
    folder, source, _ = bitnet_folder(tmp_path, 1.0, {})
    del source[Q.replace(".weight", ".weight_scale")]
    hf.write_shards(folder, source, 1)
    with pytest.raises(FormatError, match=r"model.layers.1.self_attn.q_proj.weight_scale"):
        convert(folder, tmp_path / "out")


def test_packed_weights_without_quantization_config_are_refused(tmp_path):
    folder, source, _ = bitnet_folder(tmp_path, 1.0, {})
    hf.write(folder, tensors=source)
    with pytest.raises(UnsupportedModel, match="U8"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("pieces", "group"), [(1, 128), (3, 64)])
def test_ternary_floats_are_found_and_kept_exactly(tmp_path, axis, pieces, group):
    """TriLM: float16 matrices of scale x trit with one scale for each shard, along either axis."""
    spec = hf.Tiny(ffn=192)
    rng = np.random.default_rng(5)
    source = hf.weights(spec)
    for name, shape in hf.linear_shapes(spec).items():
        scale = np.ones(shape, "<f2")
        for piece in np.array_split(
            np.arange(shape[axis] // 64), pieces if shape[axis] == 192 else 1
        ):
            rows = slice(64 * piece[0], 64 * piece[-1] + 64)
            scale[(slice(None),) * axis + (rows,)] = rng.uniform(0.01, 0.1)
        source[name] = (rng.integers(-1, 2, shape) * scale).astype("<f2")
    source[DOWN][3] = 0  # a zero row is ternary with scale 0
    checkpoint = converted(tmp_path, hf.write(tmp_path / "hf", spec, source))
    for name in hf.linear_shapes(spec):
        matrix = checkpoint.matrix(logical(name))
        assert matrix.packing == "t2"
        assert np.array_equal(matrix.rows(), source[name].astype("<f4"))
    assert checkpoint.entry("layers.0.ffn.down").group == (group if axis else 128)
    assert checkpoint.entry("embedding").packing == "f32"


def test_missing_tensor_and_left_over_tensor_are_named(tmp_path):
    source = hf.weights()
    source["model.layers.0.self_attn.q_proj.bias"] = source.pop(DOWN)[0]
    folder = hf.write(tmp_path / "hf", tensors=source)
    with pytest.raises(ConversionError, match=rf"missing tensors: {DOWN}"):
        convert(folder, tmp_path / "out")
    source[DOWN] = hf.weights()[DOWN]
    hf.write_shards(folder, source, 1)
    with pytest.raises(ConversionError, match=r"no line of the recipe uses: .*q_proj.bias"):
        convert(folder, tmp_path / "out")


def test_rotary_frequencies_are_ignored_by_name(tmp_path):
    source = hf.weights()
    source["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, "<f4")
    assert "embedding" in converted(tmp_path, hf.write(tmp_path / "hf", tensors=source)).names()


def test_wrong_shape_gives_both_shapes(tmp_path):
    folder = hf.write(tmp_path / "hf", values=hf.config(intermediate_size=256))
    message = r"gate_proj.weight is \[192, 128\], the config needs \[256, 128\]"
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_name_tensor_and_row(tmp_path, bad):
    source = hf.weights()
    source[DOWN][17, 3] = bad
    with pytest.raises(ConversionError, match=r"down_proj.*row 17 has weights that are not finite"):
        convert(hf.write(tmp_path / "hf", tensors=source), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "hf"]


def test_unsupported_dtype_is_named(tmp_path):
    source = hf.weights()
    source[DOWN] = source[DOWN].astype("<i8")
    with pytest.raises(UnsupportedModel, match=r"down_proj.weight is I64"):
        convert(hf.write(tmp_path / "hf", tensors=source), tmp_path / "out")


def test_missing_tokenizer_is_one_clear_error(tmp_path):
    folder = hf.write(tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConversionError, match=r"no tokenizer.json"):
        convert(folder, tmp_path / "out")


def test_tokenizer_with_more_ids_than_rows_is_refused(tmp_path):
    folder = hf.write(tmp_path / "hf", files={"tokenizer.json": hf.tokenizer(321)})
    with pytest.raises(ConversionError, match="321 ids, the embedding has 320 rows"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}', "[" * 100_000]
)
def test_broken_tokenizer_json_is_refused(tmp_path, text):
    folder = hf.write(tmp_path / "hf", files={"tokenizer.json": text})
    with pytest.raises(BonsaiError, match=r"tokenizer.json"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "missing"),
        (
            lambda f: (f / "model.safetensors.index.json").unlink(),
            "no model.safetensors.index.json",
        ),
        (lambda f: _place(f, DOWN, "../x.safetensors"), "not a plain file name"),
        (lambda f: _place(f, DOWN, "/etc/hostname"), "not a plain file name"),
        (lambda f: _place(f, "model.extra.weight", "model-00001-of-00002.safetensors"), "none of"),
    ],
)
def test_shards_that_do_not_fit_their_index(tmp_path, change, message):
    folder = hf.write(tmp_path / "hf", shards=2)
    change(folder)
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _place(folder, tensor: str, shard: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][tensor] = shard
    path.write_text(json.dumps(index))
