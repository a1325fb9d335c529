"""Write tests/data/prism_golden.npz: what mlx-vlm's own module makes of a tiny folded MLX pack.

    python tests/oracles/make_prism_golden.py

Needs mlx-vlm 0.7.10, which is not in any extra of ours: it brings a gigabyte of other libraries.
Its models alone need no more than `pip install --no-deps mlx-vlm==0.7.10 pillow requests` beside
the `oracles` extra. mlx-vlm rounds looked-up rows to float16; here they stay float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_vlm.models import prism_hadamard_qwen35 as vlm
from mlx_vlm.models.prism_hadamard_qwen35 import prism_hadamard_qwen35 as module

sys.path.insert(0, str(Path(__file__).parent.parent))

import hybrid
import prism_model
import tiny

PREFIX = "language_model."
VISION = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "num_heads": 2}


def logits(tokens: list[int]) -> np.ndarray:
    """Logits [T, vocab] float32 after each token."""
    made = tiny.weights(prism_model.SPEC)
    config = hybrid.pack_config(prism_model.SPEC, made)
    text = vlm.TextConfig.from_dict(config.pop("text_config"))
    vision = vlm.VisionConfig.from_dict({**VISION, "out_hidden_size": text.hidden_size})
    found = vlm.ModelConfig.from_dict({**config, "text_config": text, "vision_config": vision})
    model = vlm.Model(found)
    tensors = hybrid.mlx_tensors(prism_model.SPEC, made, PREFIX)
    weights = model.sanitize({name: mx.array(values) for name, values in tensors.items()})
    model.load_weights(list(weights.items()), strict=False)
    language = model.language_model
    table = language.model.embed_tokens
    ids = mx.array(tokens)
    planes = (table.weight[ids], table.scales[ids], table.biases[ids])
    rows = mx.dequantize(*planes, group_size=128, bits=2).astype(mx.float32)
    rows = module.hadamard_transform(rows, table.block, table.signs, inverse=True)
    output = language(ids[None], inputs_embeds=rows[None])
    return np.array(output.logits[0].astype(mx.float32))


def main() -> None:
    tokens = prism_model.tokens()
    found = logits(tokens)
    print(f"largest logit {np.abs(found).max():.3f}")
    np.savez_compressed(prism_model.PATH, logits=found[prism_model.POSITIONS])


if __name__ == "__main__":
    main()
