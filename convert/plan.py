"""Everything that can be checked before a byte is written: tensors, shapes, head, tokenizer.

Knows a source only as a `SourceModel`. Does not know packings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bonsai import models
from bonsai.convert.encode import row_blocks
from bonsai.convert.recipes import Ignored, Step, match, recipe
from bonsai.convert.source import SourceModel, SourceTensor
from bonsai.errors import BonsaiError, ConversionError, InvalidRequest, UnsupportedModel
from bonsai.format.strict_json import TOKENIZER_MARKS, parse_object
from bonsai.sampling import Sampling

__all__ = ["Plan", "make_plan"]

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will be written: `config` complete, every source tensor accounted for in `steps`."""

    model: SourceModel
    config: dict[str, Any]
    steps: list[Step]
    sampling: Mapping[str, Any] | None
    tokenizer_size: int | None
    warnings: list[str]


def make_plan(model: SourceModel) -> Plan:
    """Raises a BonsaiError naming what is missing, left over or contradictory."""
    where, warnings = str(model.path), list(model.warnings)
    config = dict(model.config)
    lines = recipe(model.architecture, model.kind)
    steps, ignored = match(lines, config, model.tensors, where)
    for step in steps:
        _check_shape(where, step, model.tensors[step.source])
    for name, rule in ignored:
        _check_ignored(where, model.tensors[name], rule)
    steps = _settle_head(model, config, steps, warnings)
    size = _tokenizer_size(model)
    if size is not None and size > config["vocab"]:
        raise ConversionError(
            f"{where}: the tokenizer has {size} ids, the embedding has {config['vocab']} rows",
            hint="the tokenizer belongs to another model",
        )
    _check_end_tokens(config, warnings)
    _check_config(model, config)
    sampling = model.sampling or _recommended_sampling(model, warnings)
    return Plan(model, config, steps, sampling, size, warnings)


def _check_shape(where: str, step: Step, tensor: SourceTensor) -> None:
    if tensor.shape != step.shape:
        raise ConversionError(
            f"{where}: {tensor.name} is {_shape(tensor.shape)}, the config needs "
            f"{_shape(step.shape)}",
            hint="the config and the tensors come from different models",
        )


def _check_ignored(where: str, tensor: SourceTensor, rule: Ignored) -> None:
    if rule.must_be_one and not (tensor.read(slice(None)).rows() == 1).all():
        raise UnsupportedModel(
            f"{where}: {tensor.name} scales the rotary frequencies, which is not supported"
        )


def _settle_head(
    model: SourceModel, config: dict[str, Any], steps: list[Step], warnings: list[str]
) -> list[Step]:
    """Set config["tied"] and drop a head that tied models do not need."""
    by_name = {step.name: step for step in steps}
    head, where = by_name.get("head"), model.path
    tied = config.setdefault("tied", None)
    if head is None:
        if tied is False:
            raise ConversionError(
                f"{where}: no output head, and the config says that it is not the embedding",
                hint="set tie_word_embeddings to true in config.json if the model was trained so",
            )
        config["tied"] = True
        return steps
    if tied is False:
        return steps
    equal = _equal(model.tensors[by_name["embedding"].source], model.tensors[head.source])
    if tied is None and not equal:
        config["tied"] = False
        return steps
    if not equal:
        warnings.append(
            f"{where}: {head.source} differs from the embedding, but the config says that they are "
            "tied: the embedding is used for both"
        )
    config["tied"] = True
    return [step for step in steps if step is not head]


def _equal(a: SourceTensor, b: SourceTensor) -> bool:
    if (a.label, a.shape) != (b.label, b.shape):
        return False
    a, b = a.otherwise or a, b.otherwise or b
    blocks = row_blocks(a.shape[0], a.shape[1])
    equal = all(np.array_equal(a.read(rows).rows(), b.read(rows).rows()) for rows in blocks)
    a.release()
    b.release()
    return equal


def _check_end_tokens(config: dict[str, Any], warnings: list[str]) -> None:
    good = [token for token in config.get("eos", []) if token < config["vocab"]]
    for token in config.get("eos", []):
        if token not in good:
            warnings.append(
                f"end token {token} is left out: the embedding has {config['vocab']} rows"
            )
    config["eos"] = good


def _check_config(model: SourceModel, config: Mapping[str, Any]) -> None:
    """What the model code would refuse to load is refused here."""
    try:
        models.architecture(model.architecture).read_config(
            {"architecture": model.architecture, **config}
        )
    except BonsaiError as error:
        raise UnsupportedModel(f"{model.path}: {error}", hint=error.hint) from None


def _tokenizer_size(model: SourceModel) -> int | None:
    """One more than the largest id of tokenizer.json."""
    data = model.extras.get(TOKENIZER)
    if data is None:
        return None
    where = f"{model.path}: {TOKENIZER}"
    parsed = parse_object(data, where, most=TOKENIZER_MARKS)
    try:
        vocab = parsed["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [entry["id"] for entry in parsed.get("added_tokens") or []]
        size = max(ids) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConversionError(f"{where}: it has no vocabulary of the usual form") from None
    if type(size) is not int or size < 1:
        raise ConversionError(f"{where}: {size!r} is not a number of ids")
    return size


def _recommended_sampling(model: SourceModel, warnings: list[str]) -> dict[str, Any] | None:
    """The settings of generation_config.json, if it says that the model should be sampled."""
    data = model.extras.get(GENERATION)
    if data is None:
        return None
    values = parse_object(data, f"{model.path}: {GENERATION}")
    found = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    if values.get("do_sample") is not True or not found:
        return None
    try:
        sampling = Sampling(**found)
    except InvalidRequest as error:
        warnings.append(f"{GENERATION}: {error}: its sampling settings are left out")
        return None
    return {key: getattr(sampling, key) for key in found}


def _shape(shape: tuple[int, ...]) -> str:
    return json.dumps(list(shape))
