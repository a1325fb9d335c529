"""Runs every kernel on arrays that end where readable memory ends; dies where one reads beyond.

    python guarded.py ISA        prints "done" at the end
    python guarded.py beyond     must die: it reads one byte too many

Behind each array lies a page that nobody may touch, so the first byte too many is a memory fault.
A process of its own, since the fault cannot be caught. POSIX only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny

from bonsai import affine, ternary
from bonsai.backends.cpu import _native as native
from bonsai.matrix import DENSE, PackedMatrix

PACKED = [(name, group) for name, kind in ternary.PACKINGS.items() for group in kind.groups]
PACKED += [(name, group) for name in affine.BITS for group in affine.GROUPS]


class Fence:
    """Copies arrays to the ends of readable memory."""

    def __init__(self) -> None:
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def __call__(self, values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(values)
        readable = -(-max(values.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
        whole = np.frombuffer(memory, np.uint8)
        if self._protect(whole.ctypes.data + readable, mmap.PAGESIZE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
        end = whole[readable - values.nbytes : readable].view(values.dtype).reshape(values.shape)
        end[...] = values
        return end

    def empty(self, *shape: int) -> np.ndarray:
        return self(np.zeros(shape, np.float32))


def linears(kernels, fence: Fence) -> None:
    rng = np.random.default_rng(0)
    for packing, group in [*PACKED, *((name, 0) for name in DENSE)]:
        for inputs in (1, 31, 64, 96, 160, 256, 384):
            made = tiny.matrix(rng, 5, inputs, packing, group or 128)
            packed = isinstance(made, PackedMatrix)
            found = [made.codes, made.scales, made.biases] if packed else [made.values, None, None]
            planes = [None if p is None else fence(p.view(np.uint8)) for p in found]
            matrix = native.PackedMatrix(packing, 5, inputs, group, *planes, None, 0)
            for exact in (False, True):
                linear = native.PackedLinear(kernels, [matrix], exact)
                for rows in (1, 2, 5, 8):
                    x = fence(rng.standard_normal((rows, inputs)).astype(np.float32))
                    linear.run(x, fence.empty(rows, 5), fence.empty(rows, 5))
            native.embed(kernels, matrix, fence(np.array([4], np.int32)), fence.empty(1, inputs))


def rows(kernels, fence: Fence) -> None:
    rng = np.random.default_rng(1)
    for width in (1, 2, 15, 16, 64, 100):
        x = fence(rng.standard_normal((3, 2, width)).astype(np.float32))
        native.rms_norm(kernels, x, fence.empty(width), 1e-6, fence.empty(3, 2, width))
        half = width // 2
        turn = fence.empty(3, half), fence.empty(3, half)
        if half:
            native.rope(kernels, x, *turn, fence.empty(3, 2, width))
        native.swiglu(kernels, fence.empty(3, 2 * width), fence.empty(3, width))
        logits, seen = fence(x.reshape(-1)), fence(np.array([0], np.int64))
        native.sample(logits, 0.7, 0, 0.9, 0.1, 1.1, seen, 0.5)


def attention(kernels, fence: Fence) -> None:
    rng = np.random.default_rng(2)
    for width in (1, 16, 24, 64):
        for exact in (False, True):
            cache = native.KvCache(1, 1, width, 600, exact)
            for position, count in ((0, 255), (255, 1), (256, 1), (257, 9)):
                q, k, v = (
                    fence(rng.standard_normal((count, h, width)).astype(np.float32))
                    for h in (3, 1, 1)
                )
                cache.append(kernels, 0, position, k, v)
                cache.attend(kernels, 0, position, q, fence.empty(count, 3, width))


def main(isa: str) -> None:
    faulthandler.enable()
    fence = Fence()
    if isa == "beyond":
        end = fence(np.zeros(1, np.uint8))
        print(ctypes.string_at(end.ctypes.data + 1, 1))
        return
    kernels = native.kernels(isa)
    for part in (linears, rows, attention):
        part(kernels, fence)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
