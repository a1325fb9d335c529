"""The tensors of a folder in safetensors: one file, or shards with an index.

Knows `model.safetensors` and `model.safetensors.index.json`. Does not know the manifest or
packings; the converter reads Hugging Face folders with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bonsai.errors import FormatError
from bonsai.format.files import AGAIN, child, read_small
from bonsai.format.safetensors_io import SafetensorsFile, TensorInfo, shown_name
from bonsai.format.strict_json import parse_object

__all__ = ["INDEX", "SINGLE", "ShardedTensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 16 << 20  # bytes


class ShardedTensors:
    """Every tensor of a folder, whatever file holds it; the same methods as SafetensorsFile."""

    bf16: tuple[str, ...] = ("BF16",)

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._files = _open_files(self.path)
        self._home = {name: file for file in self._files for name in file.names()}

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors."""
        return [file.path for file in self._files]

    def names(self) -> list[str]:
        """All tensors, file by file, in the order of their bytes."""
        return list(self._home)

    def info(self, name: str) -> TensorInfo:
        """Raises FormatError when there is no such tensor."""
        return self._file(name).info(name)

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the file; bf16 as uint16, 8-bit floats as uint8."""
        return self._file(name).array(name)

    def release(self, name: str) -> None:
        """Tell the system that the pages of a tensor may leave memory."""
        self._file(name).release(name)

    def prefetch(self, name: str) -> None:
        """Ask the system to read the pages of a tensor soon."""
        self._file(name).prefetch(name)

    def check(self) -> None:
        """Raises FormatError where a file was changed since it was opened."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._home:
            raise FormatError(f"{self.path}: there is no tensor '{name}'")
        return self._home[name]


def _open_files(folder: Path) -> list[SafetensorsFile]:
    single = child(folder, SINGLE, str(folder))
    index = child(folder, INDEX, str(folder))
    if index.exists():
        if single.exists():
            raise FormatError(
                f"{folder}: both {SINGLE} and {INDEX} are here; they may disagree",
                hint="delete the one that does not belong",
            )
        return _open_shards(folder, index)
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards and not single.exists():
        raise FormatError(
            f"{folder}: {len(shards)} shards ({shards[0]}, ...) but no {INDEX}", hint=AGAIN
        )
    return [SafetensorsFile(single)]


def _open_shards(folder: Path, index: Path) -> list[SafetensorsFile]:
    places = _read_index(index)
    paths = {name: child(folder, name, str(index)) for name in sorted(set(places.values()))}
    for name, path in paths.items():
        if not path.is_file():
            raise FormatError(f"{index}: the shard '{name}' is missing", hint=AGAIN)
    files: dict[str, SafetensorsFile] = {}
    try:
        for name, path in paths.items():
            files[name] = SafetensorsFile(path)
        _check_places(index, places, files)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return list(files.values())


def _read_index(index: Path) -> dict[str, str]:
    """Tensor -> shard."""
    places = parse_object(read_small(index, MAX_INDEX), str(index)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise FormatError(f"{index}: 'weight_map' is not an object of file names")
    if not places:
        raise FormatError(f"{index}: 'weight_map' has no entries", hint=AGAIN)
    return places


def _check_places(
    index: Path, places: Mapping[str, str], files: Mapping[str, SafetensorsFile]
) -> None:
    """Every entry is true, and no shard holds a tensor that the index does not place there."""
    homes: dict[str, str] = {}
    for shard, file in files.items():
        for name in file.names():
            if name in homes:
                raise FormatError(
                    f"{index}: tensor {shown_name(name)} is in both '{homes[name]}' and '{shard}'"
                )
            homes[name] = shard
    for name, shard in places.items():
        if name not in homes:
            raise FormatError(
                f"{index}: tensor {shown_name(name)} is in none of the {len(files)} shards",
                hint=AGAIN,
            )
        if homes[name] != shard:
            raise FormatError(
                f"{index}: tensor {shown_name(name)} is not in its shard '{shard}', "
                f"but in '{homes[name]}'",
                hint=AGAIN,
            )
    for name, shard in homes.items():
        if name not in places:
            raise FormatError(
                f"{index}: tensor {shown_name(name)} of '{shard}' is not in the index", hint=AGAIN
            )
