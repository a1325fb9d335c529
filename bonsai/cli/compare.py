"""`bonsai compare`: how far one model, or one backend, is from another on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.console import printable
from bonsai.cli.options import TEXT, BackendName
from bonsai.cli.ppl import number, perplexity_facts, read_text, window_options

if TYPE_CHECKING:
    from bonsai.fidelity import Comparison
    from bonsai.generate import Model

__all__ = ["compare"]


@click.command()
@click.argument("a", type=TEXT)
@click.argument("b", type=TEXT, required=False)
@click.option("-t", "--text", type=TEXT, required=True, metavar="FILE",
              help="The text to compare on; '-' is standard input.")  # fmt: skip
@click.option("--backend-a", type=BackendName(), default="auto", metavar="BACKEND",
              help="Where A runs: auto, mlx, cpu or reference. Default: auto.")  # fmt: skip
@click.option("--backend-b", type=BackendName(), default="auto", metavar="BACKEND",
              help="Where B runs; mlx-exact and cpu-exact have float32 activations. Default: "
              "auto.")  # fmt: skip
@window_options
@options.json_flag
@options.verbosity
def compare(
    a: str, b: str | None, text: str, backend_a: str, backend_b: str, json_: bool, **asked: Any
) -> None:
    """Compare model B with model A on a text: KL(A || B) per token, and who predicts the same.

    Without B, it is A with itself on another backend: --backend-a and --backend-b. Both must have
    the same vocabulary. A makes the tokens of the text.
    """
    if b is None and backend_a == backend_b:
        raise options.usage(
            "nothing to compare: one model on one backend",
            "name a second model, or --backend-a reference --backend-b cpu",
        )
    content = read_text(text)
    from bonsai import fidelity

    with options.console().progress() as report:
        with _load(a, backend_a, report) as first, _load(b or a, backend_b, report) as second:
            found = fidelity.compare(first, second, content, progress=report, **asked)
            models = (first, second)
    if json_:
        click.echo(options.as_json(_facts(models, found)))
        return
    for line in _lines(models, found):
        click.echo(line)


def _load(name: str, backend: str, report: Any) -> Model:
    from bonsai import generate

    return generate.load(name, backend=backend, progress=report)


def _lines(models: tuple[Model, Model], found: Comparison) -> list[str]:
    named = [printable(f"{model.name}  ({model.description})") for model in models]
    return [
        f"A           {named[0]}",
        f"B           {named[1]}",
        f"perplexity  {found.a.value:.4f} +/- {found.a.error:.4f}  and  "
        f"{found.b.value:.4f} +/- {found.b.error:.4f}",
        f"B / A       {found.ratio:.5f} +/- {found.ratio_error:.5f}",
        f"KL(A||B)    mean {found.mean:.3g} +/- {found.mean_error:.2g}, median {found.median:.3g}, "
        f"99% {found.percentile_99:.3g}, max {found.max:.3g} nats",
        f"same top    {found.same_top:.3%}",
        f"top token   {found.top_rms:.3%} RMS difference of its probability",
        f"scored      {found.a.tokens:,} tokens, window {found.a.window}, stride {found.a.stride}",
    ]


def _facts(models: tuple[Model, Model], found: Comparison) -> dict[str, Any]:
    sides = {
        side: {"model": model.name, "backend": model.description, **perplexity_facts(result)}
        for side, model, result in zip("ab", models, (found.a, found.b), strict=True)
    }
    return {
        **sides,
        "perplexity_ratio": number(found.ratio),
        "perplexity_ratio_error": number(found.ratio_error),
        "kl_mean": found.mean,
        "kl_mean_error": number(found.mean_error),
        "kl_median": found.median,
        "kl_99": found.percentile_99,
        "kl_max": found.max,
        "same_top": found.same_top,
        "top_rms": found.top_rms,
    }
