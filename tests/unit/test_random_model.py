"""bench/random_model.py writes the shapes of the real files: as many tensors, as many bytes."""

from __future__ import annotations

import io
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bonsai import ternary

ROOT = Path(__file__).parents[2]
PAYLOAD = {"pq2_0": 7_195_047_936, "ptq1_0": 5_935_527_936}
"""Bytes of the published Ternary-Bonsai-2-27B files without their headers of 11,120,992 bytes."""


@pytest.fixture(scope="module")
def bench():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "bench/random_model.py")))


@pytest.mark.parametrize("packing", PAYLOAD)
def test_the_27b_has_the_tensors_and_bytes_of_the_real_one(bench, packing):
    listed = bench.tensors(bench.SHAPES["qwen3.8-27b"], bench.TERNARY[packing])
    assert len(listed) == len({name for name, _, _ in listed}) == 851
    assert sum(kind == bench.F32 for _, kind, _ in listed) == 353
    assert sum(bench.stored(kind, size) for _, kind, size in listed) == PAYLOAD[packing]
    keys = bench.metadata(bench.SHAPES["qwen3.8-27b"], listed)
    assert len(keys["prism.hadamard.weight_names"]) == 401
    assert keys["prism.hadamard.sign_widths"] == [5120, 6144, 17408]
    assert set(keys["prism.hadamard.sign_values"]) == {-1, 1}
    assert len(keys["prism.hadamard.sign_values"]) == 28672
    assert len(keys["tokenizer.ggml.tokens"]) == 248077


@pytest.mark.parametrize("packing", PAYLOAD)
def test_its_bytes_are_trits(bench, packing):
    kind = bench.TERNARY[packing]
    noise = bench.Noise(kind, np.random.default_rng(0))
    file = io.BytesIO()
    noise.write(file, 4, 1024)
    blocks = np.frombuffer(file.getvalue(), np.uint8).reshape(32, bench.BLOCK_BYTES[kind])
    if packing == "ptq1_0":
        codes, scales = np.ascontiguousarray(blocks[:, :26]), blocks[:, 26:]
        assert (ternary.pack(ternary.unpack(codes, "t5", 128, 128), "t5", 128) == codes).all()
    else:
        codes, scales = np.ascontiguousarray(blocks[:, 2:]), blocks[:, :2]
        assert not (codes & (codes >> 1) & 0x55).any()
    assert (np.ascontiguousarray(scales).view("<f2") > 0).all()
