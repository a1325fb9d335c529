"""The command `bonsai`: verbs, errors and exit codes.

Knows how a verb is found, that `generate` is the default, and how everything that goes wrong ends:
0 good, 1 our error, 2 usage, 130 interrupted. Imports a verb when it is named, no array library.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

import click

from bonsai.cli import options
from bonsai.cli.console import Console
from bonsai.errors import BonsaiError

__all__ = ["VERBS", "cli", "main"]

VERBS = (
    "generate", "chat", "convert", "export", "inspect", "verify", "bench", "ppl", "compare",
    "models", "doctor",
)  # fmt: skip
OWN_FLAGS = ("-h", "--help", "--version")
OUT = "send it to a file or a pipe; or to nowhere with >/dev/null"
FULL = "free some space where it goes, or send it elsewhere"
QUIET_OR_VERBOSE = ("-q", "--quiet", "-v", "--verbose")


class Verbs(click.Group):
    """Finds each verb in its own file, and puts `generate` in front of anything that is not one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"bonsai.cli.{cmd_name}"), cmd_name
        )
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and options.standard_input_is_terminal():
            args = ["--help"]
        first = next((a for a in args if a not in QUIET_OR_VERBOSE), None)
        if first not in VERBS and first not in OWN_FLAGS:
            args = ["generate", *args]
        return super().parse_args(ctx, args)


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    package_name="bonsai-lm", message="bonsai %(version)s", help="Show the version and exit."
)
@options.verbosity
def cli() -> None:
    """Run ternary language models on your own machine.

    Without a verb, the words are a prompt: bonsai "Why is the sky blue?"
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a traceback is printed only with -v."""
    if arguments is None:
        _end_tidily_when_told()
    _use_utf8()
    console = Console()
    if sys.stdout is None:  # its descriptor is closed; the next file that is opened would get it
        error = OSError(errno.EBADF, "standard output is closed")
        console.error("standard output is closed, so there is no place for the answer", OUT, error)
        return 1
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with cli.make_context("bonsai", arguments, obj=console) as ctx:
            cli.invoke(ctx)
        code = 0
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except BaseException as error:
        code = _report(error, console)
    return _flush(console, code)


def _report(error: BaseException, console: Console) -> int:
    """Say on stderr what went wrong; the exit code for it."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        console.end_line()
        return 130
    if _is_broken_pipe(error):
        _drop_stdout()
        return 0  # the reader has seen enough: `bonsai ... | head` is no failure
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "bonsai"
        hint = getattr(error, "hint", None) or f"{path} --help"
        console.error(error.format_message().rstrip("."), hint, error)
        return 2
    if isinstance(error, click.ClickException):
        console.error(error.format_message(), None, error)
    elif isinstance(error, BonsaiError):
        console.error(str(error), error.hint, error)
    elif isinstance(error, OSError) and _is_of_stdout(error):
        _report_stdout(error, console)
    elif isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        console.error(f"{error.strerror or error}{where}", _system_hint(error), error)
    elif isinstance(error, MemoryError):
        console.error("not enough memory", "a smaller --max-context, or a smaller model", error)
    elif isinstance(error, Exception):
        hint = "this is a fault in bonsai; -v shows where"
        console.error(f"{type(error).__name__}: {error}", hint, error)
    else:
        raise error  # SystemExit and the like have their own meaning
    return 1


def _report_stdout(error: OSError, console: Console) -> None:
    _drop_stdout()
    full = error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
    hint = FULL if full else None
    console.error(f"cannot write standard output: {error.strerror or error}", hint, error)


def _is_of_stdout(error: OSError) -> bool:
    """Whether it was raised while something was printed: all that is goes through `click.echo`."""
    frames = walk_tb(error.__traceback__)
    return any(frame.f_code is click.echo.__code__ for frame, _ in frames)


def _system_hint(error: OSError) -> str | None:
    if error.errno == errno.ENOSPC:
        return "free some disk space and run it again; nothing half written was left"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "check who owns the file or folder"
    return None


def _is_broken_pipe(error: BaseException) -> bool:
    # Windows reports a closed pipe on stdout as EINVAL without a file name.
    return isinstance(error, BrokenPipeError) or (
        sys.platform == "win32"
        and isinstance(error, OSError)
        and error.errno == errno.EINVAL
        and error.filename is None
    )


def _drop_stdout() -> None:
    """Send what is still buffered to nowhere, so that the interpreter's last flush is quiet."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file: nothing to redirect
        pass


def _flush(console: Console, code: int) -> int:
    """Flush stdout here, where a full disk or a closed pipe can still be reported."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if _is_broken_pipe(error):
            _drop_stdout()
            return code
        _report_stdout(error, console)
        return code or 1
    return code


def _end_tidily_when_told() -> None:
    """Let SIGTERM and SIGHUP unwind: half written folders go, and a terminal is sane again."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, leave)


def _use_utf8() -> None:
    """UTF-8 on every platform, whatever the locale says; nothing in a message may fail to print."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors=errors)
