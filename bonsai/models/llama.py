"""Llama and all of its shape (SmolLM2, Falcon3, Falcon-E, TriLM): the plain shared decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bonsai.models import decoder
from bonsai.models.decoder import Config, forward, load

__all__ = ["forward", "load", "read_config"]


def read_config(values: Mapping[str, Any]) -> Config:
    """The config of a checkpoint whose architecture is "llama"."""
    return decoder.read_config(values, "llama", qk_norm=False)
