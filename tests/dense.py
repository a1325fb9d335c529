"""A plain float64 forward pass over dequantized matrices: what every backend is held against.

Written from the formulas, apart from the package: it shares no arithmetic with `bonsai.ternary`,
`bonsai.affine`, `bonsai.config` or the reference ops. One pass over all tokens, no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bonsai.matrix import DenseMatrix, Matrix


def logits(config: dict, tensors: Callable[[str], Matrix], vectors, tokens) -> np.ndarray:
    """Logits [T, vocab] float64 after each of `tokens`, from a config.json and tensors by name."""
    eps = config["norm_eps"]
    table = dequantized(tensors("embedding"))
    x = table[np.asarray(tokens)]
    for i in range(config["layers"]):
        name = f"layers.{i}"
        h = norm(x, vectors(f"{name}.attn_norm"), eps)
        delta = config["architecture"] == "qwen35" and config["kinds"][i] == "delta"
        mixer = block_delta if delta else block_attention
        x = x + mixer(config, name, tensors, vectors, h)
        h = norm(x, vectors(f"{name}.ffn_norm"), eps)
        gate = h @ dequantized(tensors(f"{name}.ffn.gate")).T
        up = h @ dequantized(tensors(f"{name}.ffn.up")).T
        x = x + (gate * _sigmoid(gate) * up) @ dequantized(tensors(f"{name}.ffn.down")).T
    head = table if config["tied"] else dequantized(tensors("head"))
    return norm(x, vectors("norm"), eps) @ head.T


def block_attention(config: dict, name: str, tensors, vectors, x: np.ndarray) -> np.ndarray:
    heads, kv_heads, width = config["heads"], config["kv_heads"], config["head_dim"]
    q, k, v = (x @ dequantized(tensors(f"{name}.attn.{part}")).T for part in "qkv")
    gate = None
    if config["architecture"] == "qwen35":  # each head: its query, then its gate
        pairs = q.reshape(len(x), heads, 2, width)
        q, gate = pairs[:, :, 0], pairs[:, :, 1]
    q, k, v = (a.reshape(len(x), -1, width) for a in (q, k, v))
    if config["architecture"] != "llama":
        q = norm(q, vectors(f"{name}.attn.q_norm"), config["norm_eps"])
        k = norm(k, vectors(f"{name}.attn.k_norm"), config["norm_eps"])
    q, k = rotated(q, config["rope"]), rotated(k, config["rope"])
    out = attended(q, k, v, heads // kv_heads)
    if gate is not None:
        out = out * _sigmoid(gate)
    return out.reshape(len(x), -1) @ dequantized(tensors(f"{name}.attn.out")).T


def block_delta(config: dict, name: str, tensors, vectors, x: np.ndarray) -> np.ndarray:
    gdn, name = config["gdn"], f"{name}.gdn"
    mixed, z, a, b = (x @ dequantized(tensors(f"{name}.{p}")).T for p in ("qkv", "z", "a", "b"))
    mixed = convolved(mixed, vectors(f"{name}.conv"))
    keys = gdn["key_heads"] * gdn["key_dim"]
    q, k = (mixed[:, part].reshape(len(x), -1, gdn["key_dim"])
            for part in (slice(0, keys), slice(keys, 2 * keys)))  # fmt: skip
    q, k = unit(q) / math.sqrt(gdn["key_dim"]), unit(k)
    v, z = (part.reshape(len(x), -1, gdn["value_dim"]) for part in (mixed[:, 2 * keys :], z))
    rate = np.exp(np.asarray(vectors(f"{name}.a_log"), np.float64))
    kept = np.exp(-rate * np.log1p(np.exp(a + vectors(f"{name}.dt_bias"))))
    out = recurred(q, k, v, kept, _sigmoid(b))
    out = norm(out, vectors(f"{name}.norm"), config["norm_eps"]) * z * _sigmoid(z)
    return out.reshape(len(x), -1) @ dequantized(tensors(f"{name}.out")).T


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def convolved(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """silu of the causal convolution of each column of x [T, C] with its taps [C, n]."""
    y = np.zeros(x.shape)
    for t in range(len(x)):
        for age in range(min(taps.shape[1], t + 1)):  # the last tap is for age 0
            y[t] += taps[:, taps.shape[1] - 1 - age].astype(np.float64) * x[t - age]
    return y * _sigmoid(y)


def recurred(q, k, v, kept, beta, memory: np.ndarray | None = None) -> np.ndarray:
    """The gated delta rule with M [Dv, Dk] for each head; `kept` is the factor, not its log."""
    q, k, v, kept, beta = (np.asarray(a, dtype=np.float64) for a in (q, k, v, kept, beta))
    share = v.shape[1] // k.shape[1]
    y = np.zeros(v.shape)
    for h in range(v.shape[1]):
        M = np.zeros((v.shape[2], k.shape[2])) if memory is None else memory[h].T.copy()
        for t in range(len(v)):
            key = k[t, h // share]
            M = kept[t, h] * M
            M = M + beta[t, h] * np.outer(v[t, h] - M @ key, key)
            y[t, h] = M @ q[t, h // share]
    return y


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, share: int, first: int = 0) -> np.ndarray:
    """Causal attention one query at a time; q row 0 stands at position `first` of k and v."""
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            end = first + t + 1
            scores = k[:end, h // share] @ q[t, h] / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, h] = (weights / weights.sum()) @ v[:end, h // share]
    return out


def rotated(x: np.ndarray, rope: dict, first: int = 0) -> np.ndarray:
    """x [T, H, D] with pair (i, i + dims/2) turned as a complex number, row 0 at `first`."""
    half = rope["dims"] // 2
    out = np.array(x, dtype=np.float64)
    turn = np.array([_frequency(i, rope) for i in range(half)])
    positions = first + np.arange(len(x))
    factor = rope["yarn"]["attention_factor"] if rope.get("yarn") else 1.0
    unit = factor * np.exp(1j * positions[:, None] * turn)[:, None, :]
    pairs = (out[..., :half] + 1j * out[..., half : 2 * half]) * unit
    out[..., :half], out[..., half : 2 * half] = pairs.real, pairs.imag
    return out


def _frequency(i: int, rope: dict) -> float:
    """Radians per position of pair i; with YaRN a mix of the plain and the stretched one."""
    base = math.exp(-2 * i / rope["dims"] * math.log(rope["theta"]))
    yarn = rope.get("yarn")
    if not yarn:
        return base

    def index_of(turns: float) -> float:  # the i whose pair makes so many turns in the old context
        return math.log(yarn["original_context"] / (2 * math.pi * turns), rope["theta"]) * (
            rope["dims"] / 2
        )

    low = max(math.floor(index_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(index_of(yarn["beta_slow"])), rope["dims"] - 1)
    if low == high:
        high += 0.001
    share = min(max((i - low) / (high - low), 0.0), 1.0)
    return (1 - share) * base + share * base / yarn["factor"]


def norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    x = np.asarray(x, dtype=np.float64)
    power = (x * x).sum(axis=-1, keepdims=True) / x.shape[-1]
    return x * (power + eps) ** -0.5 * np.asarray(gain, dtype=np.float64)


def _sigmoid(a: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(a / 2))


def dequantized(matrix: Matrix) -> np.ndarray:
    """The matrix in the original basis, float64 [out, in]: it multiplies an untransformed input."""
    stored = stored_values(matrix)
    if matrix.transform is None:
        return stored
    width, block = matrix.shape[1], matrix.transform.block
    small = np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    full = np.kron(np.eye(width // block), small / math.sqrt(block))
    return stored @ full * matrix.transform.signs


def stored_values(matrix: Matrix) -> np.ndarray:
    """The values of the planes, element by element from the definitions of the packings."""
    if isinstance(matrix, DenseMatrix):
        if matrix.packing == "bf16":
            bits = matrix.values.astype(np.uint32) * 65536
            return bits.view(np.float32).astype(np.float64)
        return matrix.values.astype(np.float64)
    column = np.arange(matrix.shape[1])
    digits = _DIGITS[matrix.packing](matrix.codes, column, matrix.group).astype(np.float64)
    of_group = column // matrix.group
    values = digits * matrix.scales[:, of_group].astype(np.float64)
    if matrix.biases is not None:
        values += matrix.biases[:, of_group].astype(np.float64)
    return values


def _t2(codes: np.ndarray, column: np.ndarray, group: int) -> np.ndarray:
    return (codes[:, column // 16].astype(np.int64) // 4 ** (column % 16)) % 4 - 1


def _b1(codes: np.ndarray, column: np.ndarray, group: int) -> np.ndarray:
    return 2 * ((codes[:, column // 32].astype(np.int64) // 2 ** (column % 32)) % 2) - 1


def _t5(codes: np.ndarray, column: np.ndarray, group: int) -> np.ndarray:
    """Three stages of n bytes; digit d (of 3^4, 3^3, ...) of byte b is element d n + b there."""
    inside, n8, n16 = column % group, group // 8, group // 16
    ends = (5 * n8, 5 * n8 + 5 * n16)
    stage = (inside >= ends[0]).astype(int) + (inside >= ends[1])
    length = np.array([n8, n16, group // 64])[stage]
    element = inside - np.array([0, *ends])[stage]
    byte = np.array([0, n8, n8 + n16])[stage] + element % length
    number = codes[:, column // group * (13 * group // 64) + byte].astype(np.int64) * 243 // 256
    return number // 3 ** (4 - element // length) % 3 - 1


def _q4(codes: np.ndarray, column: np.ndarray, group: int) -> np.ndarray:
    return codes[:, column // 2].astype(np.int64) // 16 ** (column % 2) % 16


def _q8(codes: np.ndarray, column: np.ndarray, group: int) -> np.ndarray:
    return codes[:, column]


_DIGITS = {"t2": _t2, "t5": _t5, "b1": _b1, "q4": _q4, "q8": _q8}
