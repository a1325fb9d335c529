"""What a foreign file says about Hadamard-folded weights: which tensors, which signs.

Knows the `prism.hadamard.*` keys of GGUF files. Does not know files. Whatever is not known exactly
is refused by name: a fold that is undone wrongly gives fluent nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bonsai.config import Fields
from bonsai.convert.encode import row_blocks
from bonsai.convert.report import TensorReport
from bonsai.convert.source import NotOfThisClass, SourceTensor
from bonsai.errors import ConversionError, UnsupportedModel
from bonsai.matrix import SignedHadamard

__all__ = ["Fold", "proof_of", "read_gguf_fold"]

SPACE = "prism.hadamard."
TRANSFORM = "normalized-sylvester-walsh-hadamard"
MAX_WIDTHS = 64
FOLDABLE = re.compile(
    r"output\.weight|blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down)|ssm_out)\.weight"
)
LOOKUP = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Fold:
    """The folded tensors by their names in the source, and the transform for each input width.

    `grouped`: the columns of ssm_out are in the order of heads that Hugging Face has, although
    those of the other tensors are tiled.
    """

    names: frozenset[str]
    transforms: Mapping[int, SignedHadamard] = field(repr=False)
    grouped: bool = False


def read_gguf_fold(
    metadata: Mapping[str, Any], shape_of: Mapping[str, tuple[int, ...]], where: str
) -> Fold | None:
    """The fold of a file, None where it has none. `shape_of` are its tensors, [rows, columns]."""
    keys = {k[len(SPACE) :]: v for k, v in metadata.items() if k.startswith(SPACE)}
    if not keys:
        return None
    fields = Fields(keys, f"{where}: prism.hadamard")
    version = fields.take(int, "version")
    if version not in (1, 2):
        raise UnsupportedModel(f"{fields.where}: version {version} is not known; supported: 1, 2")
    block = fields.take_size("block_size", 1 << 17)
    if block & (block - 1):
        raise UnsupportedModel(f"{fields.where}: block_size {block} is not a power of two")
    for key, only in (("transform", TRANSFORM), ("axis", "input-last-dimension")):
        if fields.take(str, key) != only:
            raise UnsupportedModel(f"{fields.where}: '{key}' is {keys[key]!r}, expected {only!r}")
    names = _names(fields, "weight_names", FOLDABLE.fullmatch, shape_of)
    lookups = _names(fields, "inverse_weight_names", LOOKUP.__eq__, shape_of)
    tied = fields.take(bool, "tied_output", False)
    _check_tied(fields.where, version, tied, lookups, shape_of)
    folded = frozenset(names + lookups)
    transforms = _transforms(fields, block, {shape_of[name][-1] for name in folded})
    grouped = fields.take(bool, "gdn_v_grouped", False)
    fields.finish()
    return Fold(folded, transforms, grouped)


def _names(
    fields: Fields,
    key: str,
    allowed: Callable[[str], Any],
    shape_of: Collection[str],
) -> list[str]:
    names = fields.take_any(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"{fields.where}: '{key}' is not a list of names")
    for name in names:
        if name not in shape_of:
            raise ConversionError(f"{fields.where}: '{key}' has {name}, which is not in the file")
        if not allowed(name):
            raise UnsupportedModel(f"{fields.where}: '{key}' has {name}, which cannot be folded")
    if len(set(names)) != len(names):
        raise ConversionError(f"{fields.where}: '{key}' has the same name twice")
    return names


def _check_tied(
    where: str, version: int, tied: bool, lookups: list[str], shape_of: Collection[str]
) -> None:
    """A tied head reads the table as a linear: the same matrix, folded for both."""
    if tied != (version == 2):
        raise UnsupportedModel(f"{where}: 'tied_output' is {tied} in version {version}")
    if tied and ("output.weight" in shape_of or not lookups):
        raise ConversionError(f"{where}: 'tied_output' is true, but the output is not the table")
    if not tied and lookups and "output.weight" not in shape_of:
        raise ConversionError(
            f"{where}: the table is folded and there is no output.weight, but 'tied_output' is "
            "not true"
        )


def _transforms(fields: Fields, block: int, used: set[int]) -> dict[int, SignedHadamard]:
    mode = fields.take(str, "sign_mode")
    widths = _integers(fields, "sign_widths")
    values = np.array(_integers(fields, "sign_values"), np.int64)
    if mode == "identity":
        widths = sorted(used)
        values = np.ones(sum(widths), np.int64)
    elif mode != "explicit":
        raise UnsupportedModel(
            f"{fields.where}: sign_mode is {mode!r}; supported: 'explicit', 'identity'"
        )
    if len(widths) > MAX_WIDTHS or len(set(widths)) != len(widths) or sum(widths) != len(values):
        raise ConversionError(
            f"{fields.where}: {len(values)} sign_values do not fit sign_widths {widths[:8]}"
        )
    if not (np.abs(values) == 1).all():
        raise ConversionError(f"{fields.where}: sign_values has values other than -1 and 1")
    ends = np.cumsum(widths)
    signs = {w: values[end - w : end].astype(np.int8) for w, end in zip(widths, ends, strict=True)}
    for width in used:
        if width not in signs or width % block:
            raise ConversionError(
                f"{fields.where}: no signs for tensors of {width} columns in blocks of {block}"
            )
    return {width: SignedHadamard(block, signs[width]) for width in used}


def _integers(fields: Fields, key: str) -> list[int]:
    found = fields.take_any(key, [])
    if not isinstance(found, list) or not all(type(n) is int and abs(n) < 2**31 for n in found):
        raise UnsupportedModel(f"{fields.where}: '{key}' is not a list of whole numbers")
    return found


def proof_of(
    names: Mapping[str, SourceTensor], reports: Iterable[TensorReport]
) -> tuple[str, np.ndarray, np.ndarray] | None:
    """(matrix, x, y): what the smallest folded matrix that was stored without loss makes of x.

    `names` are the sources of the tensors by their names with us.
    """
    for report in sorted(reports, key=lambda report: report.weights):
        source = names[report.name]
        if report.relative_error or len(report.shape) != 2 or report.name == "embedding":
            continue
        try:
            found = _proof(source, report)
        except NotOfThisClass:  # only some rows of it are; it was stored in the other class
            found = None if source.otherwise is None else _proof(source.otherwise, report)
        if found is not None:
            return found
    return None


def _proof(source: SourceTensor, report: TensorReport) -> tuple[str, np.ndarray, np.ndarray] | None:
    transform = source.read(slice(0, 1)).transform
    if transform is None:
        return None
    x = np.random.Generator(np.random.PCG64(0)).standard_normal(report.shape[1])
    turned = transform.forward(x.astype(np.float32).astype(np.float64))
    y = np.concatenate([source.read(rows).rows() @ turned for rows in row_blocks(*report.shape)])
    return report.name, x.astype(np.float32), y.astype(np.float32)
