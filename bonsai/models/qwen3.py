"""Qwen3, dense: the shared decoder with query and key heads normalised before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bonsai.models import decoder
from bonsai.models.decoder import Config, forward, load

__all__ = ["forward", "load", "read_config"]


def read_config(values: Mapping[str, Any]) -> Config:
    """The config of a checkpoint whose architecture is "qwen3"."""
    return decoder.read_config(values, "qwen3", qk_norm=True)
