"""`bonsai ppl`: the perplexity of a model over a text, and how sure that number is."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.options import TEXT, Load

if TYPE_CHECKING:
    from bonsai.fidelity import Perplexity

__all__ = ["number", "perplexity_facts", "ppl", "read_text", "window_options"]


def window_options(verb: Any) -> Any:
    """--window, --stride and --limit."""
    for decorator in reversed((
        click.option("--window", type=options.POSITIVE, metavar="N",
                     help="Tokens that the model sees at once. Default: 1024, or its context."),
        click.option("--stride", type=options.POSITIVE, metavar="N",
                     help="Tokens by which the window moves on: after the first window, a token "
                     "has at least window - stride before it. Default: half a window."),
        click.option("--limit", type=options.POSITIVE, metavar="N",
                     help="Score only the first N tokens of the text. Default: all."),
    )):  # fmt: skip
        verb = decorator(verb)
    return verb


@click.command()
@click.argument("text", type=TEXT)
@window_options
@options.model_options
@options.json_flag
@options.verbosity
def ppl(text: str, load: Load, json_: bool, **asked: Any) -> None:
    """Measure how well a model predicts the text in the file TEXT ('-' is standard input).

    Each token is scored once, in windows that move on by a stride. The perplexity is the
    exponential of the mean of -ln p, and comes with its standard error over the text.
    """
    content = read_text(text)
    from bonsai import fidelity

    with options.console().progress() as report, load(report) as model:
        found = fidelity.perplexity(model, content, progress=report, **asked)
        facts = {"model": model.name, "backend": model.engine.description}
    if json_:
        click.echo(options.as_json({**facts, **perplexity_facts(found)}))
        return
    click.echo(f"perplexity  {found.value:.4f} +/- {found.error:.4f}")
    click.echo(f"loss        {found.loss:.5f} +/- {found.loss_error:.5f} nats per token")
    click.echo(f"scored      {found.tokens:,} tokens, window {found.window}, stride {found.stride}")
    click.echo(f"backend     {facts['backend']}")


def read_text(name: str) -> str:
    """The text of a file, or of standard input for '-', as it is."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise options.usage(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})",
            "convert it first, for example with: iconv -t UTF-8",
        ) from error


def perplexity_facts(found: Perplexity) -> dict[str, Any]:
    """For --json."""
    return {
        "perplexity": number(found.value),
        "perplexity_error": number(found.error),
        "loss": number(found.loss),
        "loss_error": number(found.loss_error),
        "tokens": found.tokens,
        "window": found.window,
        "stride": found.stride,
    }


def number(value: float) -> float | None:
    """JSON has no infinity, and an uncertainty of one token is not a number."""
    return value if math.isfinite(value) else None
