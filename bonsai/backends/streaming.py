"""Running a checkpoint that is larger than the memory it may have: layers come and go with use.

Knows when to tell the system that pages will be wanted or may go; `planner` says which layers stay.
Does not know models or kernels: layers are mapped files, so a page that is not there is read when
it is touched, and what is computed never depends on any advice.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bonsai import models
from bonsai.backends import MemoryLimit, Progress
from bonsai.backends.marks import LIMIT, WORTH
from bonsai.backends.ops import Array, Ops
from bonsai.backends.planner import (
    Place,
    Plan,
    delta_bytes,
    kv_bytes,
    layer_names,
    make_plan,
    read_sizes,
)
from bonsai.errors import BackendUnavailable, FormatError
from bonsai.format import Checkpoint

__all__ = ["StreamedLayers", "load", "plan_memory", "streamed"]

SLACK = 64 << 20
"""What allocators, thread pools and tables of angles take while a reply runs."""


class StreamedLayers(Sequence[Any]):
    """Layers of which the `streamed` ones have their pages only while they compute.

    Iterate it as often and from as many threads as you like. Each layer begins with a look at the
    files: of one that is cut short the system takes the pages away, and touching them would end the
    process. A file that is cut while a layer computes still does that.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        checkpoint: Checkpoint,
        streamed: Sequence[int],
        ahead: int = 1,
    ) -> None:
        self._layers = tuple(layers)
        self._checkpoint = checkpoint
        self._streamed = tuple(streamed)
        self._ahead = ahead
        self._names = layer_names(checkpoint, len(self._layers))
        self._stamps = {path: _stamp(path) for path in _files(checkpoint)}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[Any]:
        for i in self._streamed[: self._ahead]:
            self._expect(i)
        following = iter(self._streamed[self._ahead :])
        for i, layer in enumerate(self._layers):
            self.check_files()
            if i not in self._streamed:
                yield layer
                continue
            for later in islice(following, 1):
                self._expect(later)
            try:
                yield layer
            finally:
                for name in self._names[i]:
                    self._checkpoint.release(name)

    def check_files(self) -> None:
        """Raises FormatError when a file is not the one that was opened."""
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise FormatError(
                    f"{path}: the file was changed or replaced while its layers were being read",
                    hint="put it back, or load the model again",
                )

    def _expect(self, i: int) -> None:
        """Have the system read layer `i` while others compute."""
        for name in self._names[i]:
            self._checkpoint.prefetch(name)


@dataclass(frozen=True, slots=True)
class MappedModel(models.Model):
    """A model that looks after its files before each forward."""

    checkpoint: Checkpoint

    def forward(self, ops: Ops, tokens: Array, state: Any) -> Array:
        """As that of any model; raises FormatError when a file was written to."""
        self.checkpoint.check_files()
        return models.Model.forward(self, ops, tokens, state)


@dataclass(frozen=True, slots=True)
class StreamedModel(models.Model):
    """A model that looks after its files before each forward: the embedding is read first."""

    def forward(self, ops: Ops, tokens: Array, state: Any) -> Array:
        """As that of any model; raises FormatError when a file is not the one that was opened."""
        layers = self.weights.layers
        assert isinstance(layers, StreamedLayers)
        layers.check_files()
        return models.Model.forward(self, ops, tokens, state)


def load(
    checkpoint: Checkpoint,
    ops: Ops,
    memory: MemoryLimit | None,
    kv_bits: int,
    progress: Progress | None = None,
) -> tuple[models.Model, str]:
    """The model within the memory, and what to say about it; `kv_bits` per key or value.

    Raises InvalidRequest before anything is read when the memory is too small.
    """
    if memory is None or memory.limit is None:
        return _mapped(models.load(checkpoint, ops, progress), checkpoint), ""
    if not hasattr(mmap, "MADV_DONTNEED"):
        raise BackendUnavailable(
            f"memory_limit needs madvise, which {sys.platform} does not have",
            hint="leave it out: the files are mapped, and the system drops pages under pressure",
        )
    plan = plan_memory(checkpoint, memory, kv_bits)
    model = models.load(checkpoint, ops, progress)
    if not plan.streams:
        return _mapped(model, checkpoint), ""
    return streamed(model, checkpoint, plan.streamed, plan.window - 1), f", {plan}"


def plan_memory(checkpoint: Checkpoint, memory: MemoryLimit, kv_bits: int) -> Plan:
    """What a process needs whose weights are mapped files."""
    cfg = read_sizes(checkpoint)
    context = min(memory.context, cfg.context)
    marks = 2 + min(LIMIT, context // WORTH)
    state = kv_bytes(cfg.state, kv_bits, context) + marks * delta_bytes(cfg.state)
    fixed = {"the program": resident_bytes() + SLACK}
    place = Place("memory", "--memory-limit", "the disk", fixed)
    return make_plan(checkpoint, cfg, place, memory.limit, memory, state)


def _mapped(model: models.Model, checkpoint: Checkpoint) -> MappedModel:
    return MappedModel(model.architecture, model.config, model.weights, checkpoint)


def streamed(
    model: models.Model, checkpoint: Checkpoint, indices: Sequence[int], ahead: int = 1
) -> StreamedModel:
    """The same model with the layers of these indices coming and going."""
    layers = StreamedLayers(model.weights.layers, checkpoint, indices, ahead)
    weights = replace(model.weights, layers=layers)
    return StreamedModel(model.architecture, model.config, weights)


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold tensors."""
    found = checkpoint.manifest.files
    folder = Path(os.path.abspath(checkpoint.path))
    return [folder / n for n in found if n.endswith((".safetensors", ".npz"))]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise FormatError(
            f"{path}: the file is gone: {error.strerror or error}",
            hint="put it back, or load the model again",
        ) from None
    return found.st_size, found.st_mtime_ns


def resident_bytes() -> int:
    """Memory of this process now, mapped files included; where only a peak is known, the peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
