"""Every error a caller may want to catch. All of them are BonsaiError.

BonsaiError
├── ModelNotFound        the name is neither a directory nor a model we can fetch
├── FormatError          the file is not a checkpoint, or is damaged
├── UnsupportedModel     a good file of a kind that we do not run
├── ConversionError      the source cannot be converted as asked
├── BackendUnavailable   the library or the device is missing on this machine
├── InvalidRequest       an argument, a message or a sampling value that cannot be honoured
├── ContextOverflow      prompt and reply do not fit in max_context
└── NumericError         the model produced values that are not finite
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "BonsaiError",
    "ContextOverflow",
    "ConversionError",
    "FormatError",
    "InvalidRequest",
    "ModelNotFound",
    "NumericError",
    "UnsupportedModel",
]


class BonsaiError(Exception):
    """Base class. `hint` is one line that tells the reader what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ModelNotFound(BonsaiError):
    """The name is neither a directory nor a model we can fetch."""


class FormatError(BonsaiError):
    """The file is not a checkpoint, or is damaged."""


class UnsupportedModel(BonsaiError):
    """A good file of an architecture, a version or a type that we do not run."""


class ConversionError(BonsaiError):
    """The source cannot be converted as asked."""


class BackendUnavailable(BonsaiError):
    """The library or the device is missing on this machine."""


class InvalidRequest(BonsaiError, ValueError):
    """An argument, a message or a sampling value that cannot be honoured."""


class ContextOverflow(BonsaiError):
    """Prompt and reply do not fit in max_context."""


class NumericError(BonsaiError):
    """The model produced values that are not finite."""
