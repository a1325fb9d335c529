"""`bonsai convert`: a model in a foreign format -> a checkpoint, and what was done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.console import printable
from bonsai.cli.options import TEXT

if TYPE_CHECKING:
    from bonsai.convert import ConversionReport

__all__ = ["convert"]


@click.command()
@click.argument("source", type=TEXT)
@click.argument("out", type=TEXT)
@click.option(
    "--quant",
    type=click.Choice(["ternary", "q8", "q4"]),
    metavar="CLASS",
    help="ternary, q8 or q4: quantize the linears. Default: keep each tensor's precision; "
    "what is ternary stays so, bit for bit.",
)
@click.option(
    "--group-size",
    type=click.Choice(["64", "128", "256"]),
    default="128",
    metavar="N",
    help="Weights per scale of a ternary matrix: 64, 128 or 256. Default: 128.",
)
@click.option(
    "--packing",
    type=click.Choice(["t2", "t5"]),
    metavar="PACKING",
    help="t2 (2 bits) or t5 (1.6 bits) per trit. Default: t2, or what SOURCE has.",
)
@click.option("--quant-embeddings", is_flag=True, help="Quantize the embedding and the head too.")
@click.option(
    "--exact",
    is_flag=True,
    help="Round nothing that --quant did not ask for; larger where a type has no match.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="A tensor that cannot be stored as asked is an error, not a fallback.",
)
@click.option(
    "--from",
    "kind",
    type=click.Choice(["gguf", "huggingface", "bonsai", "i2_s", "i2_s-arm", "i2_s-rows"]),
    metavar="KIND",
    help="gguf, huggingface or bonsai. Default: what the content says. i2_s, i2_s-arm or "
    "i2_s-rows: a GGUF file of bitnet.cpp, with the layout of its I2_S tensors.",
)
@click.option(
    "--container",
    type=click.Choice(["safetensors", "npz"]),
    default="safetensors",
    metavar="KIND",
    help="safetensors or npz. Default: safetensors.",
)
@click.option(
    "--shard-bytes",
    type=options.POSITIVE,
    metavar="N",
    help="Begin a new safetensors file after this many bytes. Default: one file.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is at OUT.")
@click.option("--tensors", is_flag=True, help="Also report every tensor.")
@options.json_flag
@options.verbosity
def convert(
    source: str, out: str, group_size: str, tensors: bool, json_: bool, **asked: Any
) -> None:  # fmt: skip
    """Convert SOURCE to a checkpoint directory OUT, and report what was kept and what was lost.

    SOURCE is a GGUF file, a Hugging Face model directory (safetensors) or a checkpoint. Weights
    that were not trained to be ternary do not survive --quant ternary: the text will be garbage.
    """
    from bonsai.convert import convert as run

    with options.console().progress() as progress:
        report = run(source, out, group_size=int(group_size), progress=progress, **asked)
    if json_:
        click.echo(options.as_json(_facts(report, tensors)))
        return
    for line in report.lines(tensors=tensors):
        click.echo(printable(line))


def _facts(report: ConversionReport, tensors: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": str(report.path),
        "source": report.kind,
        "architecture": report.architecture,
        "tensor_count": len(report.tensors),
        "weights": report.weights,
        "bytes": report.nbytes,
        "bits_per_weight": report.bits_per_weight,
        "zeros": report.zeros,
        "relative_error": report.relative_error,
        "fallbacks": list(report.fallbacks),
        "warnings": list(report.warnings),
    }
    if tensors:
        facts["tensors"] = [
            {
                "name": tensor.name,
                "source": tensor.source,
                "packing": tensor.packing,
                "group": tensor.group,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "bits_per_weight": tensor.bits_per_weight,
                "zeros": tensor.zeros,
                "relative_error": tensor.relative_error,
            }
            for tensor in report.tensors
        ]
    return facts
