"""Foreign models -> checkpoints: `bonsai.convert("model.gguf", "out")`.

The package can be called. docs/convert.md says what is read, and what is lost where.
"""

from __future__ import annotations

from bonsai.callable_module import make_callable
from bonsai.convert.report import ConversionReport, TensorReport
from bonsai.convert.run import convert

__all__ = ["ConversionReport", "TensorReport", "convert"]

make_callable(__name__, "convert")
