"""One tensor of a source -> one tensor of a checkpoint: which packing, and its planes.

Knows packings, groups and how much was lost. Does not know files or architectures. Works on blocks
of rows, so that beyond the planes of the result only a few megabytes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from bonsai import affine
from bonsai.convert.blocks import TYPES
from bonsai.convert.report import TensorReport
from bonsai.convert.source import NotOfThisClass, Rows, SourceTensor, refuse_rows
from bonsai.convert.ternarize import exact_ternary, least_squares
from bonsai.errors import ConversionError
from bonsai.matrix import DENSE, DenseMatrix, Matrix, PackedMatrix
from bonsai.ternary import PACKINGS, census, faulty_rows, pack, unpack

__all__ = ["Encoded", "Options", "encode_matrix", "read_vector", "row_blocks"]

BLOCK_WEIGHTS = 1 << 18  # per block of rows: about 10 MB of temporaries at the worst
ROUNDED = {kind.name for kind in TYPES.values() if kind.rounds}
AFFINE_GROUP = 32  # of q4 and q8 made here; the group of the GGUF classes
FAULTS = {
    "t2": "has the code 3 (twice the scale), which no ternary matrix has",
    "t5": "has a byte that is not five trits",
}
Method = Callable[[Matrix, int], "Matrix | None"]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `quant` None keeps each tensor's precision class.

    `exact` refuses every rounding that was not asked for: classes without an exact packing become
    float32. `tables` lets `quant` apply to the embedding and the head too.
    """

    quant: str | None = None
    group_size: int = 128
    packing: str | None = None
    exact: bool = False
    tables: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A matrix to write, what happened to it, and how it differs from what was asked for, if so."""

    matrix: Matrix
    report: TensorReport
    fallback: str | None = None


@dataclass(slots=True)
class _Totals:
    """Sums over the blocks of one tensor."""

    zeros: int = 0
    error: float = 0.0
    squares: float = 0.0

    def add(self, source: Matrix, stored: Matrix, lossy: bool) -> None:
        if isinstance(stored, PackedMatrix) and stored.packing in PACKINGS:
            self.zeros += census(stored.codes, stored.packing, stored.group, stored.shape[1])[0]
        if lossy:
            values = source.rows().reshape(-1)
            difference = values - stored.rows().reshape(-1)
            self.error += float(difference @ difference)
            self.squares += float(values @ values)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A way to store a tensor; `fallback` is what to tell the user if it is the one that fits."""

    method: Method
    lossy: bool = False
    fallback: str | None = None


class _Builder:
    """Gathers blocks of rows of one packing into whole planes."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.name, self.shape, self.filled = name, shape, 0
        self.kind: tuple | None = None
        self.planes: list[np.ndarray] = []
        self.like: Matrix | None = None

    def add(self, block: Matrix) -> bool:
        """False if the block is of another packing than those before."""
        kind = (block.packing, getattr(block, "group", None))
        if self.like is None:
            self.kind, self.like = kind, block
            rows = self.shape[0]
            self.planes = [np.empty((rows, p.shape[1]), p.dtype) for p in _planes(block)]
        if kind != self.kind:
            return False
        end = self.filled + block.shape[0]
        for whole, part in zip(self.planes, _planes(block), strict=True):
            whole[self.filled : end] = part
        self.filled = end
        return True

    def finish(self) -> Matrix:
        like = self.like
        if isinstance(like, PackedMatrix):
            codes, scales, *biases = self.planes
            return PackedMatrix(
                self.name, like.packing, self.shape, like.group, codes, scales,
                biases[0] if biases else None, like.transform,
            )  # fmt: skip
        assert isinstance(like, DenseMatrix)
        return DenseMatrix(self.name, like.packing, self.shape, self.planes[0], like.transform)


def encode_matrix(
    name: str, role: str, tensor: SourceTensor, order: np.ndarray | None, options: Options
) -> Encoded:
    """Choose the packing of a matrix and fill its planes; `order` is the source row of each row.

    Tries one method after another: each either fits all rows or gives up at the first that it does
    not fit. The last one always fits.
    """
    roles = ("linear", "table") if options.tables else ("linear",)
    wanted = options.quant is not None and role in roles
    if wanted:
        tensor = tensor.otherwise or tensor
    try:
        return _encode(name, tensor, order, options, wanted)
    except NotOfThisClass as error:
        if tensor.otherwise is None:
            raise
        encoded = _encode(name, tensor.otherwise, order, options, wanted)
        note = f"{name}: {error}: kept as {encoded.matrix.packing}"
        return replace(encoded, fallback=encoded.fallback or note)


def _encode(
    name: str, tensor: SourceTensor, order: np.ndarray | None, options: Options, wanted: bool
) -> Encoded:
    if wanted:
        attempts = [_quantizer(name, options)]
    else:
        attempts = _keepers(name, tensor, options)
    for attempt in attempts:
        totals = _Totals()
        matrix = _run(name, tensor, order, attempt, totals)
        if matrix is not None:
            break
    else:
        raise AssertionError(f"{name}: no method fits")
    if not wanted:
        matrix = _merge_groups(matrix, tensor)
    matrix, refused = _repack(matrix, options.packing)
    return Encoded(matrix, _report(name, tensor, matrix, totals), attempt.fallback or refused)


def read_vector(name: str, tensor: SourceTensor) -> np.ndarray:
    """A norm as float32 [n]."""
    values = tensor.read(slice(None)).rows().reshape(-1)
    if not np.isfinite(values).all():
        raise ConversionError(f"{name} ({tensor.name}): has values that are not finite")
    return np.ascontiguousarray(values)


def row_blocks(rows: int, columns: int, order: np.ndarray | None = None) -> Iterator[Rows]:
    """Blocks of rows, in order, each of about BLOCK_WEIGHTS weights."""
    step = max(1, BLOCK_WEIGHTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        yield part if order is None else order[part]


def _run(
    name: str, tensor: SourceTensor, order: np.ndarray | None, attempt: _Attempt, totals: _Totals
) -> Matrix | None:
    """All rows by one method, or None where it gives up."""
    shape = (tensor.shape[0], tensor.shape[1])
    builder = _Builder(name, shape)
    # Plain values in place need no copy: the writer reads the source's own pages.
    mapped = attempt.method is _as_it_is and order is None and tensor.label.lower() in DENSE
    for rows in row_blocks(*shape, order):
        source = tensor.read(rows)
        check_values(f"{name} ({tensor.name})", source, rows)
        if mapped:
            continue
        stored = attempt.method(source, builder.filled)
        if stored is None or not builder.add(stored):
            return None
        totals.add(source, stored, attempt.lossy or tensor.rounding() > 0)
    return replace(tensor.read(slice(None)), name=name) if mapped else builder.finish()


def check_values(name: str, block: Matrix, rows: Rows) -> None:
    """Refuse values and scales that are not finite, and codes that no packer makes."""
    if isinstance(block, DenseMatrix):
        bad = ~np.isfinite(block.rows()).all(axis=1)
        what = "has weights that are not finite"
    else:
        planes = [block.scales] if block.biases is None else [block.scales, block.biases]
        bad = ~np.all([np.isfinite(plane).all(axis=1) for plane in planes], axis=0)
        what = "has a scale that is not finite"
        if block.packing in PACKINGS and not bad.any():
            bad = faulty_rows(block.codes, block.packing, block.group)
            what = FAULTS.get(block.packing, "")
    refuse_rows(name, bad, rows, what)


def _quantizer(name: str, options: Options) -> _Attempt:
    if options.quant == "ternary":
        return _Attempt(_least_squares(name, options.group_size), lossy=True)
    return _Attempt(_affine(name, str(options.quant)), lossy=True)


def _keepers(name: str, tensor: SourceTensor, options: Options) -> list[_Attempt]:
    """The methods that keep a tensor's class, the best first."""
    if tensor.label.lower() in DENSE:
        groups = [group for group in (256, 128, 64) if group <= options.group_size]
        return [_Attempt(_exact(name, group)) for group in groups] + [_Attempt(_as_it_is)]
    if tensor.label == "Q6_K":
        note = f"{name}: Q6_K has no packing of its own: stored as "
        if options.exact:
            return [_Attempt(_as_it_is, fallback=note + "float32")]
        return [_Attempt(_affine(name, "q8"), lossy=True, fallback=note + "q8, which rounds it")]
    if tensor.label in ROUNDED:
        note = f"{name}: {tensor.label} has scales of 17 bits: "
        wide = _Attempt(_as_float32, fallback=note + "stored as float32")
        kept = note + "its codes are kept, its scales are rounded to fp16"
        return [wide] if options.exact else [_Attempt(_narrowed, True, kept), wide]
    note = f"{name}: fp16 cannot hold a scale or bias of this {tensor.label} tensor: "
    return [_Attempt(_as_packed), _Attempt(_as_float32, fallback=note + "stored as float32")]


def _as_it_is(block: Matrix, first_row: int) -> Matrix:
    return block


def _as_packed(block: Matrix, first_row: int) -> Matrix | None:
    return block if isinstance(block, PackedMatrix) else None


def _narrowed(block: Matrix, first_row: int) -> Matrix | None:
    """The same codes with scales and biases rounded to fp16."""
    assert isinstance(block, PackedMatrix)
    assert block.biases is not None
    with np.errstate(over="ignore"):
        scales, biases = block.scales.astype(np.float16), block.biases.astype(np.float16)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        return None
    return replace(block, scales=scales, biases=biases)


def _as_float32(block: Matrix, first_row: int) -> Matrix:
    return DenseMatrix(block.name, "f32", block.shape, block.rows(), block.transform)


def _exact(name: str, group: int) -> Method:
    """Float weights that are ternary already."""

    def method(block: Matrix, first_row: int) -> Matrix | None:
        found = exact_ternary(block.rows(), group)
        if found is None:
            return None
        codes = pack(found[0], "t2", group)
        return PackedMatrix(
            name, "t2", block.shape, group, codes, found[1], transform=block.transform
        )

    return method


def _least_squares(name: str, group: int) -> Method:
    def method(block: Matrix, first_row: int) -> Matrix:
        trits, scales = least_squares(name, block.rows(), group, first_row)
        codes = pack(trits, "t2", group)
        return PackedMatrix(
            name, "t2", block.shape, group, codes, scales, transform=block.transform
        )

    return method


def _affine(name: str, packing: str) -> Method:
    def method(block: Matrix, first_row: int) -> Matrix | None:
        try:
            codes, scales, biases = affine.quantize(block.rows(), packing, AFFINE_GROUP)
        except ValueError as error:
            last = first_row + block.shape[0] - 1
            raise ConversionError(f"{name}: rows {first_row} to {last}: {error}") from None
        return PackedMatrix(
            name, packing, block.shape, AFFINE_GROUP, codes, scales, biases, block.transform
        )

    return method


def _merge_groups(matrix: Matrix, tensor: SourceTensor) -> Matrix:
    """Groups of 64 whose fp16 scales are equal in pairs are groups of 128: the codes stay."""
    if not (isinstance(matrix, PackedMatrix) and matrix.packing == "t2" and matrix.group == 64):
        return matrix
    bits = matrix.scales.view(np.uint16)
    if matrix.shape[1] % 128 or not np.array_equal(bits[:, 0::2], bits[:, 1::2]):
        return matrix
    return replace(matrix, group=128, scales=np.ascontiguousarray(matrix.scales[:, 0::2]))


def _repack(matrix: Matrix, packing: str | None) -> tuple[Matrix, str | None]:
    """The same trits in another packing, and why not if it cannot hold them."""
    if packing is None or not isinstance(matrix, PackedMatrix) or matrix.packing == packing:
        return matrix, None
    if matrix.packing not in PACKINGS:
        return matrix, None
    if matrix.group not in PACKINGS[packing].groups:
        return matrix, f"{matrix.name}: {packing} has no groups of {matrix.group}: kept as t2"
    builder = _Builder(matrix.name, matrix.shape)
    columns = matrix.shape[1]
    for rows in row_blocks(*matrix.shape):
        trits = unpack(matrix.codes[rows], matrix.packing, matrix.group, columns)
        codes = pack(trits, packing, matrix.group)
        block = (len(trits), columns)
        builder.add(
            replace(matrix, packing=packing, shape=block, codes=codes, scales=matrix.scales[rows])
        )
    return builder.finish(), None


def _report(name: str, tensor: SourceTensor, matrix: Matrix, totals: _Totals) -> TensorReport:
    weights = matrix.shape[0] * matrix.shape[1]
    ternary = matrix.packing in PACKINGS and matrix.packing != "b1"  # which has no zeros
    error = (totals.error / totals.squares) ** 0.5 if totals.squares else 0.0
    return TensorReport(
        name=name,
        source=tensor.label,
        packing=matrix.packing,
        group=getattr(matrix, "group", None),
        shape=matrix.shape,
        nbytes=matrix.nbytes,
        zeros=totals.zeros / weights if ternary else None,
        relative_error=max(error, tensor.rounding()),
        squares=totals.squares,
    )


def _planes(block: Matrix) -> list[np.ndarray]:
    if isinstance(block, DenseMatrix):
        return [block.values]
    return [p for p in (block.codes, block.scales, block.biases) if p is not None]
