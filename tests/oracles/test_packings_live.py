"""Packed Hugging Face folders made by the libraries that define the packings."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))

import hf_writer as hf

import bonsai.convert as convert
from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle
NAME = "model.layers.0.mlp.down_proj.weight"


def test_bitnet_weights_packed_by_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    bitnet = pytest.importorskip("transformers.integrations.bitnet", reason="needs transformers")
    rng = np.random.default_rng(0)
    source, expected = hf.weights(), {}
    for name, shape in hf.linear_shapes(hf.Tiny()).items():
        trits = rng.integers(-1, 2, shape).astype(np.float32)
        packed = bitnet.pack_weights(torch.from_numpy(trits.copy()))
        source[name] = packed.numpy().astype(np.uint8)
        source[name.replace(".weight", ".weight_scale")] = np.array([0.5], "<f4")
        unpacked = bitnet.unpack_weights(packed, dtype=torch.float32).numpy()
        assert np.array_equal(unpacked, trits)
        expected[name] = trits * 2  # trits divided by weight_scale
    values = hf.config(quantization_config={"quant_method": "bitnet"})
    convert(hf.write(tmp_path / "hf", tensors=source, values=values), tmp_path / "out")
    matrix = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.down")
    assert np.array_equal(matrix.rows(), expected[NAME])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_quantized_by_mlx(tmp_path, bits, group):
    mx = pytest.importorskip("mlx.core", reason="needs mlx")
    spec = hf.Tiny("qwen3", ffn=256)
    source, expected = hf.weights(spec), {}
    for name in hf.linear_shapes(spec):
        weight = mx.array(source[name].astype(np.float16))
        parts = mx.quantize(weight, group_size=group, bits=bits)
        module = name.removesuffix(".weight")
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
            source[f"{module}.{part}"] = np.array(value)
        wide = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
        expected[name] = np.array(mx.dequantize(*wide, group_size=group, bits=bits))
    values = hf.config(spec, quantization={"group_size": group, "bits": bits})
    convert(hf.write(tmp_path / "hf", spec, source, values), tmp_path / "out")
    found = Checkpoint.open(tmp_path / "out").matrix("layers.0.ffn.down").rows()
    assert np.allclose(found, expected[NAME], rtol=1e-6, atol=1e-7)
