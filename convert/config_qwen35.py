"""The configs of Qwen3.5 models, in GGUF metadata and in Hugging Face folders -> our config.json.

Knows the keys that only this architecture has. Does not read files; every key must be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bonsai.config import Fields
from bonsai.errors import UnsupportedModel

__all__ = ["read_gguf_gdn", "read_gguf_rope"]

DELTA, ATTENTION = "delta", "attention"
MAX_TAPS = 65
SECTIONS = "rope.dimension_sections"


def read_gguf_gdn(fields: Fields, layers: int) -> dict[str, Any]:
    """`kinds`, `gdn` and `output_gate` from the keys of an architecture "qwen35"."""
    value_heads = fields.take_size("ssm.time_step_rank")
    inner = fields.take_size("ssm.inner_size")
    if inner % value_heads:
        raise UnsupportedModel(
            f"{fields.where}: ssm.inner_size {inner} is not a multiple of ssm.time_step_rank "
            f"{value_heads}"
        )
    gdn = {
        "key_heads": fields.take_size("ssm.group_count"),
        "value_heads": value_heads,
        "key_dim": fields.take_size("ssm.state_size"),
        "value_dim": inner // value_heads,
        "taps": fields.take_size("ssm.conv_kernel", MAX_TAPS),
    }
    _check_gdn(gdn, fields.where)
    interval = fields.take_size("full_attention_interval")
    return {"output_gate": "sigmoid", "kinds": _kinds(layers, interval), "gdn": gdn}


def read_gguf_rope(fields: Fields, theta: float, head_dim: int) -> dict[str, Any]:
    """The rotation of the first dims of each head. For text, all sections rotate alike."""
    dims = fields.take_size("rope.dimension_count")
    sections = fields.take_any(SECTIONS, [])
    whole = isinstance(sections, list) and all(isinstance(n, int) for n in sections)
    if not whole or (sections and sum(sections) != dims // 2):
        raise UnsupportedModel(
            f"{fields.where}: {SECTIONS} is {sections!r:.60}, which does not cover {dims} dims"
        )
    fields.require("rope.scaling.type", "none")
    if dims > head_dim or dims % 2:
        raise UnsupportedModel(f"{fields.where}: {dims} rotated dims of heads of {head_dim}")
    return {"theta": theta, "dims": dims}


def _kinds(layers: int, interval: int) -> list[str]:
    return [DELTA if (i + 1) % interval else ATTENTION for i in range(layers)]


def _check_gdn(gdn: Mapping[str, int], where: str) -> None:
    if gdn["value_heads"] % gdn["key_heads"]:
        raise UnsupportedModel(
            f"{where}: {gdn['value_heads']} value heads cannot share {gdn['key_heads']} key heads"
        )
