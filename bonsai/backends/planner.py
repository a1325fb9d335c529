"""What fits into a memory: weights, state, workspace, and which layers have to come and go.

Knows the sizes of a checkpoint's tensors and of what a reply needs beside them. Does not know
devices, files or kernels: each backend says how much memory there is and what it takes for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bonsai import models
from bonsai.backends import MemoryLimit
from bonsai.backends.eager import CHUNK
from bonsai.config import StateSpec
from bonsai.errors import InvalidRequest
from bonsai.format import Checkpoint
from bonsai.models.decoder import Sizes
from bonsai.sizes import show_size

__all__ = [
    "KV_BITS",
    "Place",
    "Plan",
    "activation_bytes",
    "delta_bytes",
    "kv_bytes",
    "layer_names",
    "make_plan",
    "read_sizes",
    "refuse_gpu_limit",
]

KV_BITS = (16, 8, 4)
"""Codecs of keys and values, by their bits; 8 and 4 have an fp16 scale for each 32 elements."""


@dataclass(frozen=True, slots=True)
class Place:
    """A memory: its name for people, the flag that limits it, and what a streamed layer comes from.

    `fixed` are the bytes that are in use whatever the model is.
    """

    name: str
    flag: str
    source: str
    fixed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What lies in a memory while one reply runs. All sizes are bytes.

    needs     everything but the layers, by name
    layers    of each layer
    streamed  the layers that come and go, in order
    window    how many of them have room at one time
    limit     None where nothing limits it
    """

    place: Place
    needs: Mapping[str, int]
    layers: tuple[int, ...]
    streamed: tuple[int, ...]
    window: int
    limit: int | None

    @property
    def streams(self) -> bool:
        return bool(self.streamed)

    @property
    def stay(self) -> int:
        return len(self.layers) - len(self.streamed)

    @property
    def resident_bytes(self) -> int:
        """Of the layers that stay."""
        return sum(self.layers) - self.streamed_bytes

    @property
    def streamed_bytes(self) -> int:
        """What every token moves."""
        return sum(self.layers[i] for i in self.streamed)

    @property
    def window_bytes(self) -> int:
        """Room for the layers that come and go."""
        return _window(self.layers, self.streamed, self.window)

    @property
    def total(self) -> int:
        """What is in use at most."""
        return sum(self.needs.values()) + self.resident_bytes + self.window_bytes

    def __str__(self) -> str:
        return f"{self.stay} of {len(self.layers)} layers stay in {self.place.name}"

    def lines(self) -> list[str]:
        """The plan as a table for people."""
        rows = {**self.needs, f"{self.stay} of {len(self.layers)} layers": self.resident_bytes}
        if self.streamed:
            rows[f"room for {self.window} streamed layers"] = self.window_bytes
        rows["in all"] = self.total
        head = f"{self.place.name}: no limit" if self.limit is None else (
            f"{self.place.name}: {show_size(self.limit)} allowed"
        )  # fmt: skip
        found = [head, *(f"  {name:34} {show_size(count):>11}" for name, count in rows.items())]
        if self.streamed:
            found.append(
                f"  every token reads {show_size(self.streamed_bytes)} of {len(self.streamed)} "
                f"layers from {self.place.source}"
            )
        return found


def refuse_gpu_limit(memory: MemoryLimit | None, backend: str) -> None:
    """Raises InvalidRequest for a limit that `backend` has no use for."""
    if memory is not None and memory.gpu_limit is not None:
        raise InvalidRequest(
            f"gpu_memory_limit is {show_size(memory.gpu_limit)}, but backend '{backend}' has no "
            "memory of a GPU to itself",
            hint="--backend cuda, or --memory-limit for this one",
        )


def read_sizes(checkpoint: Checkpoint) -> Sizes:
    """The config of a checkpoint, as far as every architecture has it."""
    return models.architecture(checkpoint.architecture).read_config(checkpoint.config)


def make_plan(
    checkpoint: Checkpoint,
    cfg: Sizes,
    place: Place,
    limit: int | None,
    memory: MemoryLimit,
    state: int,
) -> Plan:
    """Which layers stay, as many as fit; `state` are the bytes of a conversation.

    Streamed layers are spread evenly, so that moving one overlaps with computing those between.
    Raises InvalidRequest, with the plan, where not even `memory.prefetch_layers` + 1 of them fit.
    """
    layers = tuple(
        sum(map(checkpoint.tensor_bytes, names)) for names in layer_names(checkpoint, cfg.layers)
    )
    context = min(memory.context, cfg.context)
    needs = {
        **place.fixed,
        "embedding and head": checkpoint.nbytes - sum(layers),
        f"a state of {context:,} tokens": state,
        "activations": activation_bytes(cfg, context),
    }
    window = memory.prefetch_layers + 1
    streamed: tuple[int, ...] | None = ()
    if limit is not None:
        streamed = _fewest(layers, limit - sum(needs.values()), window)
    if streamed is None:
        needs[f"room for {window} streamed layers"] = _window(layers, range(len(layers)), window)
        raise _too_small(place, limit or 0, needs)
    return Plan(place, needs, layers, streamed, window, limit)


def _fewest(layers: Sequence[int], left: int, window: int) -> tuple[int, ...] | None:
    """The fewest layers that have to stream, spread evenly; None where even all do not fit."""
    for count in range(len(layers) + 1):
        chosen = tuple((2 * i + 1) * len(layers) // (2 * count) for i in range(count))
        stay = sum(layers) - sum(layers[i] for i in chosen)
        if stay + _window(layers, chosen, window) <= left:
            return chosen
    return None


def _window(layers: Sequence[int], streamed: Sequence[int], window: int) -> int:
    return min(window, len(streamed)) * max((layers[i] for i in streamed), default=0)


def _too_small(place: Place, limit: int, needs: Mapping[str, int]) -> InvalidRequest:
    total = sum(needs.values())
    name = place.flag.removeprefix("--").replace("-", "_")
    listed = ", ".join(f"{name} {show_size(count)}" for name, count in needs.items())
    fewer = ", fewer --prefetch-layers" if "streamed layers" in listed else ""
    return InvalidRequest(
        f"{name} is {show_size(limit)}, this model needs {show_size(total)}: {listed}",
        hint=f"{place.flag} {-(-total // 2**20)}MiB{fewer}, or a smaller --max-context",
    )


def layer_names(checkpoint: Checkpoint, count: int) -> list[list[str]]:
    """The tensors of each layer, in the order of the file. A config with more layers than the file
    has is refused by `models.load`."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in checkpoint.names():
        kind, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if kind == "layers" and number.isdigit() and int(number) < count:
            found[int(number)].append(name)
    return found


def kv_bytes(spec: StateSpec, bits: int, context: int) -> int:
    """Keys and values of `context` tokens in the codec of 32, 16, 8 or 4 bits."""
    elements = 2 * spec.kv_layers * spec.kv_heads * context
    groups = -(-spec.head_dim // 32)
    scales = 2 * groups if bits < 16 else 0
    return elements * (bits * spec.head_dim // 8 + scales)


def delta_bytes(spec: StateSpec) -> int:
    """One copy of the recurrent memory: convolution tails and matrices, float32."""
    if spec.delta is None:
        return 0
    d = spec.delta
    return 4 * d.layers * ((d.taps - 1) * d.channels + d.heads * d.key_dim * d.value_dim)


def activation_bytes(cfg: Sizes, context: int) -> int:
    """float32 rows of the longest forward, and the logits with what sampling sorts."""
    rows = min(CHUNK, context)
    return 4 * (rows * (4 * cfg.hidden + 4 * cfg.ffn) + 6 * cfg.vocab)
