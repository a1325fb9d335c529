"""Prefill of a long prompt over a large vocabulary does not need memory for all logits.

In a process of its own, by the kernel's high-water mark of resident memory: native code counts too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tiny import Tiny

TESTS = Path(__file__).parents[1]
LIMIT = 50e6  # bytes; the logits of all 2048 positions would be 410e6

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, runners
from bonsai.format import Checkpoint

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

with Checkpoint.open(sys.argv[2]) as checkpoint:
    engine = runners.get(sys.argv[3]).load(checkpoint)
with engine.session(4096, 50_000) as session:
    session.prefill([1, 2, 3])
    session.logits()
ids = np.random.default_rng(0).integers(0, 50_000, 2048).tolist()
before = peak()
with engine.session(4096, 50_000) as session:
    session.prefill(ids)
    assert np.isfinite(session.logits()).all()
after = peak()
np.ones(200_000_000, np.uint8).sum()
print(after - before, peak() - after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which is Linux's")
@pytest.mark.parametrize("packing", ["t2", "q8"])
def test_prefill_keeps_no_logits_but_the_last(runner, tmp_path: Path, packing: str) -> None:
    folder = tiny.write(tmp_path / "m", Tiny(vocab=50_000, table=packing))
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(folder), runner.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    growth, control = map(int, done.stdout.split())
    assert control > 100e6, "the measure does not see memory"
    assert growth < LIMIT
