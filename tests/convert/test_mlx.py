"""MLX packs: our own planes under other names."""

from __future__ import annotations

import hf_writer as hf
import numpy as np
import pytest

import bonsai.convert as convert
from bonsai.errors import ConversionError
from bonsai.format import Checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words, one code at a time: element k at bit (bits * k) mod 32, lowest first."""
    rows, columns = codes.shape
    words = np.zeros((rows, columns * bits // 32), np.uint32)
    for k in range(columns):
        words[:, k * bits // 32] |= codes[:, k].astype(np.uint32) << np.uint32(k * bits % 32)
    return words


def packed(rng, shape, bits: int, group: int, dtype: str = "<f2") -> dict[str, np.ndarray]:
    """weight, scales, biases; 2 bits are ternary."""
    rows, columns = shape
    codes = rng.integers(0, 3 if bits == 2 else 2**bits, shape)
    scales = rng.uniform(0.01, 0.1, (rows, columns // group)).astype(np.float16)
    biases = -scales if bits == 2 else rng.normal(size=scales.shape).astype(np.float16)
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


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["<f2", "bf16", "<f4"])
def test_packs_arrive_bit_for_bit(tmp_path, bits, group, dtype):
    source, matrices = folder(tmp_path, bits, group, dtype)
    report = convert(source, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert report.fallbacks == ()
    down = checkpoint.matrix("layers.0.ffn.down")
    assert (down.packing, down.group) == ({2: "t2", 4: "q4", 8: "q8"}[bits], group)
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


def test_two_bits_that_are_not_ternary_name_tensor_and_row(tmp_path):
    source, _ = folder(tmp_path, 2, 128)
    path = source / "model.safetensors"
    tensors = {name: array.copy() for name, array in hf.read(path).items()}
    tensors["model.layers.1.self_attn.q_proj.biases"][7] *= np.float16(0.5)
    path.write_bytes(hf.safetensors(tensors))
    with pytest.raises(ConversionError, match=r"q_proj.weight: row 7 has a bias"):
        convert(source, tmp_path / "out")


def test_code_3_names_tensor_and_row(tmp_path):
    source, _ = folder(tmp_path, 2, 128)
    path = source / "model.safetensors"
    tensors = {name: array.copy() for name, array in hf.read(path).items()}
    tensors[Q][9, 2] |= 3 << 10
    path.write_bytes(hf.safetensors(tensors))
    with pytest.raises(ConversionError, match=r"q_proj.weight.*row 9 has the code 3"):
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
