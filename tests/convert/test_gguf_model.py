"""GGUF files as models: names, order of rows, config, and every class of weights bit for bit."""

from __future__ import annotations

import json

import gguf_writer as gguf
import hf_writer as hf
import numpy as np
import pytest
import tiny_gguf

import bonsai.convert as convert
from bonsai import ternary
from bonsai.convert.gguf_model import open_gguf
from bonsai.convert.plan import make_plan
from bonsai.errors import BonsaiError, ConversionError, UnsupportedModel
from bonsai.format import Checkpoint

UP, V, Q = "blk.0.ffn_up.weight", "blk.1.attn_v.weight", "blk.0.attn_q.weight"


def converted(tmp_path, *args, **kw) -> Checkpoint:
    convert(tiny_gguf.write(tmp_path / "m.gguf", *args, **kw), tmp_path / "out")
    return Checkpoint.open(tmp_path / "out", check="always")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_hugging_face_give_the_same_checkpoint(tmp_path, architecture, tied):
    """llama's interleaved q and k rows come back in the order of the Hugging Face folder."""
    spec = hf.Tiny(architecture, heads=4, kv_heads=2, tied=tied)
    ours = converted(tmp_path, spec)
    convert(hf.write(tmp_path / "hf", spec), tmp_path / "other")
    theirs = Checkpoint.open(tmp_path / "other")
    assert ours.names() == theirs.names()
    for name in ours.names():
        if len(ours.entry(name).shape) == 2:
            assert np.array_equal(ours.matrix(name).values, theirs.matrix(name).values), name
        else:
            assert np.array_equal(ours.vector(name), theirs.vector(name)), name
    assert {**ours.config, "eos": None} == {**theirs.config, "eos": None}
    assert 257 in ours.config["eos"]


def test_rows_stay_in_place_without_the_permutation_of_llama(tmp_path):
    """The negative control: the file's own order is another one."""
    spec = hf.Tiny()
    source = hf.weights(spec)["model.layers.0.self_attn.q_proj.weight"]
    file = np.frombuffer(tiny_gguf.tensors(spec, hf.weights(spec))[Q].data, "<f4")
    assert not np.array_equal(file.reshape(source.shape), source)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_float_classes_are_kept(tmp_path, kind):
    spec = hf.Tiny("qwen3")
    parts = tiny_gguf.tensors(spec, hf.weights(spec), kind)
    checkpoint = converted(tmp_path, spec, parts)
    assert checkpoint.entry("layers.0.ffn.up").packing == kind.lower()
    assert checkpoint.matrix("layers.0.ffn.up").values.tobytes() == parts[UP].data


def with_ternary(spec: hf.Tiny, group: int, type_id: int | None = None, duplicate: bool = False):
    """(parts, GGUF name -> (trits, scales)): all linears ternary, the rest float."""
    rng = np.random.default_rng(group)
    parts, made = tiny_gguf.tensors(spec, hf.weights(spec)), {}
    for name, shape in hf.linear_shapes(spec).items():
        name = tiny_gguf.name_of(name)
        trits = rng.integers(-1, 2, shape)
        scales = rng.uniform(0.01, 2, (shape[0], shape[1] // group)).astype(np.float16)
        if duplicate:
            scales[:, 1::2] = scales[:, 0::2]
        parts[name] = gguf.ternary(trits, scales, group, type_id)
        made[name] = trits, scales
    return parts, made


@pytest.mark.parametrize(("group", "type_id"), [(64, 42), (128, 42), (128, 142)])
@pytest.mark.parametrize("packing", [None, "t2", "t5"])
def test_ternary_blocks_arrive_bit_for_bit(tmp_path, group, type_id, packing):
    spec = hf.Tiny("qwen3", ffn=256)
    parts, made = with_ternary(spec, group, type_id)
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    report = convert(path, tmp_path / "out", packing=packing)
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.up")
    trits, scales = made[UP]
    assert (matrix.packing, matrix.group) == (packing or "t2", group)
    assert np.array_equal(ternary.unpack(matrix.codes, matrix.packing, group, 128), trits)
    assert np.array_equal(matrix.scales, scales)
    assert report.relative_error == 0
    assert report.zeros == pytest.approx(1 / 3, abs=0.01)
    row = next(tensor for tensor in report.tensors if tensor.name == "layers.0.ffn.up")
    assert row.zeros == np.count_nonzero(trits == 0) / trits.size
    bits = {"t2": 2, "t5": 1.625}[packing or "t2"]
    assert row.bits_per_weight == bits + 16 / group


@pytest.mark.parametrize("packing", ["t2", "t5"])
def test_groups_of_64_with_equal_pairs_of_scales_become_groups_of_128(tmp_path, packing):
    spec = hf.Tiny("qwen3", ffn=256)
    parts, made = with_ternary(spec, 64, duplicate=True)
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    convert(path, tmp_path / "out", packing=packing)
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.up")
    trits, scales = made[UP]
    assert matrix.group == 128
    assert np.array_equal(matrix.rows(), trits * np.repeat(scales.astype("<f4"), 64, axis=1))


def test_llama_permutes_packed_rows_too(tmp_path):
    spec = hf.Tiny(heads=2, kv_heads=2, ffn=256)
    parts, _ = with_ternary(spec, 128)
    rng = np.random.default_rng(8)
    trits = rng.integers(-1, 2, (128, 128))
    scales = rng.uniform(0.1, 1, (128, 1)).astype(np.float16)
    moved = tiny_gguf.interleaved(trits, 2), tiny_gguf.interleaved(scales, 2)
    parts[Q] = gguf.ternary(*moved, 128)
    matrix = converted(tmp_path, spec, parts).matrix("layers.0.attn.q")
    assert np.array_equal(matrix.rows(), trits * scales.astype("<f4"))


def test_code_3_names_tensor_and_row(tmp_path):
    spec = hf.Tiny("qwen3", ffn=256)
    parts, _ = with_ternary(spec, 128)
    data = bytearray(parts[UP].data)
    data[34 * 77 + 2 + 5] |= 0b1100
    parts[UP] = parts[UP]._replace(data=bytes(data))
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    message = r"layers.0.ffn.up \(blk.0.ffn_up.weight\): row 77 has the code 3"
    with pytest.raises(ConversionError, match=message):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_scale_that_is_not_finite_names_tensor_and_row(tmp_path, bad):
    spec = hf.Tiny("qwen3", ffn=256)
    parts, _ = with_ternary(spec, 128)
    data = bytearray(parts[UP].data)
    data[34 * 3 : 34 * 3 + 2] = np.float16(bad).tobytes()
    parts[UP] = parts[UP]._replace(data=bytes(data))
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    with pytest.raises(ConversionError, match=r"ffn.up .*row 3 has a scale that is not finite"):
        convert(path, tmp_path / "out")


def test_mixed_classes_are_kept_and_fallbacks_are_said(tmp_path):
    """Q4_1 and Q8_0 stay exact; a Q8_0 bias beyond fp16 and Q6_K are said, or errors if strict."""
    spec = hf.Tiny("qwen3", hidden=256, ffn=256)
    rng = np.random.default_rng(4)
    parts = tiny_gguf.tensors(spec, hf.weights(spec))
    codes, shape = rng.integers(0, 16, (256, 256)), (256, 8)
    scales, low = (rng.normal(size=shape).astype(np.float16) for _ in range(2))
    parts[UP] = gguf.q4_1(codes, scales, low)
    signed = rng.integers(-128, 128, (64, 256))
    parts[V] = gguf.q8_0(signed, np.full((64, 8), 1000.0))
    raw = rng.integers(0, 256, (256, 210), dtype=np.uint8)
    raw[:, 208:] = np.full((256, 1), 0.01, "<f2").view(np.uint8)
    parts["blk.0.ffn_gate.weight"] = gguf.Tensor((256, 256), 14, raw.tobytes())
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    report = convert(path, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    up = checkpoint.matrix("layers.0.ffn.up")
    assert (up.packing, up.group) == ("q4", 32)
    expected = codes.astype("<f4") * np.repeat(scales.astype("<f4"), 32, axis=1)
    assert np.array_equal(up.rows(), expected + np.repeat(low.astype("<f4"), 32, axis=1))
    v = checkpoint.matrix("layers.1.attn.v")
    assert v.packing == "f32"
    assert np.array_equal(v.rows(), 1000.0 * signed.astype("<f4"))
    assert checkpoint.entry("layers.0.ffn.gate").packing == "q8"
    assert [text.split(":")[0] for text in report.fallbacks] == [
        "layers.0.ffn.gate",
        "layers.1.attn.v",
    ]
    gate = next(tensor for tensor in report.tensors if tensor.name == "layers.0.ffn.gate")
    assert 0 < gate.relative_error < 0.01
    assert any("fallback: layers.0.ffn.gate: Q6_K" in line for line in report.lines())
    with pytest.raises(ConversionError, match=r"layers.0.ffn.gate: Q6_K"):
        convert(path, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()
    convert(path, tmp_path / "exact", exact=True)
    assert Checkpoint.open(tmp_path / "exact").entry("layers.0.ffn.gate").packing == "f32"


def test_equal_head_is_dropped(tmp_path):
    spec = hf.Tiny(tied=True)
    source = hf.weights(spec)
    source["lm_head.weight"] = source["model.embed_tokens.weight"]
    checkpoint = converted(tmp_path, spec, tiny_gguf.tensors(spec, source))
    assert checkpoint.config["tied"] is True
    assert not checkpoint.has("head")


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_frequency_factors_are_ignored_only_if_they_do_nothing(tmp_path, value):
    spec = hf.Tiny()
    parts = tiny_gguf.tensors(spec, hf.weights(spec))
    parts["rope_freqs.weight"] = gguf.dense(np.full(32, value))
    if value == 1:
        assert converted(tmp_path, spec, parts).has("embedding")
        return
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight scales the rotary frequencies"):
        converted(tmp_path, spec, parts)


def test_missing_and_left_over_tensors_are_named(tmp_path):
    spec = hf.Tiny()
    parts = tiny_gguf.tensors(spec, hf.weights(spec))
    missing = dict(parts)
    del missing[UP]
    with pytest.raises(ConversionError, match=rf"missing tensors: {UP}"):
        converted(tmp_path, spec, missing)
    parts["blk.0.attn_q.bias"] = gguf.dense(np.ones(128))
    with pytest.raises(ConversionError, match=r"no line of the recipe uses: blk.0.attn_q.bias"):
        converted(tmp_path, spec, parts)
    with pytest.raises(ConversionError, match=r"no tensor token_embd.weight"):
        converted(tmp_path, spec, {UP: parts[UP]})


def test_yarn_is_read(tmp_path):
    changes = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
    }
    spec = hf.Tiny("qwen3")
    yarn = converted(tmp_path, spec, **changes).config["rope"]["yarn"]
    assert yarn == {
        "factor": 4.0,
        "original_context": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": pytest.approx(1.138629436, abs=1e-9),
    }


def test_numbers_of_the_config_are_the_decimals_that_were_meant(tmp_path):
    spec = hf.Tiny(theta=1e5)
    checkpoint = converted(tmp_path, spec, **{"attention.layer_norm_rms_epsilon": 1e-5})
    assert json.dumps(checkpoint.config["norm_eps"]) == "1e-05"
    assert checkpoint.config["rope"]["theta"] == 100000.0


def test_missing_theta_is_a_default_that_is_said(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", hf.Tiny(), **{"rope.freq_base": None})
    report = convert(path, tmp_path / "out")
    assert any("rope.freq_base is not in the file: 10000" in text for text in report.warnings)


REFUSED = {
    "attention.sliding_window": 4096,
    "expert_count": 8,
    "attention.head_count_kv": [1, 2],
    "rope.scaling.type": "linear",
    "rope.dimension_count": 32,
    "attention.value_length": 32,
    "vocab_size": 999,
    "logit_scale": 0.5,
    "something.new": 1,
    "block_count": 2**31,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_the_maths_is_refused_by_name(tmp_path, key):
    with pytest.raises(UnsupportedModel, match=key):
        converted(tmp_path, hf.Tiny(), **{key: REFUSED[key]})


@pytest.mark.parametrize(
    ("key", "item", "message"),
    [
        (
            "general.architecture",
            "qwen9",
            "'qwen9' is not supported; supported: bitnet, llama, qwen3",
        ),
        ("general.type", "adapter", "general.type is 'adapter'"),
        ("prism.hadamard.version", 1, r"prism.hadamard.version: .* transformed basis"),
    ],
)
def test_other_metadata_that_is_refused(tmp_path, key, item, message):
    values = {**tiny_gguf.metadata(hf.Tiny()), key: item}
    parts = tiny_gguf.tensors(hf.Tiny(), hf.weights())
    path = gguf.write(tmp_path / "m.gguf", values, parts)
    with pytest.raises(UnsupportedModel, match=message):
        convert(path, tmp_path / "out")


def test_unknown_namespace_gets_a_warning(tmp_path):
    values = {**tiny_gguf.metadata(hf.Tiny()), "someone.note": "x"}
    path = gguf.write(tmp_path / "m.gguf", values, tiny_gguf.tensors(hf.Tiny(), hf.weights()))
    report = convert(path, tmp_path / "out")
    assert report.warnings == ("metadata key someone.note is not known and was left out",)


def test_flipped_bytes_of_a_header_never_escape_as_another_error(tmp_path):
    """Every byte up to the tensors, of the vocabulary some: a BonsaiError, or nothing."""
    spec = hf.Tiny(layers=1, ffn=64, vocab=260)
    data = tiny_gguf.write(tmp_path / "m.gguf", spec).read_bytes()
    words = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.merges")
    end = data.index(b"blk.0.attn_v.weight") + 100
    rng = np.random.default_rng(0)
    places = [i for i in range(end) if not words[0] + 40 < i < words[1] or i % 97 == 0]
    refused = 0
    for place in places:
        changed = bytearray(data)
        changed[place] ^= int(rng.integers(1, 256))
        (tmp_path / "m.gguf").write_bytes(changed)
        try:
            make_plan(open_gguf(tmp_path / "m.gguf", 128))
        except BonsaiError:
            refused += 1
    assert refused > len(places) / 2
