"""`bonsai bench`: prefill and decode speed, bandwidth and peak memory."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.console import size
from bonsai.cli.doctor import cpu_name
from bonsai.cli.options import Load

if TYPE_CHECKING:
    from bonsai.bench import Bench, Rate
    from bonsai.generate import Model

__all__ = ["bench"]

COUNT = click.IntRange(min=0)


@click.command()
@click.option(
    "-p",
    "--prompt",
    type=COUNT,
    default=512,
    metavar="N",
    help="Tokens of the prefill; 0 leaves it out. Default: 512.",
)
@click.option(
    "-n",
    "--reply",
    type=COUNT,
    default=128,
    metavar="N",
    help="Tokens of the decode; 0 leaves it out. Default: 128.",
)
@click.option(
    "-d",
    "--depth",
    type=COUNT,
    default=0,
    metavar="N",
    help="Tokens of context before both. Default: 0.",
)
@click.option(
    "-r",
    "--repetitions",
    type=options.POSITIVE,
    default=3,
    metavar="N",
    help="Counted repetitions; one more comes before. Default: 3.",
)
@options.model_options
@options.json_flag
@options.verbosity
def bench(
    prompt: int, reply: int, depth: int, repetitions: int, load: Load, json_: bool
) -> None:  # fmt: skip
    """Measure prefill and decode in tokens per second, memory bandwidth and peak memory.

    The ids are random and the text is not shown. With --json the last line of the output is one
    JSON object.
    """
    if not prompt and not reply:
        raise options.usage("nothing to measure: -p and -n are both 0", "bonsai bench --help")
    from bonsai import bench as timing

    with options.console().progress() as report:
        started = time.perf_counter()
        model = load(report)
        load_s = time.perf_counter() - started
        found = timing.run(
            model, prompt=prompt, reply=reply, depth=depth, repetitions=repetitions,
            load_s=load_s, progress=report,
        )  # fmt: skip
    for line in _lines(model, found):
        click.echo(line)
    if json_:
        click.echo(options.as_json(_facts(model, found), indent=None))


def _lines(model: Model, found: Bench) -> list[str]:
    at = f" @ {found.depth}" if found.depth else ""
    lines = [f"model    {model.name}", f"backend  {model.engine.description}"]
    if found.prefill:
        lines.append(f"prefill  {_rate(found.prefill)}  ({found.prompt_tokens} tokens{at})")
    if found.decode:
        lines.append(f"decode   {_rate(found.decode)}  ({found.reply_tokens} tokens{at})")
        if found.bytes_per_token:
            read = f"{size(found.bytes_per_token)} of weights per token"
            lines.append(f"weights  {found.decode_gbps:.2f} GB/s in decode  ({read})")
    if prediction := getattr(model.engine, "prediction", None):
        lines.append(f"expected {prediction}")
    lines.append(f"load     {found.load_s:.2f} s")
    lines.append(f"memory   {size(found.peak_bytes)} at most")
    return lines


def _rate(rate: Rate) -> str:
    return f"{rate.median:.2f} tok/s, spread {rate.spread:.1%}"


def _facts(model: Model, found: Bench) -> dict[str, Any]:
    import bonsai

    backend, _, device = model.engine.description.partition(": ")
    threads = re.search(r"(\d+) threads?\b", device)
    facts: dict[str, Any] = {
        "model": model.name,
        "backend": backend,
        "device": device,
        "cpu": cpu_name(),
        "threads": int(threads[1]) if threads else None,
        "version": bonsai.__version__,
        "prompt_tokens": found.prompt_tokens,
        "reply_tokens": found.reply_tokens,
        "depth": found.depth,
        "load_s": found.load_s,
        "peak_bytes": found.peak_bytes,
        "bytes_per_token": found.bytes_per_token,
        "decode_gbps": found.decode_gbps,
    }
    if prediction := getattr(model.engine, "prediction", None):
        facts["decode_tps_predicted"] = [prediction.low, prediction.high]
    for name, rate in (("prefill", found.prefill), ("decode", found.decode)):
        facts[f"{name}_tps"] = rate.median if rate else None
        facts[f"{name}_spread"] = rate.spread if rate else None
        facts[f"{name}_runs"] = list(rate.tps) if rate else []
    return facts
