"""BitNet from every kind of file: master weights, GGUF names, and I2_S in its three orders."""

from __future__ import annotations

import json
import struct

import gguf_writer as gguf
import hf_writer as hf
import numpy as np
import pytest
import tiny_gguf

import bonsai.convert as convert
from bonsai.backends.reference import BACKEND
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.format import Checkpoint

SPEC = hf.Tiny("bitnet", hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32)
Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
LOGICAL = {Q: "layers.1.attn.q", DOWN: "layers.0.ffn.down"}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def logits(folder) -> np.ndarray:
    with BACKEND.load(Checkpoint.open(folder)).session(16, SPEC.vocab) as session:
        session.prefill([1, 2, 3, 4, 5])
        return session.logits()


def hf_folder(tmp_path, quantization=None, source=None, **changes):
    values = hf.config(SPEC, quantization_config=quantization, **changes)
    return hf.write(tmp_path / "hf", SPEC, source, values)


def test_the_norms_and_the_activation_arrive(tmp_path):
    report = convert(hf_folder(tmp_path), tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert report.relative_error == 0
    assert checkpoint.architecture == "bitnet"
    assert checkpoint.config["activation"] == "relu2"
    source = hf.weights(SPEC)
    for i in range(SPEC.layers):
        for name, theirs in (("attn", "self_attn.attn"), ("ffn", "mlp.ffn")):
            gain = source[f"model.layers.{i}.{theirs}_sub_norm.weight"]
            assert np.array_equal(checkpoint.vector(f"layers.{i}.{name}.sub_norm"), gain)
    assert np.isfinite(logits(tmp_path / "out")).all()


@pytest.mark.parametrize(
    ("changes", "theta"), [({"rope_theta": None}, 500000.0), ({"rope_theta": 1e4}, 1e4)]
)
def test_theta_that_is_missing_is_that_of_the_model(tmp_path, changes, theta):
    report = convert(hf_folder(tmp_path, **changes), tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").config["rope"]["theta"] == theta
    assert any("500000, the default" in w for w in report.warnings) is (theta == 500000.0)


def rounded(weight: np.ndarray) -> tuple[np.ndarray, float]:
    """Trits and scale of master weights, one at a time."""
    mean = max(sum(abs(float(w)) for w in weight.reshape(-1)) / weight.size, 1e-5)
    trits = [max(-1, min(1, round(float(w) / mean))) for w in weight.reshape(-1)]
    return np.array(trits).reshape(weight.shape), mean


@pytest.mark.parametrize("kind", ["<f4", "bf16"])
def test_master_weights_are_rounded_as_the_model_rounds_them(tmp_path, kind):
    source = {
        name: hf.bf16(values) if kind == "bf16" else values
        for name, values in hf.weights(SPEC).items()
    }
    report = convert(hf_folder(tmp_path, ONLINE, source), tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, logical in LOGICAL.items():
        wide = source[name].astype("<u4") << 16 if kind == "bf16" else source[name]
        trits, mean = rounded(np.asarray(wide).view("<f4"))
        matrix = checkpoint.matrix(logical)
        assert (matrix.packing, matrix.group) == ("t2", 128)
        assert (matrix.scales == np.float16(mean)).all()
        assert np.array_equal(matrix.rows(), trits * np.float32(np.float16(mean)))
        row = next(t for t in report.tensors if t.name == logical)
        lost = abs(float(np.float16(mean)) - mean) / mean
        assert row.relative_error == pytest.approx(lost, rel=1e-3, abs=1e-9)
    kept = {"f32" if kind == "<f4" else "bf16"}
    assert {checkpoint.entry(name).packing for name in ("embedding", "head")} == kept


def test_modules_that_are_not_rounded(tmp_path):
    quantization = {**ONLINE, "modules_to_not_convert": ["lm_head", "model.layers.1"]}
    convert(hf_folder(tmp_path, quantization), tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.entry("layers.1.attn.q").packing == "f32"
    assert checkpoint.entry("layers.0.attn.q").packing == "t2"


def test_patterns_of_modules_are_refused(tmp_path):
    quantization = {**ONLINE, "modules_to_not_convert": ["(a+)+$"]}
    with pytest.raises(UnsupportedModel, match=r"modules_to_not_convert .* only plain names"):
        convert(hf_folder(tmp_path, quantization), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_class": "bitlinear"}, r"quantization_mode 'online' with linear_class"),
        ({"quantization_mode": "both"}, r"quantization_mode 'both'"),
        ({"use_rms_norm": True}, r"use_rms_norm"),
    ],
)
def test_other_modes_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        convert(hf_folder(tmp_path, {**ONLINE, **changes}), tmp_path / "out")


def test_master_weights_that_are_not_finite_name_tensor_and_row(tmp_path):
    source = hf.weights(SPEC)
    source[Q][17, 3] = np.nan
    with pytest.raises(ConversionError, match=r"q_proj.weight: row 17 has weights that are not"):
        convert(hf_folder(tmp_path, ONLINE, source), tmp_path / "out")


def test_gelu_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"'hidden_act' is 'gelu'; supported: relu2, silu"):
        convert(hf_folder(tmp_path, hidden_act="gelu"), tmp_path / "out")


def gguf_file(path, architecture: str, parts=None, **changes):
    """A model whose keys begin with the name of the architecture."""
    values = {
        key.replace("bitnet.", f"{architecture}.", 1) if key.startswith("bitnet.") else key: item
        for key, item in tiny_gguf.metadata(SPEC, **changes).items()
    }
    values["general.architecture"] = architecture
    parts = tiny_gguf.tensors(SPEC, hf.weights(SPEC)) if parts is None else parts
    return gguf.write(path, values, parts)


@pytest.mark.parametrize(
    ("architecture", "changes", "activation"),
    [
        ("bitnet-b1.58", {}, "relu2"),
        ("bitnet-25", {}, "relu2"),
        ("bitnet", {}, "silu"),
        ("bitnet", {"hidden_activation": "relu2"}, "relu2"),
        ("bitnet-b1.58", {"hidden_activation": "silu"}, "silu"),
    ],
)
def test_gguf_and_hugging_face_give_the_same_checkpoint(
    tmp_path, architecture, changes, activation
):
    path = gguf_file(tmp_path / "m.gguf", architecture, **changes)
    report = convert(path, tmp_path / "a")
    convert(hf_folder(tmp_path, hidden_act=activation), tmp_path / "b")
    ours, theirs = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b")
    assert ours.architecture == "bitnet"
    assert {**ours.config, "eos": None} == {**theirs.config, "eos": None}
    assert ours.names() == theirs.names()
    assert np.array_equal(logits(tmp_path / "a"), logits(tmp_path / "b"))
    guessed = architecture == "bitnet" and not changes
    assert [w for w in report.warnings if "silu, which models of this size have" in w] == (
        [f"{architecture}.hidden_activation is not in the file: silu, which models of this size "
         "have, is used"] if guessed else []
    )  # fmt: skip
    assert not any("metadata key" in text for text in report.warnings)


@pytest.mark.parametrize(
    ("architecture", "vocab", "assumed"),
    [("bitnet-b1.58", 128256, True), ("bitnet-b1.58", 320, False), ("bitnet", 128256, False)],
)
def test_files_of_bitnet_cpp_lack_the_cutting_of_their_vocabulary(
    tmp_path, architecture, vocab, assumed
):
    """Its converters do not write tokenizer.ggml.pre, and the default is not that of Llama 3."""
    spec = hf.Tiny("bitnet", layers=1, hidden=32, ffn=32, heads=1, kv_heads=1, head_dim=32,
                   vocab=vocab, tied=True)  # fmt: skip
    values = {
        key.replace("bitnet.", f"{architecture}.", 1) if key.startswith("bitnet.") else key: item
        for key, item in tiny_gguf.metadata(spec).items()
    }
    values["general.architecture"] = architecture
    del values["tokenizer.ggml.pre"]
    path = gguf.write(tmp_path / "m.gguf", values, tiny_gguf.tensors(spec, hf.weights(spec), "F16"))
    report = convert(path, tmp_path / "out")
    words = json.loads((tmp_path / "out/tokenizer.json").read_text())
    llama3 = r"\p{N}{1,3}" in json.dumps(words["pre_tokenizer"]).replace("\\\\", "\\")
    assert llama3 is assumed
    assert any("cut as Llama 3" in text for text in report.warnings) is assumed


def test_linear_scaling_by_one_is_no_scaling(tmp_path):
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
    convert(gguf_file(tmp_path / "m.gguf", "bitnet", **changes), tmp_path / "out")
    changes["rope.scaling.factor"] = 2.0
    with pytest.raises(UnsupportedModel, match=r"rope.scaling.type is 'linear'"):
        convert(gguf_file(tmp_path / "n.gguf", "bitnet", **changes), tmp_path / "other")


def i2_s(trits: np.ndarray, scale: float, layout: str) -> gguf.Tensor:
    """The bytes of a tensor, one code at a time; then the scale in 32 bytes."""
    rows, columns = trits.shape
    data = bytearray(rows * columns // 4)
    for r in range(rows):
        for c in range(columns):
            at, code = r * columns + c, int(trits[r, c]) + 1
            if layout == "i2_s-rows":
                data[r // 4 * columns + c] |= code << (6 - 2 * (r % 4))
                continue
            quarter = {"i2_s": 32, "i2_s-arm": 16}[layout]
            block, j = divmod(at, 4 * quarter)
            data[block * quarter + j % quarter] |= code << (6 - 2 * (j // quarter))
    return gguf.Tensor(trits.shape, 36, bytes(data) + struct.pack("<f", scale) + b"\0" * 28)


def i2_s_parts(layout: str, scale: float = 0.37):
    """(parts, GGUF name -> trits): all linears I2_S."""
    rng = np.random.default_rng(11)
    parts, made = tiny_gguf.tensors(SPEC, hf.weights(SPEC)), {}
    for name, shape in hf.linear_shapes(SPEC).items():
        made[tiny_gguf.name_of(name)] = trits = rng.integers(-1, 2, shape)
        parts[tiny_gguf.name_of(name)] = i2_s(trits, scale, layout)
    return parts, made


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("i2_s", None), ("i2_s", "i2_s"), ("i2_s-arm", "i2_s-arm"), ("i2_s-rows", "i2_s-rows")],
)
def test_i2_s_in_each_order(tmp_path, layout, kind):
    parts, made = i2_s_parts(layout)
    path = gguf_file(tmp_path / "m.gguf", "bitnet-b1.58", parts)
    report = convert(path, tmp_path / "out", kind=kind)
    checkpoint = Checkpoint.open(tmp_path / "out")
    scale = np.float16(0.37)
    for source, name in (
        ("blk.0.ffn_up.weight", "layers.0.ffn.up"),
        ("blk.1.attn_k.weight", "layers.1.attn.k"),
    ):
        matrix = checkpoint.matrix(name)
        assert (matrix.packing, matrix.group) == ("t2", 128)
        assert np.array_equal(matrix.rows(), made[source] * np.float32(scale))
    assert report.kind == "gguf"
    exact = float(np.float32(0.37))
    assert report.relative_error == pytest.approx(abs(float(scale) - exact) / exact, rel=1e-3)
    assert any("blocks of 128, as published" in w for w in report.warnings) is (kind is None)


def test_the_orders_of_i2_s_differ(tmp_path):
    """The negative control: another order gives other weights, and no error."""
    parts, made = i2_s_parts("i2_s")
    path = gguf_file(tmp_path / "m.gguf", "bitnet-b1.58", parts)
    convert(path, tmp_path / "out", kind="i2_s-arm")
    rows = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.up").rows()
    assert np.mean(np.sign(rows) == made["blk.0.ffn_up.weight"]) < 0.6


def test_i2_s_of_another_architecture_needs_to_be_told(tmp_path):
    spec = hf.Tiny(ffn=256)
    rng = np.random.default_rng(1)
    parts, trits = tiny_gguf.tensors(spec, hf.weights(spec)), rng.integers(-1, 2, (256, 128))
    parts["blk.0.ffn_up.weight"] = i2_s(trits, 0.5, "i2_s")
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    with pytest.raises(
        UnsupportedModel, match=r"blk.0.ffn_up.weight has type 36.*'llama'"
    ) as error:
        convert(path, tmp_path / "out")
    assert "--from i2_s" in str(error.value.hint)
    convert(path, tmp_path / "out", kind="i2_s")
    rows = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.up").rows()
    assert np.array_equal(rows, trits * np.float32(0.5))


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan, 1e9])
def test_i2_s_scale_that_cannot_be_used(tmp_path, scale):
    parts, _ = i2_s_parts("i2_s", scale)
    with pytest.raises(ConversionError, match=r"I2_S scale"):
        convert(gguf_file(tmp_path / "m.gguf", "bitnet-b1.58", parts), tmp_path / "out")


def test_i2_s_code_3_names_tensor_and_row(tmp_path):
    parts, _ = i2_s_parts("i2_s")
    tensor = parts["blk.0.ffn_up.weight"]
    data = bytearray(tensor.data)
    data[32 * 9 + 4] |= 0b11
    parts["blk.0.ffn_up.weight"] = tensor._replace(data=bytes(data))
    path = gguf_file(tmp_path / "m.gguf", "bitnet-b1.58", parts)
    with pytest.raises(ConversionError, match=r"blk.0.ffn_up.weight: row 9 has the code 3"):
        convert(path, tmp_path / "out")


def test_type_36_of_another_size_is_refused(tmp_path):
    """IQ4_NL_4_4 had this id: 18 bytes for 32 weights."""
    parts, _ = i2_s_parts("i2_s")
    size = 256 * 128 // 32 * 18
    parts["blk.0.ffn_up.weight"] = gguf.Tensor((256, 128), 36, b"\1" * size)
    path = gguf_file(tmp_path / "m.gguf", "bitnet-b1.58", parts)
    with pytest.raises(Exception, match=r"blk.0.ffn_up.weight \(I2_S.*takes 8224 bytes"):
        convert(path, tmp_path / "out")


def test_layout_for_widths_that_it_cannot_have(tmp_path):
    spec = hf.Tiny(ffn=192)
    parts = tiny_gguf.tensors(spec, hf.weights(spec))
    parts["blk.0.ffn_down.weight"] = i2_s(np.zeros((128, 192), int), 0.5, "i2_s-arm")
    path = tiny_gguf.write(tmp_path / "m.gguf", spec, parts)
    with pytest.raises(ConversionError, match=r"128 x 192 weights cannot have the layout i2_s,"):
        convert(path, tmp_path / "out", kind="i2_s")
    convert(path, tmp_path / "out", kind="i2_s-arm")
