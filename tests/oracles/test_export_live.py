"""Exports in the programs that they are for: mlx-lm computes our logits, gguf reads our bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))

import test_export as cases

from bonsai.backends.reference import BACKEND
from bonsai.config import Yarn
from bonsai.convert.blocks import TYPES
from bonsai.convert.export import TARGETS, export
from bonsai.convert.gguf import read_gguf
from bonsai.format import Checkpoint

pytestmark = pytest.mark.oracle
IDS = tiny.Random(3).integers(0, 272, 300).tolist()
YARN = Yarn(4.0, 64, 32.0, 1.0, 0.1 * np.log(4) + 1)


def logits(folder: Path) -> np.ndarray:
    """Ours [T, vocab], by the reference backend."""
    with Checkpoint.open(folder) as checkpoint:
        with BACKEND.load(checkpoint).session(512, cases.SPEC.vocab) as session:
            return np.concatenate(list(session.score(IDS)))


@pytest.mark.parametrize(
    "spec",
    [
        cases.SPEC,
        replace(cases.SPEC, tied=False, packing="t5", table="q8", group=64),
        replace(cases.SPEC, table="q4", yarn=YARN, context=256),
        replace(cases.SPEC, ffn=320, table="f16", architecture="llama"),
        replace(cases.SPEC, packing="b1"),
    ],
    ids=["t2", "t5-q8", "q4-yarn", "llama-padded-f16", "b1"],
)
@pytest.mark.filterwarnings("ignore")
def test_mlx_lm_computes_our_logits(tmp_path, spec):
    mx = pytest.importorskip("mlx.core", reason="needs mlx")
    utils = pytest.importorskip("mlx_lm.utils", reason="needs mlx-lm")
    source = cases.write(tmp_path / "m", spec)
    export(source, tmp_path / "pack", to="mlx-2bit")
    with mx.stream(mx.cpu):
        model, _ = utils.load_model(tmp_path / "pack", strict=True)
        model.set_dtype(mx.float32)
        found = np.array(model(mx.array([IDS]))[0])
    expected = logits(source)
    assert np.abs(found - expected).max() < 1e-3
    wrong = np.abs(np.roll(expected, 1, axis=0) - expected).max()
    assert wrong > 1  # the bound means something


@pytest.mark.filterwarnings("ignore")
def test_mlx_lm_reads_the_tokenizer(tmp_path):
    utils = pytest.importorskip("mlx_lm.tokenizer_utils", reason="needs mlx-lm")
    source = cases.write(tmp_path / "m")
    export(source, tmp_path / "pack", to="mlx-2bit")
    assert (tmp_path / "pack/tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    tokenizer = utils.load(tmp_path / "pack")
    for text in cases.SAYINGS[:2]:
        assert tokenizer.encode(text) == cases.Tokenizer.open(source).encode(text)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("gguf")])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_reads_what_we_write(tmp_path, target, architecture, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    kind = next(t for t in TYPES.values() if t.name == target[5:].upper())
    known = {k.value for k in gguf.GGMLQuantizationType}
    if kind.id not in known:
        pytest.skip(f"this gguf package does not know {kind.name} ({kind.id})")
    spec = replace(cases.SPEC, architecture=architecture, group=min(kind.weights, 256))
    source = cases.write(tmp_path / "m", spec)
    export(source, tmp_path / "m.gguf", to=target)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with Checkpoint.open(source) as checkpoint:
        for ours, theirs in (("embedding", "token_embd"), ("layers.1.ffn.down", "blk.1.ffn_down")):
            tensor = tensors[f"{theirs}.weight"]
            assert tensor.tensor_type.value == kind.id
            found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(found, checkpoint.matrix(ours).rows())
        norm = tensors["output_norm.weight"].data
        assert np.array_equal(norm, checkpoint.vector("norm"))
    assert reader.get_field("general.architecture").contents() == architecture
    assert reader.get_field(f"{architecture}.block_count").contents() == spec.layers
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == spec.vocab


def test_gguf_names_are_those_of_the_architecture(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    kind = gguf.MODEL_ARCH.QWEN3
    source = cases.write(tmp_path / "m", replace(cases.SPEC, group=64, tied=False))
    export(source, tmp_path / "m.gguf", to="gguf-q2_0")
    known = {
        gguf.TENSOR_NAMES[t].format(bid=i) + ".weight"
        for t in gguf.MODEL_TENSORS[kind]
        for i in range(2)
    }
    assert set(read_gguf(tmp_path / "m.gguf").tensors) <= known
