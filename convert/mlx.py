"""The packed linears of MLX folders: uint32 words of codes, a scale and a bias for each group.

Knows the words of every width and which of them are ternary or binary. Does not know files beyond
the tensors of one module, nor architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from bonsai import affine, ternary
from bonsai.convert.hf_tensors import DENSE_DTYPES, WEIGHT, matrix_of
from bonsai.convert.quantization import Quantization
from bonsai.convert.source import NotOfThisClass, Rows, SourceTensor, refuse_rows
from bonsai.errors import ConversionError
from bonsai.format.safetensors_io import TensorInfo
from bonsai.format.shards import ShardedTensors
from bonsai.matrix import DenseMatrix, Matrix, PackedMatrix, widen

__all__ = ["mlx_tensor"]

# By bits: the packing without a zero point that most packs of this width are made for, and what
# is wrong with a group that it does not hold (scale, bias).
FINE = {
    1: ("b1", "has a bias that is not minus half its scale: its bits are not signs"),
    2: ("t2", "has a bias that is not minus its scale: its 2 bits are not ternary"),
}
CODE_3 = "has the code 3, which no ternary matrix has"


def mlx_tensor(
    shards: ShardedTensors, info: TensorInfo, quantization: Quantization, group_size: int
) -> tuple[SourceTensor, list[str]]:
    """The tensor of a module and the names of its parts.

    Value = scale * code + bias, codes lowest bits first and without gaps between words. 1 and 2
    bits are read as signs and trits where they are, every width as q4 or q8 with the same codes.
    """
    name, module = info.name, info.name.removesuffix(WEIGHT)
    bits, group = quantization.affine(module)
    words = matrix_of(shards, info)
    if words.shape[1] * 32 % (bits * group):
        raise ConversionError(
            f"{info.file}: {name} is {info}: rows of {32 * words.shape[1]} bits are not whole "
            f"groups of {group} codes of {bits} bits",
            hint="the bits or the group size in config.json are not those of the file",
        )
    shape = (words.shape[0], words.shape[1] * 32 // bits)
    scales = _plane(shards, f"{module}.scales", shape, group)
    biases = _plane(shards, f"{module}.biases", shape, group)
    block = _Block(name, bits, group, shape[1])

    def parts(index: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.ascontiguousarray(words[index]), scales(index), biases(index)

    label, release = f"mlx {bits}b", partial(shards.release, name)
    tensor = SourceTensor(name, shape, label, lambda i: block.affine(*parts(i)), release)
    if bits in FINE:
        read = lambda i: block.fine(*parts(i), i)  # noqa: E731
        tensor = SourceTensor(name, shape, label, read, release, otherwise=tensor)
    return tensor, [name, f"{module}.scales", f"{module}.biases"]


class _Block:
    """Rows of words with float32 scales and biases -> a matrix."""

    def __init__(self, name: str, bits: int, group: int, columns: int) -> None:
        self.name, self.bits, self.group, self.columns = name, bits, group, columns

    def fine(
        self, words: np.ndarray, scales: np.ndarray, biases: np.ndarray, index: Rows
    ) -> Matrix:
        """t2 or b1, or NotOfThisClass naming the first row that is not."""
        packing, what = FINE[self.bits]
        steps = -biases if packing == "t2" else -2 * biases  # what the scales must be
        bad = (scales != steps).any(axis=1)
        refuse_rows(self.name, bad, index, what, NotOfThisClass)
        bad = ternary.faulty_rows(words, packing, self.group)
        refuse_rows(self.name, bad, index, CODE_3, NotOfThisClass)
        narrow, exact = _narrowed(-biases)
        shape = (len(words), self.columns)
        block = PackedMatrix(self.name, packing, shape, self.group, words, narrow)
        if exact:
            return block
        wide = PackedMatrix(self.name, packing, shape, self.group, words, -biases)
        return DenseMatrix(self.name, "f32", shape, wide.rows())

    def affine(self, words: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> Matrix:
        """q4 or q8 with the same codes; float32 where fp16 does not hold a scale or bias."""
        packing = "q4" if self.bits <= affine.BITS["q4"] else "q8"
        shape = (len(words), self.columns)
        if self.bits == affine.BITS[packing]:
            codes = words.view(np.uint8)
        else:
            codes = affine.pack(_codes(words, self.bits), packing, self.group)
        planes = _narrowed(scales), _narrowed(biases)
        if all(exact for _, exact in planes):
            kept = planes[0][0], planes[1][0]
            return PackedMatrix(self.name, packing, shape, self.group, codes, *kept)
        wide = PackedMatrix(self.name, packing, shape, self.group, codes, scales, biases)
        return DenseMatrix(self.name, "f32", shape, wide.rows())


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The uint8 codes [rows, K] of a stream of `bits` each, lowest bits first."""
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    fields = stream.reshape(len(words), -1, bits)
    codes = fields[:, :, 0].copy()
    for i in range(1, bits):
        codes |= fields[:, :, i] << np.uint8(i)
    return codes


def _narrowed(plane: np.ndarray) -> tuple[np.ndarray, bool]:
    """fp16 values, and whether they are the same."""
    with np.errstate(over="ignore"):
        narrow = plane.astype(np.float16)
    return narrow, np.array_equal(narrow, plane)


def _plane(
    shards: ShardedTensors, name: str, shape: tuple[int, int], group: int
) -> Callable[[Rows], np.ndarray]:
    """Rows of a plane of scales or biases, as float32."""
    info = shards.info(name)
    values = matrix_of(shards, info)
    rows, columns = shape
    if info.dtype not in DENSE_DTYPES or values.shape != (rows, columns // group):
        needed = f"[{rows}, {columns // group}]"
        raise ConversionError(
            f"{info.file}: {name} is {info}; a matrix of {rows} x {columns} weights in groups of "
            f"{group} needs {needed}",
            hint="the group size in config.json is not that of the file",
        )
    return lambda index: widen(values[index], DENSE_DTYPES[info.dtype])
