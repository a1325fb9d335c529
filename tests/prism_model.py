"""The tiny folded model whose logits mlx-vlm has computed: what it is and where they lie.

    python tests/oracles/make_prism_golden.py

writes tests/data/prism_golden.npz. Blocks of 512 are the smallest that mlx-vlm accepts.
"""

from __future__ import annotations

from pathlib import Path

import tiny
from tiny import Gdn, Tiny

PATH = Path(__file__).parent / "data" / "prism_golden.npz"
SPEC = Tiny(
    architecture="qwen35", layers=4, hidden=512, ffn=512, heads=4, kv_heads=2, head_dim=128,
    dims=32, vocab=320, tied=False, packing="t2", hadamard=512, theta=1e7, seed=21,
    kinds=("delta", "delta", "delta", "attention"), gdn=Gdn(2, 4, 64, 128),
)  # fmt: skip
POSITIONS = [0, 1, 69]


def tokens() -> list[int]:
    return [int(token) for token in tiny.Random(98).integers(0, 320, 70)]
