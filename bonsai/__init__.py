"""Run ternary language models on your own machine.

    model = bonsai.load("path/to/model")
    print(model.generate("Why is the sky blue?"))

Names are imported when they are first used: `import bonsai` itself loads no array library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bonsai import testing
    from bonsai.chat import Chat
    from bonsai.errors import (
        BackendUnavailable,
        BonsaiError,
        ContextOverflow,
        ConversionError,
        FormatError,
        InvalidRequest,
        ModelNotFound,
        NumericError,
        UnsupportedModel,
    )
    from bonsai.generate import Chunk, Completion, Model, Stream, Timings, Usage, load
    from bonsai.sampling import Sampling

    __version__: str
    backends: Any  # packages that can also be called, which no type checker understands
    convert: Any

__all__ = [
    "BackendUnavailable",
    "BonsaiError",
    "Chat",
    "Chunk",
    "Completion",
    "ContextOverflow",
    "ConversionError",
    "FormatError",
    "InvalidRequest",
    "Model",
    "ModelNotFound",
    "NumericError",
    "Sampling",
    "Stream",
    "Timings",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "backends",
    "convert",
    "load",
    "testing",
]

_SUBMODULES = {"backends", "convert", "testing"}
_HOMES = {
    "Chat": "chat",
    "Chunk": "generate",
    "Completion": "generate",
    "Model": "generate",
    "Sampling": "sampling",
    "Stream": "generate",
    "Timings": "generate",
    "Usage": "generate",
    "load": "generate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("bonsai-lm")
    if name in _SUBMODULES:
        return importlib.import_module(f"bonsai.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'bonsai' has no attribute '{name}'")
    return getattr(importlib.import_module(f"bonsai.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return list(__all__)
