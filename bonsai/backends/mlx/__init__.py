"""The mlx backend: Apple silicon through MLX and Metal; elsewhere MLX's CPU device, for tests.

Knows what MLX runs on and which number types to use there. What is computed is in `ops.py`, when
in `session.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bonsai.backends import Check, MemoryLimit, Progress
from bonsai.errors import BackendUnavailable, InvalidRequest
from bonsai.format import Checkpoint

__all__ = ["BACKEND", "EXACT", "MlxBackend"]


class MlxBackend:
    """`bonsai.backends.Backend` on MLX.

    `dtype` is that of activations, keys and values: "float16", "bfloat16" or "float32". None is
    float16 with Metal (bfloat16 for BitNet) and float32 on the CPU. `compiled`: whether the graph
    of a token is traced once; None is yes with Metal, since MLX needs a C++ compiler elsewhere.
    """

    name = "mlx"

    def __init__(self, dtype: str | None = None, *, compiled: bool | None = None) -> None:
        self._dtype = dtype
        self._compiled = compiled

    def status(self) -> str:
        return str(_device().facts())

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        threads: int | None = None,
        memory: MemoryLimit | None = None,
    ) -> Any:
        """The checkpoint's weights, copied into MLX's memory once."""
        if threads is not None:
            raise InvalidRequest(
                f"threads is {threads}, but backend 'mlx' does not choose them",
                hint="leave --threads out (in Python: threads=None)",
            )
        device = _device()
        device.facts()
        from bonsai.backends.mlx import load  # needs MLX

        return load.engine(checkpoint, progress, memory, self._dtype, self._compiled)

    def self_check(self) -> Iterator[Check]:
        """The parts of this backend on this device, for `bonsai doctor --full`."""
        _device().facts()
        from bonsai.backends.mlx.check import checks  # needs MLX

        yield from checks()


def _device() -> ModuleType:
    """The module that imports MLX. Raises BackendUnavailable where it cannot."""
    try:
        return importlib.import_module("bonsai.backends.mlx.device")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mlx")
        windows = sys.platform == "win32"
        raise BackendUnavailable(
            f"MLX is not installed{' and does not exist for Windows' * windows}"
            if missing
            else f"MLX cannot be imported: {error}",
            hint=None if windows else "pip install 'bonsai-lm[mlx]'",
        ) from error


BACKEND = MlxBackend()
EXACT = MlxBackend("float32")
