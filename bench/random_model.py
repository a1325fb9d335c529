"""Write a GGUF with the exact shapes of a real model and random ternary weights (PQ2_0).

    python bench/random_model.py qwen3-1.7b out.gguf

For speed and memory only: the weights are noise, and so is the text. Written tensor by tensor, so
memory stays small. A PQ2_0 block is one fp16 scale and 128 two-bit codes.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ALIGNMENT = 32
F32, PQ2_0 = 0, 142
BLOCK, BLOCK_BYTES = 128, 34
ROWS_AT_ONCE = 4096
VOCAB = 151936


@dataclass(frozen=True)
class Shape:
    """The widths of a Qwen3 model; heads are 128 wide."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tied: bool


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": Shape(28, 2048, 6144, 16, 8, True),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, False),
}


def tensors(shape: Shape) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, GGUF type, [out, in] or [n]) of every tensor, in file order."""
    hidden, head = shape.hidden, 128
    q, kv = shape.heads * head, shape.kv_heads * head
    found = [("token_embd.weight", PQ2_0, (VOCAB, hidden)), ("output_norm.weight", F32, (hidden,))]
    if not shape.tied:
        found.append(("output.weight", PQ2_0, (VOCAB, hidden)))
    for i in range(shape.layers):
        matrices = {
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_gate": (shape.ffn, hidden),
            "ffn_up": (shape.ffn, hidden),
            "ffn_down": (hidden, shape.ffn),
        }
        norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": head, "attn_k_norm": head}
        found += [(f"blk.{i}.{name}.weight", PQ2_0, size) for name, size in matrices.items()]
        found += [(f"blk.{i}.{name}.weight", F32, (size,)) for name, size in norms.items()]
    return found


def metadata(shape: Shape) -> dict[str, Any]:
    """The keys that a reader needs, and a byte vocabulary padded to the real number of rows."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [byte[b] for b in range(256)] + ["th"]
    tokens += [f"<|unused_{i}|>" for i in range(VOCAB - 259)]
    tokens += ["<|im_start|>", "<|im_end|>"]
    prefix = "qwen3."
    return {
        "general.architecture": "qwen3",
        "general.name": "random",
        prefix + "block_count": shape.layers,
        prefix + "context_length": 32768,
        prefix + "embedding_length": shape.hidden,
        prefix + "feed_forward_length": shape.ffn,
        prefix + "attention.head_count": shape.heads,
        prefix + "attention.head_count_kv": shape.kv_heads,
        prefix + "attention.key_length": 128,
        prefix + "attention.value_length": 128,
        prefix + "attention.layer_norm_rms_epsilon": 1e-6,
        prefix + "rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [5] * (VOCAB - 259) + [3, 3],
        "tokenizer.ggml.merges": [f"{byte[116]} {byte[104]}"],
        "tokenizer.ggml.eos_token_id": VOCAB - 1,
    }


def main(name: str, out: Path) -> None:
    shape = SHAPES[name]
    generator = np.random.default_rng(0)
    with out.open("wb") as file:
        _write_header(file, metadata(shape), tensors(shape))
        for _, kind, size in tensors(shape):
            _pad(file)
            if kind == F32:
                file.write(np.ones(size, "<f4").tobytes())
            else:
                _write_ternary(file, size, generator)
    print(f"{out}: {out.stat().st_size:,} bytes, {len(tensors(shape))} tensors")


def _write_ternary(file: BinaryIO, size: tuple[int, ...], generator: np.random.Generator) -> None:
    digits = np.arange(81)[:, None] // 3 ** np.arange(4) % 3
    table = (digits << (2 * np.arange(4))).sum(axis=1).astype(np.uint8)  # bytes without a code 3
    rows, columns = size
    blocks = columns // BLOCK
    for start in range(0, rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, rows - start)
        data = np.empty((count * blocks, BLOCK_BYTES), np.uint8)
        # Keeps the outputs near the size of the inputs: two thirds of the trits are not zero.
        scale = generator.uniform(0.8, 1.2, len(data)) * (1.5 / columns) ** 0.5
        data[:, :2] = scale.astype("<f2")[:, None].view(np.uint8)
        data[:, 2:] = table[generator.integers(0, 81, (len(data), BLOCK // 4))]
        file.write(data.tobytes())


def _write_header(
    file: BinaryIO, values: dict[str, Any], listed: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    file.write(b"GGUF" + struct.pack("<Iqq", 3, len(listed), len(values)))
    for key, value in values.items():
        file.write(_string(key) + _value(value))
    offset = 0
    for name, kind, size in listed:
        dims = size[::-1]
        file.write(_string(name) + struct.pack(f"<I{len(dims)}qiQ", len(dims), *dims, kind, offset))
        elements = int(np.prod(size))
        nbytes = 4 * elements if kind == F32 else elements // BLOCK * BLOCK_BYTES
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<i", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<if", 6, value)
    if isinstance(value, int):
        return struct.pack("<iI", 4, value)
    if value and isinstance(value[0], int):
        return struct.pack("<iiQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()
    return struct.pack("<iiQ", 9, 8, len(value)) + b"".join(map(_string, value))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: random_model.py {'|'.join(SHAPES)} OUT.gguf")
    main(sys.argv[1], Path(sys.argv[2]))
