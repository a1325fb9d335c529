"""Classes of GGUF weights in whole conversions: base 3, signs, groups with 6-bit scales."""

from __future__ import annotations

from pathlib import Path

import gguf_writer as gguf
import hf_writer as hf
import numpy as np
import pytest
import tiny_gguf

import bonsai.convert as convert
from bonsai import ternary
from bonsai.backends.reference import BACKEND
from bonsai.convert.blocks import TYPES
from bonsai.errors import ConversionError
from bonsai.format import Checkpoint, verify
from bonsai.matrix import PackedMatrix

UP = "blk.0.ffn_up.weight"
SPEC = hf.Tiny("qwen3", hidden=256, ffn=256, heads=4, kv_heads=2)


def with_linears(path: Path, make, table=None) -> Path:
    """A file whose linears are `make(rng, shape)` and, if `table` is given, the embedding too."""
    rng = np.random.default_rng(5)
    parts = tiny_gguf.tensors(SPEC, hf.weights(SPEC))
    for name, shape in hf.linear_shapes(SPEC).items():
        parts[tiny_gguf.name_of(name)] = make(rng, shape)
    if table is not None:
        parts["token_embd.weight"] = table(rng, (SPEC.vocab, SPEC.hidden))
    return tiny_gguf.write(path, SPEC, parts)


def trits_and_scales(rng, shape, group: int) -> tuple[np.ndarray, np.ndarray]:
    scales = rng.uniform(0.01, 0.1, (shape[0], shape[1] // group)).astype(np.float16)
    return rng.integers(-1, 2, shape), scales


def ptq1_0(rng, shape) -> gguf.Tensor:
    return gguf.base_3(*trits_and_scales(rng, shape, 128), 128)


def tq1_0(rng, shape) -> gguf.Tensor:
    return gguf.base_3(*trits_and_scales(rng, shape, 256), 256)


def pq2_0(rng, shape) -> gguf.Tensor:
    return gguf.ternary(*trits_and_scales(rng, shape, 128), 128)


def matrices(folder: Path) -> dict[str, PackedMatrix]:
    checkpoint = Checkpoint.open(folder, check="always")
    names = [n for n in checkpoint.names() if len(checkpoint.entry(n).shape) == 2]
    return {n: checkpoint.matrix(n) for n in names}


def assert_same_bytes(a: Path, b: Path) -> None:
    ours, theirs = matrices(a), matrices(b)
    assert ours.keys() == theirs.keys()
    for name, matrix in ours.items():
        other = theirs[name]
        assert (matrix.packing, getattr(matrix, "group", 0)) == (
            other.packing,
            getattr(other, "group", 0),
        )
        if isinstance(matrix, PackedMatrix):
            assert matrix.codes.tobytes() == other.codes.tobytes(), name
            assert matrix.scales.tobytes() == other.scales.tobytes(), name


def logits(folder: Path) -> np.ndarray:
    with BACKEND.load(Checkpoint.open(folder)).session(16, SPEC.vocab) as session:
        session.prefill([1, 2, 3, 4, 5])
        return session.logits()


def test_the_same_weights_in_two_types_are_the_same_checkpoint(tmp_path):
    """PTQ1_0 and PQ2_0, in either of our packings, and forth and back between those."""
    wide = with_linears(tmp_path / "pq2.gguf", pq2_0)
    narrow = with_linears(tmp_path / "ptq1.gguf", ptq1_0)
    assert convert(narrow, tmp_path / "t5").relative_error == 0
    assert matrices(tmp_path / "t5")["layers.0.ffn.up"].packing == "t5"
    convert(wide, tmp_path / "t2")
    convert(tmp_path / "t5", tmp_path / "t5 as t2", packing="t2")
    convert(tmp_path / "t5 as t2", tmp_path / "t5 again", packing="t5")
    convert(narrow, tmp_path / "t2 at once", packing="t2")
    convert(wide, tmp_path / "t5 at once", packing="t5")
    assert_same_bytes(tmp_path / "t2", tmp_path / "t5 as t2")
    assert_same_bytes(tmp_path / "t2", tmp_path / "t2 at once")
    assert_same_bytes(tmp_path / "t5", tmp_path / "t5 again")
    assert_same_bytes(tmp_path / "t5", tmp_path / "t5 at once")
    assert np.array_equal(logits(tmp_path / "t2"), logits(tmp_path / "t5"))


def test_bytes_of_base_3_are_copied(tmp_path):
    convert(with_linears(tmp_path / "m.gguf", tq1_0), tmp_path / "out")
    matrix = matrices(tmp_path / "out")["layers.0.ffn.up"]
    assert (matrix.packing, matrix.group) == ("t5", 256)
    rng = np.random.default_rng(5)
    made = {tiny_gguf.name_of(n): tq1_0(rng, s) for n, s in hf.linear_shapes(SPEC).items()}
    blocks = np.frombuffer(made[UP].data, np.uint8).reshape(256, 54)
    assert matrix.codes.tobytes() == blocks[:, :52].tobytes()
    assert matrix.scales.tobytes() == blocks[:, 52:].tobytes()


@pytest.mark.parametrize(("at", "byte"), [(3, 20), (3, 237), (23, 1), (24, 1), (25, 128)])
def test_byte_that_is_not_trits_names_tensor_and_row(tmp_path, at, byte):
    """1, 20 and 237 are no byte of five trits; 128 is one, but not of four."""

    def damaged(rng, shape):
        tensor = ptq1_0(rng, shape)
        data = bytearray(tensor.data)
        data[28 * (2 * 77 + 1) + at] = byte
        return tensor._replace(data=bytes(data))

    path = with_linears(tmp_path / "m.gguf", ptq1_0, damaged)
    message = r"embedding \(token_embd.weight\): row 77 has a byte that is not five trits"
    with pytest.raises(ConversionError, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("digits", [5, 4])
def test_all_and_only_the_bytes_of_trits_are_accepted(digits):
    good = {-(-256 * 3 ** (5 - digits) * v // 243) for v in range(3**digits)}
    codes = np.zeros((256, 26), np.uint8)
    codes[:, 0 if digits == 5 else 25] = np.arange(256)
    found = set(np.flatnonzero(~ternary.faulty_rows(codes, "t5", 128)))
    assert found == good
    assert len(good) == 3**digits


def test_signs_are_kept_bit_for_bit_and_run(tmp_path):
    def signs(rng, shape):
        scales = rng.uniform(0.01, 0.1, (shape[0], shape[1] // 128)).astype(np.float16)
        return gguf.binary(2 * rng.integers(0, 2, shape) - 1, scales)

    report = convert(with_linears(tmp_path / "m.gguf", signs, signs), tmp_path / "out")
    assert report.relative_error == 0
    assert report.fallbacks == ()
    assert report.zeros is None
    found = matrices(tmp_path / "out")
    assert {(m.packing, m.group) for n, m in found.items() if n != "head"} == {("b1", 128)}
    row = next(t for t in report.tensors if t.name == "embedding")
    assert row.bits_per_weight == 1.125
    rng = np.random.default_rng(5)
    made = {tiny_gguf.name_of(n): signs(rng, s) for n, s in hf.linear_shapes(SPEC).items()}
    expected = TYPES[41].read("w", np.frombuffer(made[UP].data, np.uint8).reshape(256, 36), 256)
    assert np.array_equal(found["layers.0.ffn.up"].rows(), expected.rows())
    assert verify(tmp_path / "out").ok
    assert np.isfinite(logits(tmp_path / "out")).all()


def k_blocks(type_id: int, d: float = 0.001):
    def made(rng, shape):
        kind = TYPES[type_id]
        count = shape[0] * shape[1] // kind.weights
        raw = rng.integers(0, 256, (count, kind.nbytes), dtype=np.uint8)
        raw[:, :4] = np.array([d, d / 2], "<f2").view(np.uint8)
        return gguf.Tensor(shape, type_id, raw.tobytes())

    return made


@pytest.mark.parametrize(("type_id", "packing"), [(12, "q4"), (13, "q8")])
def test_codes_of_q4_k_and_q5_k_are_kept_and_scales_rounded_once(tmp_path, type_id, packing):
    name = TYPES[type_id].name
    path = with_linears(tmp_path / "m.gguf", k_blocks(type_id))
    report = convert(path, tmp_path / "out")
    rng = np.random.default_rng(5)
    made = {
        tiny_gguf.name_of(n): k_blocks(type_id)(rng, s) for n, s in hf.linear_shapes(SPEC).items()
    }
    source = TYPES[type_id].read("w", np.frombuffer(made[UP].data, np.uint8).reshape(256, -1), 256)
    found = matrices(tmp_path / "out")["layers.0.ffn.up"]
    assert (found.packing, found.group) == (packing, 32)
    assert found.codes.tobytes() == source.codes.tobytes()
    assert np.array_equal(found.scales, source.scales.astype(np.float16))
    row = next(t for t in report.tensors if t.name == "layers.0.ffn.up")
    assert 0 < row.relative_error < 2**-11
    notes = [text for text in report.fallbacks if text.startswith("layers.0.ffn.up:")]
    assert len(notes) == 1
    assert f"{name} has scales of 17 bits: its codes are kept" in notes[0]
    convert(path, tmp_path / "exact", exact=True)
    exact = matrices(tmp_path / "exact")["layers.0.ffn.up"]
    assert exact.packing == "f32"
    assert np.array_equal(exact.rows(), source.rows())
    with pytest.raises(ConversionError, match=f"{name} has scales of 17 bits"):
        convert(path, tmp_path / "strict", strict=True)


def test_scales_that_overflow_fp16_become_float32(tmp_path):
    path = with_linears(tmp_path / "m.gguf", k_blocks(12, d=60000.0))
    report = convert(path, tmp_path / "out")
    assert matrices(tmp_path / "out")["layers.0.ffn.up"].packing == "f32"
    assert any("layers.0.ffn.up: Q4_K" in t and "float32" in t for t in report.fallbacks)
