"""`bonsai export`: a checkpoint -> a model that other runtimes read, exactly."""

from __future__ import annotations

import click

from bonsai.cli import options
from bonsai.cli.console import printable
from bonsai.cli.options import TEXT

__all__ = ["export"]

TARGETS = ("gguf-pq2_0", "gguf-ptq1_0", "gguf-tq2_0", "gguf-q2_0", "mlx-2bit")


@click.command()
@click.argument("checkpoint", type=TEXT)
@click.argument("out", type=TEXT)
@click.option("--to", type=click.Choice(TARGETS), required=True, metavar="FORMAT",
              help=f"{', '.join(TARGETS)}: the type of the ternary matrices.")  # fmt: skip
@click.option("--allow-f16", is_flag=True,
              help="Store ternary matrices that FORMAT cannot hold as F16: exact, but 8 times "
              "as large.")  # fmt: skip
@click.option("--revision", type=TEXT, metavar="REV",
              help="Branch, tag or commit of a model that was pulled.")  # fmt: skip
@options.json_flag
@options.verbosity
def export(
    checkpoint: str, out: str, to: str, allow_f16: bool, revision: str | None, json_: bool
) -> None:
    """Write CHECKPOINT (a directory, or a pulled model) to OUT for the runtimes people have.

    OUT is a GGUF file, or a directory for MLX; it must not exist. Every weight is exact, and what
    the format cannot hold exactly is refused by name.
    """
    from bonsai import hub
    from bonsai.convert.export import export as run

    folder = hub.resolve(checkpoint, revision)
    with options.console().progress() as progress:
        report = run(folder, out, to=to, allow_f16=allow_f16, progress=progress)
    if json_:
        facts = {
            "path": str(report.path),
            "format": report.target,
            "architecture": report.architecture,
            "types": dict(report.types),
            "bytes": report.nbytes,
            "notes": list(report.notes),
        }
        click.echo(options.as_json(facts))
        return
    for line in report.lines():
        click.echo(printable(line))
