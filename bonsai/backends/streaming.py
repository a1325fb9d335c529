"""Running a checkpoint that is larger than the memory it may have: layers come and go with use.

Knows what a reply needs in memory, which layers may stay, and when to tell the system that pages
will be wanted or may go. Does not know models or kernels: layers are mapped files, so a page that
is not there is read when it is touched, and what is computed never depends on any advice.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bonsai import models
from bonsai.backends import MemoryLimit, Progress
from bonsai.backends.eager import CHUNK
from bonsai.backends.marks import LIMIT, WORTH
from bonsai.backends.ops import Array, Ops
from bonsai.config import StateSpec
from bonsai.errors import BackendUnavailable, FormatError, InvalidRequest
from bonsai.format import Checkpoint
from bonsai.models.decoder import Sizes
from bonsai.sizes import show_size

__all__ = ["Plan", "StreamedLayers", "load", "make_plan", "streamed"]

WINDOW = 2
"""Layers beside those that stay: the one that computes, and the one before it or after it."""
SLACK = 64 << 20
"""What allocators, thread pools and tables of angles take while a reply runs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many layers stay in memory. `needs` are the bytes of everything else, by name."""

    layers: int
    stay: int
    needs: dict[str, int]

    @property
    def streams(self) -> bool:
        return self.stay < self.layers

    def __str__(self) -> str:
        return f"{self.stay} of {self.layers} layers stay in memory"


class StreamedLayers(Sequence[Any]):
    """Layers of which the first `stay` keep their pages; the others have them while they compute.

    Iterate it as often and from as many threads as you like. Each layer begins with a look at the
    files: of one that is cut short the system takes the pages away, and touching them would end the
    process. A file that is cut while a layer computes still does that.
    """

    def __init__(self, layers: Sequence[Any], checkpoint: Checkpoint, stay: int) -> None:
        self._layers = tuple(layers)
        self._checkpoint = checkpoint
        self._stay = stay
        self._names = _names_of_layers(checkpoint, len(self._layers))
        self._stamps = {path: _stamp(path) for path in _files(checkpoint)}

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __iter__(self) -> Iterator[Any]:
        self._expect(self._stay)
        for i, layer in enumerate(self._layers):
            self.check_files()
            if i < self._stay:
                yield layer
                continue
            self._expect(i + 1)
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
        """Have the system read layer `i` while another one computes."""
        if i < len(self._layers):
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
    token_bytes: int,
    progress: Progress | None = None,
) -> tuple[models.Model, str]:
    """The model within the memory, and what to say about it; `token_bytes` per key or value.

    Raises InvalidRequest before anything is read when the memory is too small.
    """
    if memory is None:
        return _mapped(models.load(checkpoint, ops, progress), checkpoint), ""
    if not hasattr(mmap, "MADV_DONTNEED"):
        raise BackendUnavailable(
            f"memory_limit needs madvise, which {sys.platform} does not have",
            hint="leave it out: the files are mapped, and the system drops pages under pressure",
        )
    cfg = models.architecture(checkpoint.architecture).read_config(checkpoint.config)
    plan = make_plan(checkpoint, cfg, memory, token_bytes, resident_bytes())
    model = models.load(checkpoint, ops, progress)
    if not plan.streams:
        return _mapped(model, checkpoint), ""
    return streamed(model, checkpoint, plan.stay), f", {plan}"


def _mapped(model: models.Model, checkpoint: Checkpoint) -> MappedModel:
    return MappedModel(model.architecture, model.config, model.weights, checkpoint)


def streamed(model: models.Model, checkpoint: Checkpoint, stay: int) -> StreamedModel:
    """The same model with its layers coming and going, but the first `stay`."""
    layers = StreamedLayers(model.weights.layers, checkpoint, stay)
    weights = replace(model.weights, layers=layers)
    return StreamedModel(model.architecture, model.config, weights)


def make_plan(
    checkpoint: Checkpoint, cfg: Sizes, memory: MemoryLimit, token_bytes: int, program: int
) -> Plan:
    """Which layers may stay; `program` are the bytes in use before anything is loaded."""
    layers = [
        sum(map(checkpoint.tensor_bytes, names))
        for names in _names_of_layers(checkpoint, cfg.layers)
    ]
    tables = checkpoint.nbytes - sum(layers)
    context = min(memory.context, cfg.context)
    needs = {
        "the program": program + SLACK,
        "embedding and head": tables,
        f"a state of {context:,} tokens": _state_bytes(cfg.state, context, token_bytes),
        "activations": _activation_bytes(cfg, context),
    }
    left = memory.limit - sum(needs.values())
    if sum(layers) <= left:
        return Plan(cfg.layers, cfg.layers, needs)
    window = WINDOW * max(layers)
    if window > left:
        needs["two layers"] = window
        raise _too_small(memory, needs)
    stay, used = 0, window
    while used + layers[stay] <= left:
        used += layers[stay]
        stay += 1
    return Plan(cfg.layers, stay, needs)


def _too_small(memory: MemoryLimit, needs: dict[str, int]) -> InvalidRequest:
    total = sum(needs.values())
    listed = ", ".join(f"{name} {show_size(count)}" for name, count in needs.items())
    return InvalidRequest(
        f"memory_limit is {show_size(memory.limit)}, this model needs {show_size(total)}: {listed}",
        hint=f"--memory-limit {-(-total // 2**20)}MiB, or a smaller --max-context",
    )


def _names_of_layers(checkpoint: Checkpoint, count: int) -> list[list[str]]:
    """The tensors of each layer, in the order of the file. A config with more layers than the file
    has is refused by `models.load`."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in checkpoint.names():
        kind, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if kind == "layers" and number.isdigit() and int(number) < count:
            found[int(number)].append(name)
    return found


def _state_bytes(spec: StateSpec, context: int, token_bytes: int) -> int:
    """Keys and values, and the recurrent memory with the marks that a session keeps of it."""
    total = 2 * spec.kv_layers * spec.kv_heads * spec.head_dim * token_bytes * context
    if spec.delta is not None:
        d = spec.delta
        each = (d.taps - 1) * d.channels + d.heads * d.key_dim * d.value_dim
        total += 4 * d.layers * each * (2 + min(LIMIT, context // WORTH))
    return total


def _activation_bytes(cfg: Sizes, context: int) -> int:
    """float32 rows of the longest forward, and the logits with what sampling sorts."""
    rows = min(CHUNK, context)
    return 4 * (rows * (4 * cfg.hidden + 4 * cfg.ffn) + 6 * cfg.vocab)


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
