"""Packages that can also be called: `bonsai.backends()` and `bonsai.convert(...)`.

The package stays importable as usual; only its module object gets a class with `__call__`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(module_name: str, function: str) -> None:
    """Let `module(...)` mean `module.<function>(...)`; call it once, in that module."""

    class CallableModule(ModuleType):
        __doc__ = sys.modules[module_name].__doc__

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

    sys.modules[module_name].__class__ = CallableModule
