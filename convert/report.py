"""What a conversion did, tensor by tensor, for people and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

__all__ = ["ConversionReport", "TensorReport"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor as written. Errors are relative: |w - w'| / |w| over the whole tensor.

    `source` is the class it had ("Q4_1"); `zeros` the fraction of zero weights of a ternary tensor,
    None for others; `squares` the sum of the squared weights where the error was measured.
    """

    name: str
    source: str
    packing: str
    group: int | None
    shape: tuple[int, ...]
    nbytes: int
    zeros: float | None = None
    relative_error: float = 0.0
    squares: float = 0.0

    @property
    def weights(self) -> int:
        return prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """All planes and the padding of short groups included."""
        return 8 * self.nbytes / self.weights

    def line(self) -> str:
        packing = self.packing if self.group is None else f"{self.packing} g{self.group}"
        shape = " x ".join(map(str, self.shape))
        text = f"{self.name:26} {shape:>14}  {self.source:>6} -> {packing:8} "
        text += f"{self.bits_per_weight:7.3f} bits"
        if self.zeros is not None:
            text += f"  zeros {self.zeros:6.1%}"
        if self.relative_error:
            text += f"  error {self.relative_error:.3g}"
        return text


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of `convert`. `fallbacks`: tensors that could not be stored as was asked."""

    path: Path
    kind: str
    architecture: str
    tensors: tuple[TensorReport, ...]
    warnings: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Parameters stored."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(self.weights, 1)

    @property
    def zeros(self) -> float | None:
        """The fraction of zero weights over all ternary tensors, None when there are none."""
        ternary = [tensor for tensor in self.tensors if tensor.zeros is not None]
        weights = sum(tensor.weights for tensor in ternary)
        if not weights:
            return None
        return sum((tensor.zeros or 0.0) * tensor.weights for tensor in ternary) / weights

    @property
    def relative_error(self) -> float:
        """Over all tensors that were rounded: |w - w'| / |w|; 0 when none was."""
        squares = sum(tensor.squares for tensor in self.tensors)
        errors = sum(tensor.squares * tensor.relative_error**2 for tensor in self.tensors)
        return (errors / squares) ** 0.5 if squares else 0.0

    def lines(self, *, tensors: bool = False) -> Iterator[str]:
        """The report as text: totals, one line per packing, fallbacks, warnings."""
        if tensors:
            for tensor in self.tensors:
                yield tensor.line()
        count = len(self.tensors)
        yield f"{self.architecture} from {self.kind}: {count} tensors, {self.weights:,} weights"
        yield f"{self.nbytes:,} bytes of tensors, {self.bits_per_weight:.3f} bits per weight"
        for (what, source, packing, group), count in self._classes().items():
            stored = packing if group is None else f"{packing} in groups of {group}"
            yield f"  {count} {what}: {source} -> {stored}"
        if self.zeros is not None:
            yield f"zero weights: {self.zeros:.1%} of the ternary ones"
        error = self.relative_error
        yield (
            f"relative error: {error:.4g}" if error else "relative error: 0 (every weight is exact)"
        )
        for text in self.fallbacks:
            yield f"fallback: {text}"
        for text in self.warnings:
            yield f"warning: {text}"

    def _classes(self) -> Counter[tuple[str, str, str, int | None]]:
        return Counter((_role(t), t.source, t.packing, t.group) for t in self.tensors)


def _role(tensor: TensorReport) -> str:
    """What a line of the summary counts: the embedding and head are often kept more precise."""
    if tensor.name in ("embedding", "head"):
        return tensor.name
    return "linears" if len(tensor.shape) == 2 else "norms"
