"""A conversion from start to end: open, check everything, then one tensor after another.

Knows the order of the steps. All that can be known to be wrong is said before a byte is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from bonsai.convert.encode import Options, encode_matrix, read_vector
from bonsai.convert.gguf_model import open_gguf
from bonsai.convert.hadamard import proof_of
from bonsai.convert.huggingface import open_huggingface
from bonsai.convert.i2_s import LAYOUTS
from bonsai.convert.own import open_own
from bonsai.convert.plan import Plan, make_plan
from bonsai.convert.recipes import Step, source_rows
from bonsai.convert.report import ConversionReport, TensorReport
from bonsai.convert.source import KINDS, SourceModel, recognise
from bonsai.errors import ConversionError, InvalidRequest
from bonsai.format import CheckpointWriter
from bonsai.format.files import Progress, sha256

__all__ = ["convert"]

QUANTS = ("ternary", "q8", "q4")
GROUPS = (64, 128, 256)
PACKINGS = ("t2", "t5")
DEGRADED = 0.05  # relative error above which text certainly suffers; exact sources have 0
OPENERS: Mapping[str, Callable[[Path, int], SourceModel]] = {
    "gguf": open_gguf,
    "huggingface": open_huggingface,
    "bonsai": open_own,
    **{layout: partial(open_gguf, i2_s=layout) for layout in LAYOUTS},
}


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: str | None = None,
    group_size: int = 128,
    packing: str | None = None,
    quant_embeddings: bool = False,
    exact: bool = False,
    strict: bool = False,
    kind: str | None = None,
    container: str = "safetensors",
    shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Make a checkpoint folder `out` of a GGUF file, a Hugging Face folder or a checkpoint.

    quant             None keeps each tensor's precision class (ternary stays ternary, bit for bit);
                      "ternary", "q8" or "q4" quantize the linears of the layers
    group_size        64, 128 or 256 weights per scale, for "ternary" and for ternary floats
    packing           "t2" or "t5": how trits are stored; None is t2, or what a checkpoint has
    quant_embeddings  quantize the embedding and the head too
    exact             round nothing that `quant` did not ask for: Q6_K becomes float32, not q8
    strict            every fallback (a tensor that could not be stored as asked) is an error
    kind              "gguf", "huggingface" or "bonsai", instead of what the content says; "i2_s",
                      "i2_s-arm" or "i2_s-rows": a GGUF file of bitnet.cpp, with this layout
    container, shard_bytes, overwrite   as for `bonsai.format.CheckpointWriter`
    progress          called as progress("convert", weights done, weights in all), then with
                      "hash source" and "hash", which count bytes

    Raises a BonsaiError; `out` is then not there, or is what it was.
    """
    options = Options(quant, group_size, packing, exact, quant_embeddings)
    _check_options(options, kind)
    found, path = recognise(Path(source), kind)
    plan = make_plan(OPENERS[found](path, group_size))
    with CheckpointWriter(out, container, shard_bytes, overwrite=overwrite) as writer:
        return _carry_out(writer, plan, options, strict, progress)


def _carry_out(
    writer: CheckpointWriter,
    plan: Plan,
    options: Options,
    strict: bool,
    progress: Progress | None,
) -> ConversionReport:
    model = plan.model
    for name, data in model.extras.items():
        writer.file(name, data)
    reports, fallbacks = _write_tensors(writer, plan, options, strict, progress)
    if options.quant is None:
        sources = {step.name: model.tensors[step.source] for step in plan.steps}
        made_here = model.kind == "bonsai"  # a checkpoint keeps its own proof, or has none
        proof = model.proof if made_here else proof_of(sources, reports)
        if proof is not None:
            writer.proof(*proof)
    target = writer.finish(
        architecture=model.architecture,
        config=plan.config,
        source=model.provenance or _provenance(model, progress),
        sampling=plan.sampling,
        tokenizer_size=plan.tokenizer_size,
        progress=progress,
    )
    return _report(target, plan, options, reports, fallbacks)


def _check_options(options: Options, kind: str | None) -> None:
    for name, value, allowed in (
        ("quant", options.quant, (None, *QUANTS)),
        ("group_size", options.group_size, GROUPS),
        ("packing", options.packing, (None, *PACKINGS)),
        ("kind", kind, (None, *KINDS)),
    ):
        if value not in allowed:
            shown = ", ".join(str(item) for item in allowed if item is not None)
            raise InvalidRequest(f"{name} is {value!r}", hint=f"one of: {shown}")


def _write_tensors(
    writer: CheckpointWriter,
    plan: Plan,
    options: Options,
    strict: bool,
    progress: Progress | None,
) -> tuple[list[TensorReport], list[str]]:
    """One after another; the pages of a source tensor are let go when it is written."""
    total, done = sum(prod(step.shape) for step in plan.steps), 0
    reports: list[TensorReport] = []
    fallbacks: list[str] = []
    for step in plan.steps:
        report, fallback = _write_tensor(writer, plan, step, options)
        if fallback is not None:
            if strict:
                raise ConversionError(fallback, hint="this is an error because of strict")
            fallbacks.append(fallback)
        reports.append(report)
        done += prod(step.shape)
        if progress is not None:
            progress("convert", done, total)
    return reports, fallbacks


def _write_tensor(
    writer: CheckpointWriter, plan: Plan, step: Step, options: Options
) -> tuple[TensorReport, str | None]:
    """Write one tensor; returns its report and, if it is not stored as asked, a sentence."""
    tensor = plan.model.tensors[step.source]
    if step.role == "vector":
        values = read_vector(step.name, tensor).reshape(step.shape)
        writer.vector(step.name, values)
        report = TensorReport(step.name, tensor.label, "f32", None, step.shape, values.nbytes)
        return report, None
    order = source_rows(step.op, plan.config, step.shape[0])
    encoded = encode_matrix(step.name, step.role, tensor, order, options)
    writer.matrix(encoded.matrix)
    tensor.release()
    return encoded.report, encoded.fallback


def _provenance(model: SourceModel, progress: Progress | None) -> dict[str, Any]:
    """Names, sizes and hashes of the files that the weights came from."""
    sizes = {path: path.stat().st_size for path in model.files}
    total, done = sum(sizes.values()), 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("hash source", done, total)

    files = [
        {"name": path.name, "bytes": size, "sha256": sha256(path, step)}
        for path, size in sizes.items()
    ]
    return {"kind": model.kind, "files": files}


def _report(
    target: Path, plan: Plan, options: Options, reports: list[TensorReport], fallbacks: list[str]
) -> ConversionReport:
    warnings = list(plan.warnings)
    report = ConversionReport(target, plan.model.kind, plan.model.architecture, tuple(reports))
    if options.quant == "ternary" and report.relative_error > DEGRADED:
        warnings.append(
            f"the source was not ternary: rounding it changed the weights by "
            f"{report.relative_error:.0%}, and text will be much worse, most likely garbage; "
            "a model has to be trained or calibrated for ternary weights"
        )
    return replace(report, warnings=tuple(warnings), fallbacks=tuple(fallbacks))
