"""A checkpoint larger than the memory allowed: the same tokens, the limit kept, clear errors."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny import Tiny

from bonsai import backends
from bonsai.backends import MemoryLimit, planner, streaming
from bonsai.backends.planner import Place
from bonsai.backends.streaming import StreamedLayers
from bonsai.config import DeltaSpec, StateSpec
from bonsai.errors import BackendUnavailable, FormatError, InvalidRequest
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_DONTNEED"), reason="needs madvise, which this system does not have"
)

TWELVE = Tiny(layers=12)
PROMPT = [5, 9, 2, 7, 300, 41]
HUGE = MemoryLimit(1 << 40, 4096)


def streamed(backend: str, checkpoint: Checkpoint, stay: int, ahead: int = 1):
    """An engine whose layers come and go, but the first `stay`."""
    engine = backends.get(backend).load(checkpoint)
    indices = range(stay, engine.model.config.layers)
    engine.model = streaming.streamed(engine.model, checkpoint, indices, ahead)
    return engine


def tokens(engine, count: int = 6) -> list[int]:
    with engine.session(256, 1000) as session:
        session.prefill(PROMPT)
        stream = session.decode(Sampling(temperature=1.0, seed=7))
        return [next(stream) for _ in range(count)]


@pytest.fixture
def slow(monkeypatch):
    """Reads that take their time: advice that comes late, and pages that left the cache."""
    rng, inner = random.Random(3), Checkpoint.prefetch
    asked: list[str] = []

    def prefetch(self: Checkpoint, name: str) -> None:
        asked.append(name)
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.004)
        if rng.random() < 0.7:
            inner(self, name)

    monkeypatch.setattr(Checkpoint, "prefetch", prefetch)
    return asked


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("container", ["safetensors", "npz"])
def test_twenty_slow_runs_give_the_tokens_of_a_resident_one(slow, tmp_path, backend, container):
    folder = tiny.write(tmp_path / "m", replace(TWELVE, container=container))
    with Checkpoint.open(folder) as checkpoint:
        wanted = tokens(backends.get(backend).load(checkpoint))
        assert len(set(wanted)) > 3
        engine = streamed(backend, checkpoint, 0)
        for _ in range(20):
            _forget(folder)
            assert tokens(engine) == wanted
    assert {name.split(".")[1] for name in slow} == {str(i) for i in range(12)}


def test_a_hybrid_in_shards_too(tmp_path):
    spec = Tiny(architecture="qwen35", layers=4, kinds=("delta", "attention") * 2, shard_bytes=9000)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        assert tokens(streamed("cpu", checkpoint, 1)) == tokens(
            backends.get("cpu").load(checkpoint)
        )


def test_many_sessions_at_once(tmp_path):
    with Checkpoint.open(tiny.write(tmp_path / "m", TWELVE)) as checkpoint:
        wanted = tokens(backends.get("cpu").load(checkpoint))
        engine, found = streamed("cpu", checkpoint, 2), []
        threads = [
            threading.Thread(target=lambda: found.append(tokens(engine)), daemon=True)
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [wanted] * 3


def test_what_is_asked_of_the_system(tmp_path, monkeypatch):
    log: list[tuple[str, str]] = []

    def spy(verb: str) -> None:
        monkeypatch.setattr(Checkpoint, verb, lambda self, name: log.append((verb, name)))

    for verb in ("prefetch", "release"):
        spy(verb)
    with Checkpoint.open(tiny.write(tmp_path / "m", Tiny(layers=3))) as checkpoint:
        layers = StreamedLayers("abc", checkpoint, (1, 2))
        seen = []
        for layer in layers:
            log.append(("compute", f"layers.{layer}"))
            seen.append(layer)
    steps = [(verb, name.split(".")[1]) for verb, name in log]
    assert seen == list("abc") == [layers[i] for i in range(len(layers))]
    assert list(dict.fromkeys(steps)) == [
        ("prefetch", "1"), ("compute", "a"), ("prefetch", "2"), ("compute", "b"), ("release", "1"),
        ("compute", "c"), ("release", "2"),
    ]  # fmt: skip
    wanted = {name for name in checkpoint.names() if name.startswith("layers.2.")}
    assert {name for verb, name in log if (verb, name[7]) == ("release", "2")} == wanted


def test_a_layer_is_released_when_its_forward_fails(tmp_path, monkeypatch):
    released: list[str] = []
    with Checkpoint.open(tiny.write(tmp_path / "m", Tiny(layers=3))) as checkpoint:
        monkeypatch.setattr(checkpoint, "release", released.append)
        passing = iter(StreamedLayers("abc", checkpoint, (0, 1, 2)))
        next(passing)
        passing.close()
    assert released and all(name.startswith("layers.0.") for name in released)


@pytest.mark.parametrize("harm", ["gone", "shorter", "written"])
def test_a_file_that_changes_is_an_error_at_the_next_pass(tmp_path, harm):
    folder = tiny.write(tmp_path / "m", TWELVE)
    file = folder / "model.safetensors"
    with Checkpoint.open(folder) as checkpoint:
        engine = streamed("cpu", checkpoint, 0)
        with engine.session(256, 1000) as session:
            session.prefill(PROMPT)
            if harm == "gone":
                file.unlink()
            elif harm == "shorter":
                os.truncate(file, 20_000)
            else:
                os.utime(file, (1, 1))
            with pytest.raises(FormatError, match="gone" if harm == "gone" else "changed"):
                session.prefill(PROMPT)


def plan_of(checkpoint: Checkpoint, limit: int | None, context: int = 256, ahead: int = 1):
    """The plan for a memory in which 1000 bytes are taken, keys and values being fp16."""
    cfg = planner.read_sizes(checkpoint)
    place = Place("memory", "--memory-limit", "the disk", {"the program": 1000})
    memory = MemoryLimit(limit, context, prefetch_layers=ahead)
    state = planner.kv_bytes(cfg.state, 16, context)
    return planner.make_plan(checkpoint, cfg, place, limit, memory, state)


def test_plans(tmp_path):
    with Checkpoint.open(tiny.write(tmp_path / "m", TWELVE)) as checkpoint:
        cfg = planner.read_sizes(checkpoint)
        layer = sum(
            checkpoint.tensor_bytes(n) for n in checkpoint.names() if n.startswith("layers.3.")
        )
        plan = partial(plan_of, checkpoint)
        needs = sum(plan(None).needs.values())
        assert plan(needs + 12 * layer).stay == 12 and not plan(needs + 12 * layer).streams
        assert plan(needs + 12 * layer - 1).stay == 9  # two of the others share the window
        assert plan(needs + 12 * layer - 1).streamed == (2, 6, 10)
        assert plan(needs + 2 * layer).stay == 0
        assert plan(needs + 4 * layer - 1, ahead=2).stay == 0
        assert str(plan(needs + 3 * layer)) == "1 of 12 layers stay in memory"
        for layers in range(2, 14):
            found = plan(needs + layers * layer)
            assert found.total <= needs + layers * layer
            assert found.window_bytes == (2 * layer if found.streams else 0)
            assert found.resident_bytes + found.streamed_bytes == 12 * layer
        more = 2 * 12 * cfg.kv_heads * cfg.head_dim * 2
        grown = plan(None, 4096).needs["a state of 4,096 tokens"]
        assert grown - plan(None).needs["a state of 256 tokens"] == more * (4096 - 256)
        with pytest.raises(InvalidRequest) as caught:
            plan(needs + 2 * layer - 1)
        lines = plan(needs + 4 * layer).lines()
    text = str(caught.value)
    for part in ("memory_limit is", "2 streamed", "embedding and head", "256 tokens", "program"):
        assert part in text
    assert "MiB, fewer --prefetch-layers, or a smaller --max-context" in caught.value.hint
    assert lines[0].startswith("memory: ") and lines[0].endswith("allowed")
    assert "10 layers from the disk" in lines[-1]


def test_bytes_of_a_state():
    spec = StateSpec(3, 2, 80, DeltaSpec(5, 64, 4, 6, 16, 32))
    assert planner.kv_bytes(spec, 16, 7) == 2 * 3 * 2 * 7 * 160
    assert planner.kv_bytes(spec, 8, 7) == 2 * 3 * 2 * 7 * (80 + 6)
    assert planner.kv_bytes(spec, 4, 7) == 2 * 3 * 2 * 7 * (40 + 6)
    assert planner.delta_bytes(spec) == 4 * 5 * (3 * 64 + 6 * 16 * 32)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_limit_of_gpu_memory_needs_a_gpu(tmp_path, backend):
    memory = MemoryLimit(None, 64, gpu_limit=6 << 30)
    with (
        Checkpoint.open(tiny.write(tmp_path / "m", Tiny())) as checkpoint,
        pytest.raises(InvalidRequest, match="gpu_memory_limit is 6.00 GiB, but backend"),
    ):
        backends.get(backend).load(checkpoint, memory=memory)


@pytest.mark.parametrize("backend", ["cpu", "cpu-exact", "reference"])
def test_too_small_is_refused_before_anything_is_read(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(Checkpoint, "matrix", lambda *_: pytest.fail("read"))
    with (
        Checkpoint.open(tiny.write(tmp_path / "m", TWELVE)) as checkpoint,
        pytest.raises(InvalidRequest, match="this model needs"),
    ):
        backends.get(backend).load(checkpoint, memory=MemoryLimit(1 << 20, 256))


def test_enough_memory_is_as_no_limit(tmp_path):
    with Checkpoint.open(tiny.write(tmp_path / "m", TWELVE)) as checkpoint:
        engine = backends.get("reference").load(checkpoint, memory=HUGE)
        assert isinstance(engine.model.weights.layers, tuple)
        assert "stay" not in engine.description


def test_systems_without_madvise_say_so(tmp_path, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_DONTNEED")
    with (
        Checkpoint.open(tiny.write(tmp_path / "m", TWELVE)) as checkpoint,
        pytest.raises(BackendUnavailable, match="madvise"),
    ):
        backends.get("reference").load(checkpoint, memory=HUGE)


SCRIPT = """
import sys
from bonsai import backends
from bonsai.backends import MemoryLimit
from bonsai.bench import peak_bytes
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling

limit = int(sys.argv[3])
with Checkpoint.open(sys.argv[1], check="never") as checkpoint:
    memory = MemoryLimit(limit, 64) if limit else None
    engine = backends.get(sys.argv[2]).load(checkpoint, memory=memory)
    with engine.session(64, 1000) as session:
        session.prefill([1])
        stream = session.decode(Sampling.greedy())
        ids = [next(stream) for _ in range(2)]
print(peak_bytes(), *ids)
print(engine.description)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which is Linux's")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_resident_memory_stays_under_the_limit(tmp_path: Path, backend: str) -> None:
    folder = _large(tmp_path / "m")
    limit = 200 << 20
    peaks, ids, notes = zip(*(_measure(folder, backend, n) for n in (limit, 0)), strict=True)
    assert ids[0] == ids[1]
    assert "of 12 layers stay in memory" in notes[0] and "stay" not in notes[1]
    assert peaks[0] < limit < peaks[1]


def _measure(folder: Path, backend: str, limit: int) -> tuple[int, list[str], str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), backend, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers, note = done.stdout.splitlines()
    return int(numbers.split()[0]), numbers.split()[1:], note


def _large(out: Path) -> Path:
    """Twelve layers of 17 MB. Their codes are rows of one random block: only their bytes count."""
    spec = Tiny(layers=12, hidden=1024, ffn=4096, packing="q8", group=32, vocab=1000)
    made = tiny.weights(replace(spec, hidden=128, ffn=128))
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, 1 << 23, np.uint8)
    shapes = {
        name: (
            {128: spec.ffn}.get(matrix.shape[0], matrix.shape[0])
            if name.endswith(("gate", "up"))
            else spec.hidden if name.endswith(("out", "down")) else matrix.shape[0],
            spec.ffn if name.endswith("down")
            else matrix.shape[1] if name.endswith("attn.out") else spec.hidden,
        )
        for name, matrix in made.matrices.items()
    }  # fmt: skip
    matrices = {}
    for name, matrix in made.matrices.items():
        rows, columns = shapes[name]
        scales = np.full((rows, columns // 32), 1e-4, np.float16)
        start = int(rng.integers(0, len(pool) - rows * columns))
        codes = pool[start : start + rows * columns].reshape(rows, columns)
        matrices[name] = replace(
            matrix, shape=(rows, columns), codes=codes, scales=scales, biases=-128 * scales
        )
    vectors = {
        name: np.ones(spec.hidden, np.float32) if values.shape == (128,) else values
        for name, values in made.vectors.items()
    }
    return tiny.save(out, spec, tiny.Weights(matrices, vectors))


def _forget(folder: Path) -> None:
    """Ask the system to drop what it caches of the files; they are read again from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
