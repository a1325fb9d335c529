"""The cpu backend as a citizen of its process: environment, memory's end, forks, threads, exit."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
from numpy.testing import assert_array_equal

from bonsai import backends
from bonsai.backends.cpu import BACKEND, CpuBackend
from bonsai.errors import BackendUnavailable, InvalidRequest
from bonsai.format import Checkpoint

native = pytest.importorskip("bonsai.backends.cpu._native", reason="the native library is absent")
from bonsai.backends.cpu.ops import CpuOps  # noqa: E402  (needs the native library)

HERE = Path(__file__).resolve().parent

# Enough work for all threads: y = x W^T with every weight +1, so each output is the sum of x.
WORK = """
import numpy as np
from bonsai import ternary
from bonsai.backends.cpu import _native as native
from bonsai.backends.cpu.ops import CpuOps
from bonsai.matrix import PackedMatrix

codes = ternary.pack(np.ones((2000, 256), np.int8), "t2", 128)
scales = np.ones((2000, 2), np.float16)
linear = CpuOps().linear(PackedMatrix("w", "t2", (2000, 256), 128, codes, scales))

def right():
    return bool((linear(np.full((3, 256), 127, np.float32)) == 127 * 256).all())
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that runs `code`; a hang is a failure."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def said(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("isa", native.supported())
def test_the_environment_chooses_the_kernels(isa: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BONSAI_CPU_ISA", isa)
    assert BACKEND.status().startswith(f"{isa}, ")
    with Checkpoint.open(tiny.write(tmp_path / "m", tiny.Tiny())) as checkpoint:
        engine = BACKEND.load(checkpoint, threads=1)
        exact = CpuBackend(exact=True).load(checkpoint, threads=2)
    assert engine.description == f"cpu: {isa}, 1 thread"
    assert exact.description == f"cpu: {isa}, 2 threads, exact"
    native.set_threads(1)


def test_kernels_that_are_not_here_are_refused_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BONSAI_CPU_ISA", "sse9")
    with pytest.raises(BackendUnavailable, match="BONSAI_CPU_ISA is 'sse9'") as caught:
        BACKEND.status()
    assert "portable" in caught.value.hint
    with pytest.raises(BackendUnavailable, match="BONSAI_CPU_ISA is 'sse9'") as caught:
        backends.select()
    assert caught.value.hint.startswith(f"one of: {', '.join(native.supported())}, or --backend ")
    with Checkpoint.open(tiny.write(tmp_path / "m", tiny.Tiny())) as checkpoint:
        with pytest.raises(BackendUnavailable, match="sse9"):
            BACKEND.load(checkpoint)


@pytest.mark.parametrize("threads", [0, -1, 1025, 1.5, True, "2"])
def test_impossible_numbers_of_threads_are_refused(tmp_path: Path, threads) -> None:
    with Checkpoint.open(tiny.write(tmp_path / "m", tiny.Tiny())) as checkpoint:
        with pytest.raises(InvalidRequest, match="expected 1 to 1024"):
            BACKEND.load(checkpoint, threads=threads)
    with pytest.raises(ValueError, match="1 to 1024"):
        native.set_threads(0)


@pytest.mark.skipif(os.name == "nt", reason="needs mprotect")
@pytest.mark.parametrize("isa", native.supported())
def test_nothing_beyond_an_array_is_touched(isa: str) -> None:
    command = [sys.executable, str(HERE / "guarded.py"), isa]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.skipif(os.name == "nt", reason="needs mprotect")
def test_a_touch_beyond_an_array_would_be_seen() -> None:
    command = [sys.executable, str(HERE / "guarded.py"), "beyond"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode < 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_too() -> None:
    """The child has none of its parent's threads, and makes its own."""
    code = f"""{WORK}
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
native.set_threads(3)
assert right()
for _ in range(5):
    child = os.fork()
    if child == 0:
        fine = right() and native.threads() == 3
        native.set_threads(2)
        os._exit(0 if fine and right() else 1)
    assert right()
    print(os.waitpid(child, 0)[1])
"""
    assert said(code).split() == ["0"] * 5


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_process_ends_while_its_threads_wait(threads: int) -> None:
    assert said(f"{WORK}\nnative.set_threads({threads})\nprint(right())") == "True"


def test_a_process_ends_while_a_thread_still_computes() -> None:
    code = f"""{WORK}
import threading
native.set_threads(2)
def forever():
    while True:
        right()
threading.Thread(target=forever, daemon=True).start()
print(all(right() for _ in range(20)))
"""
    assert python(code).stdout.strip() == "True"


def test_several_threads_may_compute_at_once() -> None:
    rng = np.random.default_rng(0)
    ops = CpuOps()
    before = native.threads()
    native.set_threads(2)
    linears = [ops.linear(tiny.matrix(rng, 1001, 256, p, 64)) for p in ("t2", "t5", "q4", "f16")]
    x = rng.standard_normal((5, 256)).astype(np.float32)
    expected = [linear(x) for linear in linears]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for y, right in zip(pool.map(lambda linear: linear(x), linears), expected, strict=True):
                assert_array_equal(y, right)
    native.set_threads(before)


def test_the_number_of_threads_may_change_between_calls() -> None:
    rng = np.random.default_rng(1)
    linear = CpuOps().linear(tiny.matrix(rng, 1001, 256))
    x = rng.standard_normal((3, 256)).astype(np.float32)
    expected, before = linear(x), native.threads()
    for threads in (1, 2, 1, 3, 2, 8, 1) * 3:
        native.set_threads(threads)
        assert native.threads() == threads
        assert_array_equal(linear(x), expected)
    native.set_threads(before)
