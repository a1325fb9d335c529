"""`bonsai chat`: a conversation, by hand or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.console import is_terminal
from bonsai.cli.generate import answer, timing_line
from bonsai.cli.options import TEXT, Choices, Load
from bonsai.errors import BonsaiError

if TYPE_CHECKING:
    from bonsai.chat import Chat

__all__ = ["chat"]

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops a reply"


@click.command()
@click.option("-s", "--system", type=TEXT, metavar="TEXT", help="System prompt.")
@options.model_options
@options.sampling_options
@options.verbosity
def chat(system: str | None, load: Load, choices: Choices, **request: Any) -> None:
    """Talk with a model; each line is a message, also from a pipe.

    /reset forgets the conversation, /exit or the end of input ends it. Ctrl-C stops a reply, and
    between replies the program.
    """
    console = options.console()
    with console.progress() as report:
        model = load(report)
    console.note(HELP)
    request["sampling"] = choices.over(model.sampling)
    with model.chat(system=system) as conversation:
        for line in _messages():
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
                console.note("the conversation is forgotten; the system prompt stays")
            elif line in ("/help", "/?"):
                console.note(HELP)
            elif line:
                _guarded_turn(conversation, line, request)


def _guarded_turn(conversation: Chat, message: str, request: dict[str, Any]) -> None:
    """A turn whose failure a person may answer (a full context with /reset); a pipe cannot."""
    try:
        _turn(conversation, message, request)
    except BonsaiError as error:
        if not options.standard_input_is_terminal():
            raise
        options.console().error(str(error), error.hint, error)


def _turn(conversation: Chat, message: str, request: dict[str, Any]) -> None:
    """One message and its reply. Ctrl-C ends the reply only; what it said so far is kept."""
    text = ""
    stream = conversation.stream(message, **request)
    try:
        with stream:
            text = answer(stream)
    except KeyboardInterrupt:
        click.echo()
        options.console().note("stopped")
        return
    if not text.endswith("\n"):
        click.echo()
    options.console().note(timing_line(stream.completion))


def _messages() -> Iterator[str]:
    """Lines of stdin: with a prompt and line editing where a person types them."""
    if not options.standard_input_is_terminal():
        yield from (line.strip() for line in options.standard_input_lines())
        return
    try:
        import readline  # noqa: F401  # gives input() line editing and history, where there is one
    except ImportError:
        pass
    while True:
        prompt = "> " if is_terminal(sys.stdout) else ""
        if not prompt:  # stdout is a file: the answer only, so the prompt goes to stderr
            click.echo("> ", err=True, nl=False)
        try:
            yield input(prompt).strip()
        except EOFError:
            options.console().end_line()
            return
