"""The tensors of Qwen3.5 models as we keep them: order of heads, decays, norms, folds.

Knows the conventions of each source. Does not know files: it wraps what `SourceTensor`s read.

We keep value heads grouped (those that share a key head side by side), A_log raw, norms ready to
multiply and convolutions as [channels, taps].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bonsai.convert.config_qwen35 import Pack
from bonsai.convert.hadamard import Fold
from bonsai.convert.source import Rows, SourceTensor
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix, SignedHadamard

__all__ = ["from_gguf", "from_huggingface"]

Change = Callable[[Matrix], Matrix]
PART = re.compile(r"blk\.(\d+)\.([a-z0-9_.]+)")
# Norms that Hugging Face stores as the gain minus one; that of the delta nets is not among them.
CENTRED = re.compile(
    r"model\.(norm|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm))"
    r"\.weight"
)
CONV = ".linear_attn.conv1d.weight"
DRAFTING = "mtp."
SIGNS = ".signs"


def from_gguf(
    tensors: Mapping[str, SourceTensor], config: Mapping[str, Any], fold: Fold | None
) -> tuple[dict[str, SourceTensor], list[str]]:
    """The tensors of a GGUF file as we keep them, and what to say about those left out.

    Value head j of ours is head (j % s) * key_heads + j // s of the file, s heads to a key head:
    the files are tiled, so that head i reads key head i % key_heads.
    """
    found, drafting = {}, 0
    for name, tensor in tensors.items():
        match = PART.fullmatch(name)
        if match and int(match[1]) >= config["layers"]:
            drafting += 1
            continue
        if match:
            tensor = _untiled(tensor, match[2], config["gdn"], fold)
        if fold is not None and name in fold.names:
            tensor = _folded(tensor, fold)
        found[name] = tensor
    notes = [f"{drafting} tensors that draft tokens are left out"] if drafting else []
    return found, notes


def from_huggingface(
    tensors: Mapping[str, SourceTensor],
    config: Mapping[str, Any],
    pack: Pack | None,
    where: str,
    mlx: bool,
) -> tuple[dict[str, SourceTensor], list[str]]:
    """The tensors of a folder as we keep them, and what to say about those left out.

    Convolutions are [channels, 1, taps] in models of transformers, whose norms are centred on zero,
    and [channels, taps, 1] in those that MLX has converted, whose norms are ready to multiply. That
    difference, and not the values of norms or which other tensors there are, decides about both.
    `mlx` decides where there is no convolution.
    """
    channels, taps = _channels(config), config["gdn"]["taps"]
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFTING)}
    shapes = {tensor.shape for name, tensor in found.items() if name.endswith(CONV)}
    if not shapes <= {(channels, 1, taps)} and not shapes <= {(channels, taps, 1)}:
        raise ConversionError(
            f"{where}: convolutions are {sorted(shapes)[:3]}, expected all of "
            f"{(channels, 1, taps)} or all of {(channels, taps, 1)}"
        )
    centred = (channels, 1, taps) in shapes if shapes else not mlx
    for name, tensor in found.items():
        if name.endswith(CONV):
            found[name] = _flat(tensor, (channels, taps))
        elif centred and CENTRED.fullmatch(name):
            found[name] = _changed(tensor, _plus_one)
    if pack is not None:
        found = _unpacked(found, pack, where)
    drafting = sum(name.startswith(DRAFTING) for name in tensors)
    return found, [f"{drafting} tensors that draft tokens are left out"] if drafting else []


def _channels(config: Mapping[str, Any]) -> int:
    gdn = config["gdn"]
    keys, values = gdn["key_heads"] * gdn["key_dim"], gdn["value_heads"] * gdn["value_dim"]
    return int(2 * keys + values)


def _flat(tensor: SourceTensor, shape: tuple[int, int]) -> SourceTensor:
    """A convolution as [channels, taps]; it is read whole."""

    def read(rows: Rows) -> Matrix:
        values = tensor.read(slice(None)).rows().reshape(shape)[rows]
        return DenseMatrix(tensor.name, "f32", values.shape, values)

    return replace(tensor, shape=shape, read=read)


def _plus_one(block: Matrix) -> Matrix:
    values = block.rows() + np.float32(1)
    return DenseMatrix(block.name, "f32", block.shape, values)


def _unpacked(
    tensors: Mapping[str, SourceTensor], pack: Pack, where: str
) -> dict[str, SourceTensor]:
    """The tensors of a folded pack: the signs of each module go into its matrix."""
    found = dict(tensors)
    known: dict[int, SignedHadamard] = {}
    for module in pack.modules:
        weight, signs = found.get(f"{module}.weight"), found.pop(module + SIGNS, None)
        if weight is None or signs is None or weight.shape[-1:] != signs.shape:
            raise ConversionError(
                f"{where}: the folded module {module} needs a weight and one sign for each column",
                hint="the config and the tensors come from different models",
            )
        width = weight.shape[-1]
        values = signs.read(slice(None)).rows().reshape(-1)
        if not (np.abs(values) == 1).all() or width % pack.block:
            raise ConversionError(
                f"{where}: {module}: its signs are not all -1 or 1, or its {width} columns are not "
                f"whole blocks of {pack.block}"
            )
        transform = SignedHadamard(pack.block, values.astype(np.int8))
        if not np.array_equal(known.setdefault(width, transform).signs, transform.signs):
            raise UnsupportedModel(
                f"{where}: {module} has other signs than the modules before it with {width} columns"
            )
        found[f"{module}.weight"] = _transformed(weight, known[width])
    return found


def _untiled(
    tensor: SourceTensor, part: str, gdn: Mapping[str, int], fold: Fold | None
) -> SourceTensor:
    share, width = gdn["value_heads"] // gdn["key_heads"], gdn["value_dim"]
    heads = np.arange(gdn["value_heads"]).reshape(share, gdn["key_heads"]).T.reshape(-1)
    keys = 2 * gdn["key_heads"] * gdn["key_dim"]
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return _with_rows(tensor, np.r_[np.arange(keys), keys + _spread(heads, width)])
    if part == "attn_gate.weight":
        return _with_rows(tensor, _spread(heads, width))
    if part in ("ssm_alpha.weight", "ssm_beta.weight"):
        return _with_rows(tensor, heads)
    if part == "ssm_dt.bias":
        return _changed(tensor, lambda block: _with_columns(block, heads))
    if part == "ssm_a":
        return _changed(tensor, lambda block: _logs(_with_columns(block, heads)))
    if part != "ssm_out.weight" or (fold is not None and _is_grouped(fold, tensor.name, share)):
        return tensor
    return _changed(tensor, lambda block: _with_columns(block, heads))


def _is_grouped(fold: Fold, name: str, share: int) -> bool:
    """Whether the columns are in our order. Tiled ones that are folded cannot be put into it."""
    if name not in fold.names:
        return False
    if not fold.grouped and share > 1:
        raise UnsupportedModel(
            f"{name}: it is folded over tiled heads (prism.hadamard.gdn_v_grouped is not true), "
            "which is not supported"
        )
    return True


def _folded(tensor: SourceTensor, fold: Fold) -> SourceTensor:
    return _transformed(tensor, fold.transforms[tensor.shape[-1]])


def _transformed(tensor: SourceTensor, transform: SignedHadamard) -> SourceTensor:
    return _changed(tensor, lambda block: replace(block, transform=transform))


def _spread(heads: np.ndarray, width: int) -> np.ndarray:
    """The rows of heads in this order, each of `width` rows."""
    return (heads[:, None] * width + np.arange(width)).reshape(-1)


def _with_rows(tensor: SourceTensor, order: np.ndarray) -> SourceTensor:
    """Row i is row order[i] of the source. A shape that is not the config's is left for later."""
    if len(order) != tensor.shape[0]:
        return tensor

    def read(rows: Rows) -> Matrix:
        return tensor.read(order[rows])

    other = None if tensor.otherwise is None else _with_rows(tensor.otherwise, order)
    return replace(tensor, read=read, otherwise=other)


def _changed(tensor: SourceTensor, change: Change) -> SourceTensor:
    def read(rows: Rows) -> Matrix:
        return change(tensor.read(rows))

    other = None if tensor.otherwise is None else _changed(tensor.otherwise, change)
    return replace(tensor, read=read, otherwise=other)


def _with_columns(block: Matrix, heads: np.ndarray) -> Matrix:
    """The columns of heads in this order; packed codes move in whole groups."""
    if block.shape[1] % len(heads):
        return block  # its shape is refused later
    width = block.shape[1] // len(heads)

    def moved(plane: np.ndarray) -> np.ndarray:
        parts = plane.reshape(len(plane), len(heads), -1)[:, heads]
        return np.ascontiguousarray(parts).reshape(plane.shape)

    if isinstance(block, DenseMatrix):
        return replace(block, values=moved(block.values))
    if width % block.group:
        raise UnsupportedModel(
            f"{block.name}: heads of {width} columns do not hold whole groups of {block.group}",
            hint="convert the model from its Hugging Face folder",
        )
    assert isinstance(block, PackedMatrix)
    biases = None if block.biases is None else moved(block.biases)
    return replace(block, codes=moved(block.codes), scales=moved(block.scales), biases=biases)


def _logs(block: Matrix) -> Matrix:
    """The file has -exp(A_log)."""
    values = block.rows()
    if not (values < 0).all():
        raise ConversionError(f"{block.name}: has values that are not below 0, so it is no -exp(A)")
    logs = np.log(-values.astype(np.float64)).astype(np.float32)
    return DenseMatrix(block.name, "f32", block.shape, logs)
