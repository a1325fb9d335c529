"""MLX packs: our own planes under other names."""

from __future__ import annotations

import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.format import Checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"
PACKINGS = {1: "b1", 2: "t2", 3: "q4", 4: "q4", 5: "q8", 6: "q8", 8: "q8"}


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words, one bit at a time: bit i of element k is bit k * bits + i of the row."""
    rows, columns = codes.shape
    words = np.zeros((rows, columns * bits // 32), np.uint32)
    for at in range(columns * bits):
        k, i = divmod(at, bits)
        bit = (codes[:, k].astype(np.uint32) >> np.uint32(i)) & np.uint32(1)
        words[:, at // 32] |= bit << np.uint32(at % 32)
    return words


def packed(rng, shape, bits: int, group: int, dtype: str = "<f2") -> dict[str, np.ndarray]:
    """weight, scales, biases; 2 bits are ternary, 1 bit is signs."""
    rows, columns = shape
    codes = rng.integers(0, 3 if bits == 2 else 2**bits, shape)
    scales = rng.uniform(0.01, 0.1, (rows, columns // group)).astype(np.float16)
    biases = rng.normal(size=scales.shape).astype(np.float16)
    if bits in (1, 2):
        biases = -scales if bits == 2 else -scales / np.float16(2)
    if dtype == "bf16":
        planes = [hf.bf16(plane.astype("<f4")) for plane in (scales, biases)]
    else:
        planes = [plane.astype(dtype) for plane in (scales, biases)]
    return {"weight": pack(codes, bits), "scales": planes[0], "biases": planes[1], "codes": codes}


def wide(plane: np.ndarray) -> np.ndarray:
    if isinstance(plane, hf.Bf16):
        return (np.asarray(plane).astype("<u4") << 16).view("<f4")
    return plane.astype("<f4")


def expected(parts: dict[str, np.ndarray], group: int) -> np.ndarray:
    scales, biases = (np.repeat(wide(parts[p]), group, axis=1) for p in ("scales", "biases"))
    return scales * parts["codes"].astype("<f4") + biases


def folder(tmp_path, bits, group, dtype="<f2", modules=None):
    """(folder, HF name -> dequantized); `modules`: HF name -> (bits, group)."""
    rng = np.random.default_rng(bits)
    spec = hf.Tiny("qwen3", ffn=256, tied=True)
    source, matrices = hf.weights(spec), {}
    quantization = {"group_size": group, "bits": bits, "mode": "affine"}
    shapes = {**hf.linear_shapes(spec), "model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for name, shape in shapes.items():
        own_bits, own_group = (modules or {}).get(name, (bits, group))
        parts = packed(rng, shape, own_bits, own_group, dtype)
        module = name.removesuffix(".weight")
        source.update({f"{module}.{part}": parts[part] for part in ("weight", "scales", "biases")})
        matrices[name] = expected(parts, own_group)
        if (own_bits, own_group) != (bits, group):
            quantization[module] = {"group_size": own_group, "bits": own_bits}
    values = hf.config(spec, quantization=quantization, quantization_config=quantization)
    return hf.write(tmp_path / "hf", spec, source, values), matrices


@pytest.mark.parametrize("bits", PACKINGS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["<f2", "bf16", "<f4"])
def test_packs_arrive_bit_for_bit(tmp_path, bits, group, dtype):
    source, matrices = folder(tmp_path, bits, group, dtype)
    report = convert(source, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert report.fallbacks == ()
    down = checkpoint.matrix("layers.0.ffn.down")
    assert (down.packing, down.group) == (PACKINGS[bits], group)
    assert np.array_equal(down.rows(), matrices["model.layers.0.mlp.down_proj.weight"])
    table = checkpoint.matrix("embedding").rows()
    assert np.array_equal(table, matrices["model.embed_tokens.weight"])


def test_override_of_one_module_comes_before_the_general_setting(tmp_path):
    source, matrices = folder(tmp_path, 4, 64, modules={Q: (8, 32)})
    convert(source, tmp_path / "out")
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.1.attn.q")
    assert (matrix.packing, matrix.group) == ("q8", 32)
    assert np.array_equal(matrix.rows(), matrices[Q])


def test_group_that_is_not_that_of_the_file_is_refused(tmp_path):
    source, _ = folder(tmp_path, 4, 64)
    quantization = {"group_size": 32, "bits": 4}
    spec = hf.Tiny("qwen3", ffn=256, tied=True)
    (source / "config.json").write_text(hf.json.dumps(hf.config(spec, quantization=quantization)))
    with pytest.raises(ConversionError, match=r"scales is F16 .* in groups of 32 needs"):
        convert(source, tmp_path / "out")


def changed(source, change) -> dict[str, np.ndarray]:
    """Rewrite the tensors of a folder after `change(tensors)`."""
    path = source / "model.safetensors"
    tensors = {name: array.copy() for name, array in hf.read(path).items()}
    change(tensors)
    path.write_bytes(hf.safetensors(tensors))
    return tensors


@pytest.mark.parametrize(
    ("bits", "what"), [(2, "minus its scale: its 2 bits"), (1, "minus half its scale: its bits")]
)
def test_bits_that_are_not_ternary_are_kept_as_q4_and_named(tmp_path, bits, what):
    source, _ = folder(tmp_path, bits, 128)
    biases = "model.layers.1.self_attn.q_proj.biases"

    def change(tensors):
        tensors[biases][7] *= np.float16(0.5)

    tensors = changed(source, change)
    report = convert(source, tmp_path / "out")
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.1.attn.q")
    assert (matrix.packing, matrix.group) == ("q4", 128)
    words = tensors[Q].view(np.uint8)
    codes = np.unpackbits(words, axis=1, bitorder="little").reshape(len(words), -1, bits)
    wide = (codes * [1, 2][:bits]).sum(axis=2).astype("<f4")
    scales = np.repeat(tensors[biases.replace("biases", "scales")].astype("<f4"), 128, axis=1)
    shift = np.repeat(tensors[biases].astype("<f4"), 128, axis=1)
    assert np.array_equal(matrix.rows(), scales * wide + shift)
    assert len(report.fallbacks) == 1
    assert f"{Q}: row 7 has a bias that is not {what}" in report.fallbacks[0]
    assert "kept as q4" in report.fallbacks[0]
    with pytest.raises(ConversionError, match=r"q_proj.weight: row 7 has a bias"):
        convert(source, tmp_path / "strict", strict=True)


def test_code_3_names_tensor_and_row(tmp_path):
    def change(tensors):
        tensors[Q][9, 2] |= 3 << 10

    source, _ = folder(tmp_path, 2, 128)
    changed(source, change)
    report = convert(source, tmp_path / "out")
    assert "q_proj.weight: row 9 has the code 3" in report.fallbacks[0]
    assert Checkpoint.open(tmp_path / "out").entry("layers.1.attn.q").packing == "q4"


def test_quantizing_a_pack_that_is_not_ternary_is_no_fallback(tmp_path):
    def change(tensors):
        tensors[Q][9, 2] |= 3 << 10

    source, _ = folder(tmp_path, 2, 128)
    changed(source, change)
    report = convert(source, tmp_path / "out", quant="q8")
    assert report.fallbacks == ()
    assert Checkpoint.open(tmp_path / "out").entry("layers.1.attn.q").packing == "q8"


def test_mixed_bits_in_one_pack(tmp_path):
    names = [f"model.layers.0.{part}.weight" for part in ("self_attn.v_proj", "mlp.down_proj")]
    source, matrices = folder(tmp_path, 2, 128, modules={names[0]: (4, 64), names[1]: (1, 128)})
    convert(source, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, logical, packing in zip(
        (*names, Q), ("layers.0.attn.v", "layers.0.ffn.down", "layers.1.attn.q"),
        ("q4", "b1", "t2"), strict=True,
    ):  # fmt: skip
        assert checkpoint.entry(logical).packing == packing
        assert np.array_equal(checkpoint.matrix(logical).rows(), matrices[name])


def test_rows_that_are_not_whole_groups_are_refused(tmp_path):
    source, _ = folder(tmp_path, 4, 128)
    spec = hf.Tiny("qwen3", ffn=256, tied=True)
    quantization = {"group_size": 128, "bits": 3}
    (source / "config.json").write_text(hf.json.dumps(hf.config(spec, quantization=quantization)))
    with pytest.raises(ConversionError, match=r"are not whole groups of 128 codes of 3 bits"):
        convert(source, tmp_path / "out")


def wrapped(tmp_path, prefix: str, vision: str, **changes):
    """A 2-bit pack of a model for images and text; names of modules have the prefix too."""
    source, matrices = folder(tmp_path, 2, 128, modules={Q: (4, 64)})
    tensors = {prefix + name: a for name, a in hf.read(source / "model.safetensors").items()}
    tensors[vision + "blocks.0.norm1.weight"] = np.ones(4, "<f2")
    tensors[vision + "pos_embed.weight"] = np.ones((2, 2, 2), "<f2")
    (source / "model.safetensors").write_bytes(hf.safetensors(tensors))
    text = hf.json.loads((source / "config.json").read_text())
    quantization = text.pop("quantization")
    del text["quantization_config"], text["architectures"]
    quantization = {prefix + key if "." in key else key: v for key, v in quantization.items()}
    values = {
        "model_type": "some_vlm",
        "architectures": ["SomeForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 27},
        "image_token_id": 7,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "quantization": quantization,
        **changes,
    }
    (source / "config.json").write_text(hf.json.dumps(values))
    return source, matrices


@pytest.mark.parametrize("vision", ["vision_tower.", "model.visual."])
def test_text_of_a_model_for_images_and_text(tmp_path, vision):
    source, matrices = wrapped(tmp_path, "language_model.", vision)
    report = convert(source, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.entry("layers.1.attn.q").packing == "q4"
    assert np.array_equal(checkpoint.matrix("layers.1.attn.q").rows(), matrices[Q])
    lines = [text for text in report.warnings if "vision" in text]
    assert len(lines) == 1
    assert f"2 of {vision}*" in lines[0]


def test_text_config_that_disagrees_is_refused(tmp_path):
    source, _ = wrapped(tmp_path, "language_model.", "vision_tower.", tie_word_embeddings=False)
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings is False, and True in text_"):
        convert(source, tmp_path / "out")


def test_one_tensor_under_two_names_is_refused(tmp_path):
    source, _ = folder(tmp_path, 2, 128)

    def change(tensors):
        tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]

    changed(source, change)
    with pytest.raises(ConversionError, match=r"model.norm.weight .* are the same tensor"):
        convert(source, tmp_path / "out")


def test_scale_that_fp16_does_not_hold_becomes_float32(tmp_path):
    source, matrices = folder(tmp_path, 4, 64, "<f4")
    path = source / "model.safetensors"
    tensors = {name: array.copy() for name, array in hf.read(path).items()}
    tensors["model.layers.1.self_attn.q_proj.scales"][0, 0] = 0.1
    path.write_bytes(hf.safetensors(tensors))
    report = convert(source, tmp_path / "out")
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.1.attn.q")
    assert matrix.packing == "f32"
    assert np.array_equal(matrix.rows()[1:], matrices[Q][1:])
    assert [text.split(":")[0] for text in report.fallbacks] == ["layers.1.attn.q"]
    with pytest.raises(ConversionError, match=r"layers.1.attn.q: fp16 cannot hold"):
        convert(source, tmp_path / "other", strict=True)
