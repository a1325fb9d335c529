"""Runs the command line in this process, with its streams in memory, and scripted models in it."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import pytest

from bonsai.cli import main


@dataclass(frozen=True)
class Result:
    """What one run left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """A stream in memory that may say that a person sees it."""

    def __init__(self, data: bytes = b"", *, person: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="ascii", newline="", write_through=True)
        self.person = person

    def isatty(self) -> bool:
        return self.person

    def text(self) -> str:
        return self.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


def run(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    stdin: str | bytes | None = "",
    terminal: bool = False,
) -> Result:
    """`bonsai *arguments`. stdin None is a terminal; `terminal` makes stdout and stderr one."""
    data = stdin.encode() if isinstance(stdin, str) else stdin or b""
    source = Terminal(data, person=stdin is None)
    out, err = Terminal(person=terminal), Terminal(person=terminal)
    for name, stream in (("stdin", source), ("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, name, stream)
    code = main(list(arguments))
    return Result(code, out.text(), err.text())
