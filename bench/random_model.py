"""Write a GGUF with the exact shapes of a real model and random ternary weights.

    python bench/random_model.py qwen3-1.7b out.gguf
    python bench/random_model.py qwen3.8-27b out.gguf ptq1_0

For speed and memory only: the weights are noise, and so is the text. Written tensor by tensor, so
memory stays small. A PQ2_0 block is one fp16 scale and 128 two-bit codes; a PTQ1_0 block is 26
bytes of base-3 digits, 24 of them with five each and 2 with four, and the scale after them.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ALIGNMENT = 32
F32, BF16, PQ2_0, PTQ1_0 = 0, 30, 142, 143
TERNARY = {"pq2_0": PQ2_0, "ptq1_0": PTQ1_0}
BLOCK = 128
BLOCK_BYTES = {PQ2_0: 34, PTQ1_0: 28}
RUN = 1 << 18
"""Blocks of noise made for each width."""
VOCAB = 151936
HYBRID_VOCAB, HYBRID_IDS = 248320, 248077
# The bytes that occur: four two-bit codes without a 3; five digits as a fraction, rounded up.
FOUR_CODES = ((np.arange(81)[:, None] // 3 ** np.arange(4) % 3) << (2 * np.arange(4))).sum(axis=1)
FIVE_DIGITS = (256 * np.arange(243) + 242) // 243
FOUR_DIGITS = FIVE_DIGITS[::3]  # the last digit is 0
Listed = tuple[str, int, tuple[int, ...]]
"""Name, GGUF type and [out, in] or [n] of a tensor."""


@dataclass(frozen=True)
class Shape:
    """The widths of a Qwen3 model; heads are 128 wide."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tied: bool


@dataclass(frozen=True)
class Hybrid:
    """Ternary-Bonsai-2-27B: delta nets, every fourth layer attention, folded, nothing tied."""

    layers: int = 64
    hidden: int = 5120
    ffn: int = 17408
    heads: int = 24
    kv_heads: int = 4
    head: int = 256
    key_heads: int = 16
    value_heads: int = 48
    width: int = 128  # of key and value heads
    taps: int = 4

    def attends(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0


SHAPES: dict[str, Shape | Hybrid] = {
    "qwen3.8-27b": Hybrid(),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": Shape(28, 2048, 6144, 16, 8, True),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, False),
}


def tensors(shape: Shape | Hybrid, kind: int) -> list[Listed]:
    """(name, GGUF type, [out, in] or [n]) of every tensor, in file order."""
    return _hybrid(shape, kind) if isinstance(shape, Hybrid) else _dense(shape, kind)


def _dense(shape: Shape, kind: int) -> list[Listed]:
    hidden, head = shape.hidden, 128
    q, kv = shape.heads * head, shape.kv_heads * head
    found: list[Listed] = [("token_embd.weight", kind, (VOCAB, hidden))]
    found.append(("output_norm.weight", F32, (hidden,)))
    if not shape.tied:
        found.append(("output.weight", kind, (VOCAB, hidden)))
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
        found += [(f"blk.{i}.{name}.weight", kind, size) for name, size in matrices.items()]
        found += [(f"blk.{i}.{name}.weight", F32, (size,)) for name, size in norms.items()]
    return found


def _hybrid(shape: Hybrid, kind: int) -> list[Listed]:
    hidden, head = shape.hidden, shape.head
    q, kv = shape.heads * head, shape.kv_heads * head
    values = shape.value_heads * shape.width
    channels = 2 * shape.key_heads * shape.width + values
    found: list[Listed] = [
        ("token_embd.weight", kind, (HYBRID_VOCAB, hidden)),
        ("output_norm.weight", F32, (hidden,)),
        ("output.weight", kind, (HYBRID_VOCAB, hidden)),
    ]
    attention: list[Listed] = [
        ("attn_q.weight", kind, (2 * q, hidden)),
        ("attn_k.weight", kind, (kv, hidden)),
        ("attn_v.weight", kind, (kv, hidden)),
        ("attn_output.weight", kind, (hidden, q)),
        ("attn_q_norm.weight", F32, (head,)),
        ("attn_k_norm.weight", F32, (head,)),
    ]
    delta: list[Listed] = [
        ("attn_qkv.weight", kind, (channels, hidden)),
        ("attn_gate.weight", kind, (values, hidden)),
        ("ssm_alpha.weight", BF16, (shape.value_heads, hidden)),
        ("ssm_beta.weight", BF16, (shape.value_heads, hidden)),
        ("ssm_conv1d.weight", F32, (channels, shape.taps)),
        ("ssm_a", F32, (shape.value_heads,)),
        ("ssm_dt.bias", F32, (shape.value_heads,)),
        ("ssm_norm.weight", F32, (shape.width,)),
        ("ssm_out.weight", kind, (hidden, values)),
    ]
    both: list[Listed] = [
        ("attn_norm.weight", F32, (hidden,)),
        ("post_attention_norm.weight", F32, (hidden,)),
        ("ffn_gate.weight", kind, (shape.ffn, hidden)),
        ("ffn_up.weight", kind, (shape.ffn, hidden)),
        ("ffn_down.weight", kind, (hidden, shape.ffn)),
    ]
    for i in range(shape.layers):
        mixer = attention if shape.attends(i) else delta
        found += [(f"blk.{i}.{name}", type_, size) for name, type_, size in mixer + both]
    return found


def metadata(shape: Shape | Hybrid, listed: list[Listed]) -> dict[str, Any]:
    """The keys that a reader needs, and a byte vocabulary padded to the real number of rows."""
    if isinstance(shape, Hybrid):
        return _hybrid_metadata(shape) | _fold(listed) | _vocabulary(HYBRID_IDS, "qwen35")
    return _dense_metadata(shape) | _vocabulary(VOCAB, "qwen2")


def _hybrid_metadata(shape: Hybrid) -> dict[str, Any]:
    values = {
        "block_count": shape.layers,
        "context_length": 262144,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": shape.taps,
        "ssm.state_size": shape.width,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * shape.width,
        "full_attention_interval": 4,
    }
    named = {"general.architecture": "qwen35", "general.name": "random"}
    return named | {f"qwen35.{key}": value for key, value in values.items()}


def _fold(listed: list[Listed]) -> dict[str, Any]:
    """The keys of weights that are folded with a Hadamard transform; the signs are random."""
    matrices = [(name, size) for name, kind, size in listed if kind in BLOCK_BYTES]
    widths = sorted({size[1] for _, size in matrices})
    signs = 1 - 2 * np.random.default_rng(1).integers(0, 2, sum(widths))
    values = {
        "version": 1,
        "block_size": 1024,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": widths,
        "sign_values": signs.tolist(),
        "weight_names": [name for name, _ in matrices if name != "token_embd.weight"],
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": True,
    }
    return {f"prism.hadamard.{key}": value for key, value in values.items()}


def _vocabulary(count: int, pre: str) -> dict[str, Any]:
    """The 256 bytes, one merge, and unused tokens up to `count`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [byte[b] for b in range(256)] + ["th"]
    tokens += [f"<|unused_{i}|>" for i in range(count - 259)]
    tokens += ["<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [5] * (count - 259) + [3, 3],
        "tokenizer.ggml.merges": [f"{byte[116]} {byte[104]}"],
        "tokenizer.ggml.eos_token_id": count - 1,
    }


def _dense_metadata(shape: Shape) -> dict[str, Any]:
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
    }


def main(name: str, out: Path, packing: str) -> None:
    shape = SHAPES[name]
    listed = tensors(shape, TERNARY[packing])
    generator = np.random.default_rng(0)
    noise = Noise(TERNARY[packing], generator)
    with out.open("wb") as file:
        _write_header(file, metadata(shape, listed), listed)
        _pad(file)
        header = file.tell()
        for tensor_name, kind, size in listed:
            _pad(file)
            if kind in BLOCK_BYTES:
                noise.write(file, *size)
            else:
                file.write(_small(tensor_name, kind, size, generator).tobytes())
        end = file.tell()
    print(f"{out}: {end:,} bytes, {len(listed)} tensors of {end - header:,} bytes")


def _small(
    name: str, kind: int, size: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """What is not ternary: gains of one, decays, and small noise elsewhere."""
    if name.endswith("ssm_a"):
        return -generator.uniform(0.01, 1, size).astype("<f4")
    if kind == F32 and len(size) == 1:
        return np.ones(size, "<f4")
    noise = generator.standard_normal(size, dtype=np.float32) * np.float32(size[1] ** -0.5)
    return (noise.view("<u4") >> 16).astype("<u2") if kind == BF16 else noise


class Noise:
    """Random ternary blocks: pieces of one long run of them for each width, which is quick."""

    def __init__(self, kind: int, generator: np.random.Generator) -> None:
        self._kind = kind
        self._generator = generator
        self._runs: dict[int, np.ndarray] = {}

    def write(self, file: BinaryIO, rows: int, columns: int) -> None:
        if columns not in self._runs:
            self._runs[columns] = self._blocks(columns)
        run, left = self._runs[columns], rows * columns // BLOCK
        while left:
            start = int(self._generator.integers(0, len(run) // 2))
            piece = run[start : start + left]
            file.write(piece)
            left -= len(piece)

    def _blocks(self, columns: int) -> np.ndarray:
        data = np.empty((RUN, BLOCK_BYTES[self._kind]), np.uint8)
        # Keeps the outputs near the size of the inputs: two thirds of the trits are not zero.
        scale = self._generator.uniform(0.8, 1.2, RUN) * (1.5 / columns) ** 0.5
        scale_bytes = scale.astype("<f2")[:, None].view(np.uint8)
        if self._kind == PQ2_0:
            data[:, :2] = scale_bytes
            data[:, 2:] = self._drawn(FOUR_CODES, 32)
        else:
            data[:, :24] = self._drawn(FIVE_DIGITS, 24)
            data[:, 24:26] = self._drawn(FOUR_DIGITS, 2)
            data[:, 26:] = scale_bytes
        return data

    def _drawn(self, values: np.ndarray, width: int) -> np.ndarray:
        index = self._generator.integers(0, len(values), (RUN, width), np.uint8)
        return values.astype(np.uint8)[index]


def _write_header(file: BinaryIO, values: dict[str, Any], listed: list[Listed]) -> None:
    file.write(b"GGUF" + struct.pack("<Iqq", 3, len(listed), len(values)))
    for key, value in values.items():
        file.write(_string(key) + _value(value))
    offset = 0
    for name, kind, size in listed:
        dims = size[::-1]
        file.write(_string(name) + struct.pack(f"<I{len(dims)}qiQ", len(dims), *dims, kind, offset))
        offset += -(-stored(kind, size) // ALIGNMENT) * ALIGNMENT


def stored(kind: int, size: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file."""
    elements = int(np.prod(size))
    if kind in BLOCK_BYTES:
        return elements // BLOCK * BLOCK_BYTES[kind]
    return elements * (2 if kind == BF16 else 4)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<i", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<i?", 7, value)
    if isinstance(value, float):
        return struct.pack("<if", 6, value)
    if isinstance(value, int):
        return struct.pack("<iI", 4, value)
    if value and isinstance(value[0], int):
        return struct.pack("<iiQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()
    return struct.pack("<iiQ", 9, 8, len(value)) + b"".join(map(_string, value))


if __name__ == "__main__":
    asked = [*sys.argv[1:], *["pq2_0"] * (len(sys.argv) == 3)]
    if len(asked) != 3 or asked[0] not in SHAPES or asked[2] not in TERNARY:
        sys.exit(f"usage: random_model.py {'|'.join(SHAPES)} OUT.gguf [{'|'.join(TERNARY)}]")
    main(asked[0], Path(asked[1]), asked[2])
