"""A checkpoint -> a file or folder that other runtimes read: exactly, or not at all.

Knows the order of the steps and that nothing half written stays. All that can be known to be wrong
is said before a byte is written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bonsai.convert.export_gguf import TARGETS as GGUF_TARGETS
from bonsai.convert.export_gguf import gguf_metadata, gguf_tensors
from bonsai.convert.export_mlx import MlxPack, write_safetensors
from bonsai.convert.gguf_writer import write_gguf
from bonsai.errors import BonsaiError, InvalidRequest, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.format.beside import beside
from bonsai.format.checkpoint import CONFIG
from bonsai.format.containers import sync
from bonsai.format.files import Progress, child, read_small
from bonsai.format.shards import INDEX, SINGLE

__all__ = ["TARGETS", "ExportReport", "export"]

MLX = "mlx-2bit"
TARGETS = (*GGUF_TARGETS, MLX)
ARCHITECTURES = ("llama", "qwen3")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: how many tensors of each type. All of them are exact."""

    path: Path
    target: str
    architecture: str
    types: Counter[str]
    nbytes: int
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The report as text."""
        count = sum(self.types.values())
        yield f"{self.architecture} as {self.target}: {count} tensors, {self.nbytes:,} bytes"
        for name, number in self.types.most_common():
            yield f"  {number} in {name}"
        yield "every weight is exact"
        yield from (f"note: {text}" for text in self.notes)


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    allow_f16: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the model in a checkpoint folder to `out`, in the form that other runtimes read.

    to         "gguf-pq2_0", "gguf-ptq1_0", "gguf-tq2_0" or "gguf-q2_0": a GGUF file; "mlx-2bit": a
               folder
    allow_f16  store ternary matrices that the target cannot hold as F16, which is exact but large
    progress   called as progress("export", bytes done, bytes)

    Everything else is exact too, or refused. Raises a BonsaiError; `out` is then not there.
    """
    if to not in TARGETS:
        raise InvalidRequest(f"to is {to!r}", hint=f"one of: {', '.join(TARGETS)}")
    target = Path(os.path.abspath(out))
    if os.path.lexists(target):
        raise InvalidRequest(f"{target} exists already", hint="name another, or remove it first")
    with Checkpoint.open(checkpoint) as opened:
        if opened.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{opened.path}: architecture {opened.architecture} is not exported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        write = _mlx if to == MLX else _gguf
        return write(opened, target, to, allow_f16, progress)


def _gguf(
    checkpoint: Checkpoint, target: Path, to: str, allow_f16: bool, progress: Progress | None
) -> ExportReport:
    metadata = gguf_metadata(checkpoint, to, target.stem)
    tensors = gguf_tensors(checkpoint, to, allow_f16)
    step = _counter(sum(tensor.nbytes for tensor in tensors), progress)
    with _beside(target) as partial, open(partial, "xb") as file:
        for tensor in write_gguf(file, metadata, tensors):
            step(tensor.nbytes)
        sync(file)
        size = file.tell()
    notes = ["GGUF has no place for the recommended sampling; it was left out"]
    return ExportReport(
        path=target,
        target=to,
        architecture=checkpoint.architecture,
        types=Counter(tensor.type.name for tensor in tensors),
        nbytes=size,
        notes=tuple(notes if checkpoint.manifest.sampling else ()),
    )


def _mlx(
    checkpoint: Checkpoint, target: Path, to: str, allow_f16: bool, progress: Progress | None
) -> ExportReport:
    pack = MlxPack.of(checkpoint, allow_f16)
    step = _counter(sum(part.nbytes for part in pack.parts), progress)
    files = {CONFIG: json.dumps(pack.config, indent=1).encode(), **_extras(checkpoint)}
    with _beside(target) as folder:
        folder.mkdir()
        for name, data in files.items():
            with open(folder / name, "wb") as file:
                file.write(data)
                sync(file)
        with open(folder / SINGLE, "wb") as file:
            for part in write_safetensors(file, pack.parts):
                step(part.nbytes)
            sync(file)
            size = file.tell() + sum(map(len, files.values()))
    return ExportReport(target, to, checkpoint.architecture, pack.kinds, size)


def _extras(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The tokenizer files, as they are."""
    path, made = checkpoint.path, (CONFIG, INDEX)
    names = [
        name
        for name in checkpoint.manifest.files
        if name not in made and not name.endswith((".safetensors", ".npz"))
    ]
    return {name: read_small(child(path, name, str(path))) for name in names}


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("export", done, total)

    return step


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A hidden path in the same folder, which gets the name `target` if all goes well."""
    try:
        with beside(target) as partial:
            yield partial
            if os.path.lexists(target):
                raise InvalidRequest(f"{target} was made meanwhile by someone else")
            os.replace(partial, target)
    except OSError as error:
        raise BonsaiError(
            f"{target} cannot be written: {error.strerror or error}; nothing was written"
        ) from error
