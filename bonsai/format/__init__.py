"""The checkpoint format: open one, write one, verify one. docs/format.md describes it byte by byte."""

from __future__ import annotations

from bonsai.format.checkpoint import Checkpoint
from bonsai.format.manifest import Hadamard, Manifest, TensorEntry
from bonsai.format.safetensors_io import SafetensorsFile, TensorInfo
from bonsai.format.shards import ShardedTensors
from bonsai.format.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Hadamard",
    "Manifest",
    "SafetensorsFile",
    "ShardedTensors",
    "TensorEntry",
    "TensorInfo",
]
