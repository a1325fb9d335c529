"""The checkpoint format: open, write and verify. docs/format.md describes it byte by byte."""

from __future__ import annotations

from bonsai.format.checkpoint import Checkpoint
from bonsai.format.manifest import Hadamard, Manifest, TensorEntry
from bonsai.format.safetensors_io import SafetensorsFile, TensorInfo
from bonsai.format.shards import ShardedTensors
from bonsai.format.verification import Finding, Report, verify
from bonsai.format.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Finding",
    "Hadamard",
    "Manifest",
    "Report",
    "SafetensorsFile",
    "ShardedTensors",
    "TensorEntry",
    "TensorInfo",
    "verify",
]
