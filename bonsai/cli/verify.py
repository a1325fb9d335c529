"""`bonsai verify`: reads all of a checkpoint and says what is wrong with it."""

from __future__ import annotations

import click

from bonsai.cli import options
from bonsai.cli.console import printable
from bonsai.cli.options import TEXT

__all__ = ["verify"]


@click.command()
@click.argument("path", type=TEXT)
@click.option(
    "--revision", type=TEXT, metavar="REV", help="Branch, tag or commit of a model that was pulled."
)
@options.json_flag
@options.verbosity
def verify(path: str, revision: str | None, json_: bool) -> None:
    """Check every byte of the checkpoint at PATH (a directory, or a pulled model).

    Hashes, shapes, finite scales, codes that no ternary matrix has, and the proof of the transform
    where there is one. Prints one line for each finding; the exit code is 1 if there are any.
    """
    from bonsai import format, hub
    from bonsai.format.checkpoint import pull_again

    folder = hub.resolve(path, revision)
    with options.console().progress() as report:
        found = format.verify(folder, report)
    findings = [str(finding) for finding in found.findings]
    if json_:
        facts = {"path": str(folder), "good": not findings, "findings": findings}
        click.echo(options.as_json(facts))
    else:
        for finding in findings:
            click.echo(printable(finding))
        if not findings:
            click.echo("good")
    if findings:
        if again := pull_again(folder):
            options.console().note(again)
        raise click.exceptions.Exit(1)
