"""`bonsai inspect`: what a checkpoint is, from its manifest; opens no backend, reads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import click

from bonsai.cli import options
from bonsai.cli.console import printable
from bonsai.cli.options import TEXT

if TYPE_CHECKING:
    from bonsai.format import Checkpoint

__all__ = ["inspect"]


@click.command()
@click.argument("path", type=TEXT)
@click.option("--tensors", is_flag=True, help="Also every tensor: packing, shape, bytes.")
@click.option(
    "--revision", type=TEXT, metavar="REV", help="Branch, tag or commit of a model that was pulled."
)
@options.json_flag
@options.verbosity
def inspect(path: str, tensors: bool, revision: str | None, json_: bool) -> None:
    """Show what the checkpoint at PATH (a directory, or a pulled model) is.

    Packings, sizes, bits per weight, config and source, from the manifest. Hashes are not checked;
    that is what verify does.
    """
    from bonsai import hub
    from bonsai.format import Checkpoint

    with Checkpoint.open(hub.resolve(path, revision), check="never") as checkpoint:
        facts = _facts(checkpoint, tensors)
    if json_:
        click.echo(options.as_json(facts))
        return
    for line in _lines(facts):
        click.echo(printable(line))


def _facts(checkpoint: Checkpoint, tensors: bool) -> dict[str, Any]:
    manifest = checkpoint.manifest
    rows = [_tensor(checkpoint, name) for name in checkpoint.names()]
    weights, nbytes = (sum(row[key] for row in rows) for key in ("weights", "bytes"))
    facts: dict[str, Any] = {
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "created_by": manifest.created_by,
        "source": None,
        "config": checkpoint.config,
        "tokenizer_size": manifest.tokenizer_size,
        "sampling": dict(manifest.sampling or {}),
        "hadamard_block": manifest.hadamard.block if manifest.hadamard else None,
        "tensor_count": len(rows),
        "weights": weights,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / weights,
        "packings": _packings(rows),
    }
    if manifest.source:
        files = {name: entry.sha256 for name, entry in manifest.source.files.items()}
        facts["source"] = {"kind": manifest.source.kind, "files": files}
    if tensors:
        facts["tensors"] = rows
    return facts


def _tensor(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    entry = checkpoint.entry(name)
    weights, nbytes = prod(entry.shape), checkpoint.tensor_bytes(name)
    return {
        "name": name,
        "packing": entry.packing,
        "group": entry.group,
        "shape": list(entry.shape),
        "transform": entry.transform,
        "zeros": entry.zeros,
        "weights": weights,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / weights,
    }


def _packings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals per packing and group, the largest first."""
    classes: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in rows:
        classes.setdefault((row["packing"], row["group"]), []).append(row)
    found = []
    for (packing, group), members in classes.items():
        weights, nbytes = (sum(row[key] for row in members) for key in ("weights", "bytes"))
        counted = [row for row in members if row["zeros"] is not None]
        zeros = sum(row["zeros"] * row["weights"] for row in counted)
        total = {
            "packing": packing,
            "group": group,
            "tensors": len(members),
            "weights": weights,
            "bytes": nbytes,
            "bits_per_weight": 8 * nbytes / weights,
            "zeros": zeros / sum(row["weights"] for row in counted) if counted else None,
        }
        found.append(total)
    return sorted(found, key=lambda total: -total["bytes"])


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"path          {facts['path']}"
    yield f"architecture  {facts['architecture']}"
    for key, value in facts["config"].items():
        if key != "architecture":
            yield f"  {key:12}{options.as_json(value, indent=None)}"
    if facts["source"]:
        files = ", ".join(facts["source"]["files"])
        yield f"source        {facts['source']['kind']}{': ' + files if files else ''}"
    yield f"made by       {facts['created_by']}"
    if facts["tokenizer_size"]:
        yield f"tokenizer     {facts['tokenizer_size']:,} ids"
    if facts["sampling"]:
        values = ", ".join(f"{key} {value:g}" for key, value in facts["sampling"].items())
        yield f"sampling      {values}"
    if facts["hadamard_block"]:
        yield f"transform     signed Hadamard in blocks of {facts['hadamard_block']}"
    yield f"weights       {facts['weights']:,} in {facts['tensor_count']} tensors"
    yield f"size          {facts['bytes']:,} bytes, {facts['bits_per_weight']:.3f} bits per weight"
    for total in facts["packings"]:
        yield _row(f"  {total['tensors']} tensors", total)
    for row in facts.get("tensors", ()):
        shape = " x ".join(map(str, row["shape"]))
        yield _row(f"{row['name']:26} {shape:>14}", row)


def _row(label: str, row: dict[str, Any]) -> str:
    packing = row["packing"] if row["group"] is None else f"{row['packing']} g{row['group']}"
    text = f"{label:14}{packing:>9} {row['bytes']:14,} bytes {row['bits_per_weight']:7.3f} bits"
    return text if row["zeros"] is None else f"{text}  zeros {row['zeros']:.1%}"
