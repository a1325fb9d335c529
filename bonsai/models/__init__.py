"""The architectures we run, by name, and how a checkpoint becomes a model on some `ops`.

Knows which file of this folder belongs to which name. Does not know any backend: whoever calls
`load` brings the ops.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bonsai.backends.ops import Array, Ops
from bonsai.errors import UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.models.decoder import Progress, Sizes, Weights

__all__ = ["NAMES", "Architecture", "Model", "architecture", "load"]

NAMES = ("bitnet", "llama", "qwen3", "qwen35")


class Architecture(Protocol):
    """What each file of this folder defines."""

    def read_config(self, values: Mapping[str, Any]) -> Sizes:
        """The config of a checkpoint; UnsupportedModel for unknown keys and values."""
        ...

    def load(
        self, checkpoint: Checkpoint, cfg: Any, ops: Ops, progress: Progress | None = None
    ) -> Weights:
        """Every tensor of the checkpoint, checked against the config, as the ops keep it."""
        ...

    def forward(self, ops: Ops, cfg: Any, weights: Weights, tokens: Array, state: Any) -> Array:
        """Run tokens [T] after those in `state`; return hidden rows [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's weights on some ops, and the function that runs them."""

    architecture: Architecture
    config: Sizes
    weights: Weights

    def forward(self, ops: Ops, tokens: Array, state: Any) -> Array:
        """Run tokens [T] after those in `state`; return hidden rows [T, hidden]."""
        return self.architecture.forward(ops, self.config, self.weights, tokens, state)


def architecture(name: str) -> Architecture:
    """The module of an architecture. Raises UnsupportedModel naming those we have."""
    if name not in NAMES:
        raise UnsupportedModel(
            f"architecture {name} is not supported; supported: {', '.join(NAMES)}"
        )
    module: Architecture = importlib.import_module(f"bonsai.models.{name}")
    return module


def load(checkpoint: Checkpoint, ops: Ops, progress: Progress | None = None) -> Model:
    """The model of a checkpoint. Raises UnsupportedModel or FormatError; nothing is remembered."""
    found = architecture(checkpoint.architecture)
    cfg = found.read_config(checkpoint.config)
    return Model(found, cfg, found.load(checkpoint, cfg, ops, progress))
