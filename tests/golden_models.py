"""The tiny models whose logits `transformers` has computed: what they are and where the logits lie.

    python tests/oracles/make_models_golden.py

writes tests/data/models_golden.npz; tests/models/test_golden.py compares every backend with it.
"""

from __future__ import annotations

import math
from pathlib import Path

import tiny
from tiny import Gdn, Tiny

from bonsai.config import Yarn

PATH = Path(__file__).parent / "data" / "models_golden.npz"


def yarn(factor: float, original: int, fast: float = 32.0, slow: float = 1.0) -> Yarn:
    """With the amplitude that transformers chooses when a config names none."""
    return Yarn(factor, original, fast, slow, 0.1 * math.log(factor) + 1)


HYBRID = {"architecture": "qwen35", "theta": 1e7, "dims": 16, "vocab": 512}
PATTERN = {"layers": 4, "kinds": ("delta", "delta", "delta", "attention")}
CASES = {
    "qwen3-tied": Tiny(),
    "qwen3-untied-head96": Tiny(tied=False, head_dim=96, heads=3, kv_heads=3, seed=1),
    "qwen3-theta-1e6-at-500": Tiny(theta=1e6, vocab=512, seed=2),
    "qwen3-yarn-at-500": Tiny(theta=1e6, yarn=yarn(4.0, 64), vocab=512, seed=3),
    "qwen3-hadamard": Tiny(hidden=256, heads=4, kv_heads=2, hadamard=128, vocab=512, seed=4),
    "llama-tied-ffn192": Tiny(architecture="llama", ffn=192, seed=5),
    "llama-untied-1001": Tiny(architecture="llama", tied=False, vocab=1001, packing="t5", seed=6),
    "llama-yarn": Tiny(
        architecture="llama", head_dim=32, heads=4, yarn=yarn(8.0, 16, 4.0, 2.0), vocab=512, seed=7
    ),
    "llama-two-shards": Tiny(architecture="llama", vocab=512, shard_bytes=50_000, seed=8),
    "llama-q4-q8": Tiny(
        architecture="llama", hidden=192, heads=3, kv_heads=3, ffn=320, packing="q4", table="q8",
        group=32, vocab=512, seed=9,
    ),
    "qwen35-at-500": Tiny(**HYBRID, **PATTERN, seed=11),
    "qwen35-untied": Tiny(**HYBRID, **PATTERN, tied=False, heads=4, kv_heads=2, seed=12),
    "qwen35-hadamard": Tiny(**HYBRID, **PATTERN, hidden=256, hadamard=64, seed=13),
    "qwen35-one-share": Tiny(
        **HYBRID, layers=3, kinds=("attention", "delta", "attention"), gdn=Gdn(3, 3, 24, 40),
        packing="f32", seed=14,
    ),
    "qwen35-one-key-head": Tiny(**HYBRID, **PATTERN, gdn=Gdn(1, 4, 32, 16), seed=15),
    "qwen3-b1-f16": Tiny(packing="b1", table="f16", tied=False, group=64, vocab=512, seed=10),
}  # fmt: skip


def tokens(name: str) -> list[int]:
    """The prompt of a case: 70 ids, or 501 where the far positions are the point."""
    spec = CASES[name]
    return tiny.Random(99).integers(0, spec.vocab, 501 if "500" in name else 70).tolist()


def positions(name: str) -> list[int]:
    """Where logits were kept."""
    return [0, 1, len(tokens(name)) - 1]
