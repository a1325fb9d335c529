"""Speed of the cpu backend's linear kernels, alone: one token from memory, many tokens from cache.

    python bench/cpu_kernels.py [--isa avx2 portable] [--threads 1 2] [--packings t2 q4] [--json]

One token streams a matrix of `--megabytes`, larger than any cache but the last level of servers.
The competitors take turns, and the median of the turns is shown: Gw/s is 1e9 weights per second,
GB/s counts the packed bytes. Weights are random bytes; speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bonsai import affine, ternary
from bonsai.backends.cpu import _library, usable_cpus
from bonsai.matrix import DENSE, DenseMatrix, Matrix, PackedMatrix

GROUPS = {"t2": 128, "t5": 128, "b1": 128, "q4": 32, "q8": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one number of threads; `seconds` collects its turns."""

    isa: str
    threads: int
    packing: str
    tokens: int
    linear: Any = field(repr=False)
    matrix: Matrix = field(repr=False)
    x: np.ndarray = field(repr=False)
    seconds: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class Result:
    route: str
    threads: int
    tokens: int
    rows: int
    columns: int
    gigaweights_per_s: float
    gigabytes_per_s: float
    slowest: float
    fastest: float


def random_matrix(packing: str, rows: int, columns: int) -> Matrix:
    """A [rows, columns] matrix of random codes with scales near 1."""
    rng = np.random.default_rng(0)
    if packing in DENSE:
        values = rng.standard_normal((rows, columns), np.float32)
        bits = values.astype(np.float16) if packing == "f16" else values
        if packing == "bf16":
            bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return DenseMatrix("w", packing, (rows, columns), bits)
    group = GROUPS[packing]
    if packing in affine.BITS:
        shape, dtype = affine.codes_shape(packing, rows, columns, group), np.dtype(np.uint8)
    else:
        kind = ternary.PACKINGS[packing]
        shape, dtype = kind.codes_shape(rows, columns, group), np.dtype(kind.dtype)
    codes = rng.integers(0, 256, (shape[0], shape[1] * dtype.itemsize), np.uint8).view(dtype)
    scales = rng.uniform(0.5, 1.5, (rows, -(-columns // group))).astype(np.float16)
    biases = -scales if packing in affine.BITS else None
    return PackedMatrix("w", packing, (rows, columns), group, codes, scales, biases)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every combination that was asked for."""
    from bonsai.backends.cpu.ops import CpuOps

    for packing in options.packings:
        per_row = random_matrix(packing, 1, options.columns).nbytes
        many = random_matrix(packing, options.rows, options.columns)
        rows = max(1, options.megabytes * 2**20 // per_row)
        one = random_matrix(packing, rows, options.columns) if 1 in options.tokens else many
        for tokens in options.tokens:
            matrix = one if tokens == 1 else many
            x = np.random.default_rng(1).standard_normal((tokens, options.columns), np.float32)
            for isa in options.isa:
                linear = CpuOps(isa).linear(matrix)
                for threads in options.threads:
                    yield Case(isa, threads, packing, tokens, linear, matrix, x)


def measure(found: list[Case], turns: int) -> None:
    """Each case once per turn, after one call that fills caches and wakes threads."""
    native = _library()
    for turn in range(turns + 1):
        for case in found:
            native.set_threads(case.threads)
            start = time.perf_counter()
            case.linear(case.x)
            if turn:
                case.seconds.append(time.perf_counter() - start)
    native.set_threads(usable_cpus())


def result(case: Case) -> Result:
    rows, columns = case.matrix.shape
    weights = rows * columns * case.tokens / 1e9
    middle = statistics.median(case.seconds)
    return Result(
        route=case.linear.routes[0] if case.packing not in DENSE else f"{case.packing}_{case.isa}",
        threads=case.threads,
        tokens=case.tokens,
        rows=rows,
        columns=columns,
        gigaweights_per_s=round(weights / middle, 2),
        gigabytes_per_s=round(case.matrix.nbytes / middle / 1e9, 2),
        slowest=round(weights / max(case.seconds), 2),
        fastest=round(weights / min(case.seconds), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="+", default=_library().supported())
    parser.add_argument("--threads", nargs="+", type=int, default=[1, usable_cpus()])
    parser.add_argument("--packings", nargs="+", default=[*GROUPS, "f16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 256])
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=2048, help="with several tokens")
    parser.add_argument("--megabytes", type=int, default=200, help="with one token")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args()
    found = list(cases(options))
    measure(found, options.turns)
    if not options.json:
        print(
            f"{'route':30} {'threads':>7} {'tokens':>6} {'Gw/s':>8} {'GB/s':>7}   slowest..fastest"
        )
    for case in found:
        r = result(case)
        if options.json:
            print(json.dumps(asdict(r)))
            continue
        print(
            f"{r.route:30} {r.threads:7} {r.tokens:6} {r.gigaweights_per_s:8.2f} "
            f"{r.gigabytes_per_s:7.2f}   {r.slowest:.2f}..{r.fastest:.2f}"
        )


if __name__ == "__main__":
    main()
