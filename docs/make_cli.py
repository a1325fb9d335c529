"""Write docs/cli.md from the commands themselves; a test fails when the file is stale.

    python docs/make_cli.py

The text does not depend on the version of click: only names, metavars and help texts are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from bonsai.cli import cli

OUT = Path(__file__).resolve().parent / "cli.md"
HEAD = """\
<!-- Written by docs/make_cli.py from the help texts of the commands. Do not edit. -->

# The command line

Exit codes: 0 good, 1 an error, 2 wrong usage, 130 interrupted. stdout carries the answer; notes,
progress and errors go to stderr, notes and progress only if it is a terminal or with `-v`.

Environment: `BONSAI_MODEL`, `BONSAI_BACKEND`, `HF_HOME` (and `HF_ENDPOINT`, which the hub client
reads), and `BONSAI_CPU_ISA`, which forces a lower instruction set of the cpu backend.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section("bonsai", cli))


def _section(path: str, command: click.Command) -> Iterator[str]:
    yield f"\n## `{' '.join([path, *_usage(command)])}`\n\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n"
    options = [p for p in command.params if isinstance(p, click.Option) and p.name != "help"]
    if options:
        yield "\n| flag | |\n|---|---|\n"
    for option in options:
        yield f"| {_flags(option)} | {(option.help or '').replace('|', chr(92) + '|')} |\n"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _section(f"{path} {name}", found)


def _usage(command: click.Command) -> Iterator[str]:
    if any(isinstance(p, click.Option) for p in command.params):
        yield "[FLAGS]"
    for argument in (p for p in command.params if isinstance(p, click.Argument)):
        name = (argument.name or "").upper()
        yield name if argument.required else f"[{name}]"
    if isinstance(command, click.Group):
        yield "VERB ..."


def _flags(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names} {option.metavar}`" if option.metavar else f"`{names}`"


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8", newline="\n")
    print(OUT)
