"""What the readers of Hugging Face and MLX packings share: dtypes, and matrices by name."""

from __future__ import annotations

import numpy as np

from bonsai.errors import ConversionError
from bonsai.format.safetensors_io import TensorInfo
from bonsai.format.shards import ShardedTensors

__all__ = ["DENSE_DTYPES", "WEIGHT", "matrix_of"]

DENSE_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
WEIGHT = ".weight"


def matrix_of(shards: ShardedTensors, info: TensorInfo) -> np.ndarray:
    """The mapped values of a tensor that must have two dimensions."""
    if len(info.shape) != 2:
        raise ConversionError(f"{info.file}: {info.name} is {info}, expected a matrix")
    return shards.array(info.name)
