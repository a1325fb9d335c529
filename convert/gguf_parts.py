"""GGUF models in several files: `NAME-00001-of-00003.gguf` and so on, as one.

Knows the names of parts and the `split.*` keys. The first part has the metadata of the model; every
part says which it is, of how many, and how many tensors there are in all.
"""

from __future__ import annotations

from pathlib import Path

from bonsai.convert.blocks import Q2_0_ID
from bonsai.convert.gguf import GGUFFile, read_gguf
from bonsai.convert.source import GGUF_PART, part_name
from bonsai.errors import ConversionError

__all__ = ["read_parts"]

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
OF_ONE_FILE = (NUMBER, COUNT, TENSORS, "general.alignment")


def read_parts(path: Path) -> list[GGUFFile]:
    """The file at `path` and, if it is the first part of several, the others in order.

    Raises ConversionError when a part is missing, in another place than its name says, or of
    another model; FormatError and UnsupportedModel as `read_gguf` does.
    """
    first = read_gguf(path)
    count = _integer(first, COUNT, 1)
    if count <= 1:
        return [first]
    match = GGUF_PART.fullmatch(path.name)
    number = _integer(first, NUMBER, -1) + 1
    if match is None:
        raise ConversionError(
            f"{path}: part {number} of {count}, but the name does not end in "
            f"-{number:05}-of-{count:05}.gguf",
            hint="give all parts of the model the names that they had",
        )
    if number != 1:
        raise ConversionError(
            f"{path}: part {number} of {count}", hint=f"name the first part: {part_name(match, 1)}"
        )
    if int(match["count"]) != count:
        raise ConversionError(
            f"{path}: the name says {int(match['count'])} parts, {COUNT} is {count}"
        )
    parts = [first]
    for i in range(2, count + 1):
        other = path.with_name(part_name(match, i))
        if not other.is_file():
            raise ConversionError(f"{other}: part {i} of {count} is missing")
        parts.append(read_gguf(other))
        _check_part(first, parts[-1], i, count)
    _check_all(parts)
    return parts


def _integer(file: GGUFFile, key: str, absent: int) -> int:
    value = file.metadata.get(key, absent)
    if type(value) is not int or (key in file.metadata and value < 0):
        raise ConversionError(f"{file.path}: {key} is {value!r}, expected a number")
    return value


def _check_part(first: GGUFFile, part: GGUFFile, i: int, count: int) -> None:
    found = _integer(part, NUMBER, -1) + 1, _integer(part, COUNT, 1)
    if found != (i, count):
        raise ConversionError(
            f"{part.path}: the name says part {i} of {count}, the file says part {found[0]} of "
            f"{found[1]}",
            hint="the files were renamed, or belong to different models",
        )
    for key, value in part.metadata.items():
        if key not in OF_ONE_FILE and first.metadata.get(key) != value:
            raise ConversionError(
                f"{part.path}: {key} is not what {first.path.name} says",
                hint="the parts belong to different models",
            )


def _check_all(parts: list[GGUFFile]) -> None:
    seen: dict[str, Path] = {}
    layouts: dict[str, str] = {}
    for part in parts:
        for info in part.tensors.values():
            if info.name in seen:
                raise ConversionError(f"{part.path}: {info.name} is also in {seen[info.name].name}")
            seen[info.name] = part.path
            if info.type.id == Q2_0_ID:
                layouts.setdefault(info.type.name, f"{info.name} in {part.path.name}")
    if len(layouts) > 1:
        shown = ", ".join(f"{where} is {name}" for name, where in layouts.items())
        raise ConversionError(f"{parts[0].path}: groups of different sizes: {shown}")
    for part in parts:
        if TENSORS in part.metadata and part.metadata[TENSORS] != len(seen):
            raise ConversionError(
                f"{part.path}: {TENSORS} is {part.metadata[TENSORS]!r}, the {len(parts)} parts "
                f"have {len(seen)} tensors"
            )
