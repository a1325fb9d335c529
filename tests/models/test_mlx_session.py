"""Sessions on MLX: one step ahead of the reader and exact all the same, compiled, on any thread."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tiny
import tolerances
from numpy.testing import assert_allclose
from tiny import Gdn, Tiny

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from bonsai.backends import MemoryLimit, reference  # noqa: E402
from bonsai.backends.mlx import BACKEND, EXACT, MlxBackend  # noqa: E402
from bonsai.backends.mlx.device import scope  # noqa: E402
from bonsai.backends.mlx.linear import Affine  # noqa: E402
from bonsai.backends.mlx.sampler import Recipe, knobs  # noqa: E402
from bonsai.backends.mlx.session import MlxEngine  # noqa: E402
from bonsai.backends.mlx.state import BLOCK, MlxState  # noqa: E402
from bonsai.backends.mlx.step import Choice, Stepper  # noqa: E402
from bonsai.errors import InvalidRequest, NumericError  # noqa: E402
from bonsai.format import Checkpoint  # noqa: E402
from bonsai.sampling import Sampling  # noqa: E402

GREEDY = Sampling.greedy()
SMALL = {"hidden": 64, "ffn": 96, "heads": 2, "head_dim": 32, "vocab": 100, "group": 32}
SPECS = {
    "qwen3": Tiny(**SMALL),
    "llama": Tiny(**SMALL, architecture="llama", tied=False),
    "qwen35": Tiny(**SMALL, architecture="qwen35", dims=8, gdn=Gdn(2, 4, 16, 16)),
    "folded": Tiny(**SMALL, architecture="qwen35", dims=8, gdn=Gdn(2, 4, 16, 16), hadamard=32),
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., MlxEngine]:
    """load(name, backend) -> an engine of that model."""

    def make(name: str, backend=BACKEND):
        folder = tmp_path / name
        if not folder.exists():
            tiny.write(folder, SPECS[name])
        with Checkpoint.open(folder) as checkpoint:
            return backend.load(checkpoint)

    return make


@pytest.mark.parametrize("name", SPECS)
def test_greedy_ids_and_logits_are_those_of_the_reference(load, name: str) -> None:
    found = []
    for backend in (BACKEND, reference.BACKEND):
        with load(name, backend).session(200, 100) as session:
            session.prefill([1, 2, 3])
            ids = list(islice(session.decode(GREEDY), 64))
            found.append((ids, session.logits()))
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) > 3
    assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "folded"])
def test_the_next_step_is_handed_over_before_an_id_comes_out(
    load, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = load(name)
    events: list[str] = []
    step, read = Stepper.step, type(engine.session(8, 100))._read

    def noted_step(*args):
        events.append("step")
        return step(*args)

    def noted_read(*args):
        events.append("read")
        return read(*args)

    monkeypatch.setattr(Stepper, "step", noted_step)
    monkeypatch.setattr(type(engine.session(8, 100)), "_read", noted_read)
    with engine.session(8, 100) as session:
        session.prefill([1, 2, 3])
        for count, _ in enumerate(session.decode(GREEDY), 1):
            assert events == (["step", "read"] * 4 + ["read"])[: 2 * count]
    assert len(events) == 9  # the last id needs no step after it


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_what_was_computed_ahead_never_shows(load, name: str) -> None:
    """Open replies with other calls between their ids, the same on both backends."""
    for seed in range(8):
        found = []
        for backend in (BACKEND, reference.BACKEND):
            with load(name, backend).session(60, 90) as session:
                found.append(list(_walk(session, seed)))
        assert found[0] == found[1], seed


def _walk(session, seed: int):
    """What a session answers to a random mixture of calls, and what it then holds."""
    choose, replies, kept = random.Random(seed), [], []
    session.prefill([1, 2, 3])
    for _ in range(30):
        action = choose.choice(
            ["next"] * 5 + ["reply", "rewind", "score", "logits", "prefill", "snapshot", "restore"]
        )
        if action == "reply":
            penalty = choose.choice([1.0, 1.5])
            replies.append(session.decode(Sampling(0.8, repetition_penalty=penalty, seed=seed)))
        elif action == "next" and replies and session.tokens:
            yield next(choose.choice(replies), None)
        elif action == "rewind":
            back = choose.choice([1, 1, 2, 9])
            length = session.rewind(max(1, len(session.tokens) - back))
            yield length
            if not length:
                session.prefill([5])
        elif action in ("score", "prefill") and len(session.tokens) < 50:
            ids = [choose.randrange(90) for _ in range(choose.randint(1, 2))]
            if action == "prefill":
                session.prefill(ids)
            else:
                session.score(ids).close()
        elif action == "logits" and session.tokens:
            yield int(session.logits().argmax())
        elif action == "snapshot":
            kept.append(session.snapshot())
        elif action == "restore" and kept:
            session.restore(choose.choice(kept))
        yield tuple(session.tokens)


def test_a_reply_sees_that_its_last_id_was_exchanged(load) -> None:
    """The state does not change by that: the id was pending, and so is the new one."""
    engine = load("qwen3")
    with engine.session(60, 100) as session, engine.session(60, 100) as other:
        session.prefill([1, 2, 3])
        reply = session.decode(GREEDY)
        exchanged = (next(reply) + 1) % 100
        session.rewind(3)
        session.score([exchanged]).close()
        other.prefill([1, 2, 3, exchanged])
        assert next(reply) == int(other.logits().argmax())


def test_a_reply_that_is_not_finite_leaves_what_was_held(tmp_path: Path) -> None:
    made = tiny.weights(SPECS["qwen35"])
    made.vectors["layers.1.ffn_norm"] *= np.float32(1e38)
    with Checkpoint.open(tiny.save(tmp_path / "m", SPECS["qwen35"], made)) as checkpoint:
        session = BACKEND.load(checkpoint).session(60, 100)
    session.prefill([1, 2, 3])
    for _ in range(2):
        with pytest.raises(NumericError, match="not finite after 3 tokens"):
            next(session.decode(GREEDY))
        assert list(session.tokens) == [1, 2, 3]


SETTINGS = [
    GREEDY, Sampling(), Sampling(0.7, top_k=20, top_p=0.8), Sampling(repetition_penalty=1.3),
]  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "plain", "top", "penalty"])
def test_a_compiled_step_is_traced_at_most_twice_in_64_tokens(
    load, name: str, sampling: Sampling
) -> None:
    """The steps are built and never computed, so a look at a number would fail; settings change."""
    engine = load(name, MlxBackend(compiled=True))
    state = engine.new_state(1000)
    start = BLOCK - 20
    state.position = start
    recipe = Recipe.of(sampling, 90)
    with scope():
        seen = mx.zeros((100,), mx.bool_) if recipe.penalized else None
        choice = Choice(mx.array(5, mx.int32), mx.zeros((1, 64)), seen)
        for n in range(64):
            temperature = 0.5 + n if recipe.sampled else 0.0
            other = Sampling(temperature, top_k=sampling.top_k, top_p=1 - n / 100)
            choice = engine.stepper.step(state, choice, recipe, knobs(other, n / 64))
            state.advance(1)
    assert (state.position, state.capacity) == (start + 64, 2 * BLOCK)
    assert 1 <= engine.stepper.traces <= 2


def test_traced_steps_are_not_kept_for_every_way_to_sample(load) -> None:
    engine = load("qwen3", MlxBackend(compiled=True))
    state = engine.new_state(100)
    for top_k in range(1, 20):
        with scope():
            choice = Choice(mx.array(5, mx.int32), mx.zeros((1, 64)), None)
            recipe = Recipe.of(Sampling(top_k=top_k), 100)
            engine.stepper.step(state, choice, recipe, knobs(GREEDY, 0.5))
    assert len(engine.stepper._steps) <= 8


@pytest.mark.oracle
def test_compiled_steps_give_the_same_replies(load) -> None:
    """Slow where it runs first: MLX has a C++ compiler make its fused kernels."""
    for sampling in (GREEDY, Sampling(0.8, top_k=20, repetition_penalty=1.2, seed=3)):
        found = []
        for compiled in (False, True):
            engine = load("folded", MlxBackend(compiled=compiled))
            with engine.session(400, 100) as session:
                session.prefill(list(range(40)) * 6)
                found.append((list(islice(session.decode(sampling), 64)), session.logits()))
        assert found[0][0] == found[1][0]
        assert_allclose(found[1][1], found[0][1], **tolerances.F32_MODEL)
        assert engine.stepper.traces <= 2


def test_any_thread_may_continue_a_session(load) -> None:
    engine = load("qwen35")
    with engine.session(60, 100) as session:
        session.prefill([1, 2, 3])
        expected = list(islice(session.decode(GREEDY), 8))
    session = _on_a_thread(lambda: engine.session(60, 100))
    _on_a_thread(lambda: session.prefill([1, 2, 3]))
    reply = session.decode(GREEDY)
    assert [_on_a_thread(lambda: next(reply)) for _ in range(8)] == expected
    snapshot = _on_a_thread(session.snapshot)
    _on_a_thread(lambda: session.rewind(0))
    session.restore(snapshot)
    assert_allclose(_on_a_thread(session.logits), session.logits(), **tolerances.EXACT)


def _on_a_thread(work: Callable):
    found: list = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_sessions_on_threads_at_once_do_not_meet(load) -> None:
    engine = load("qwen35")

    def reply(first: int) -> list[int]:
        with engine.session(60, 100) as session:
            session.prefill([first, 2, 3])
            return list(islice(session.decode(Sampling(seed=first)), 20))

    expected = [reply(n) for n in range(4)]
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: reply(n)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == expected


THREADS = """
import sys, threading
from bonsai.backends.mlx import BACKEND
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling
engines = []
def work():
    engines.append(BACKEND.load(Checkpoint.open(sys.argv[1])))
    session = engines[0].session(60, 100)
    session.prefill([1, 2, 3])
    print(next(session.decode(Sampling.greedy())))
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_a_program_whose_threads_used_mlx_ends_well(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", SPECS["qwen3"])
    command = [sys.executable, "-c", THREADS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(done.stdout.split())) == 1


BOUNDS = {
    "float32": tolerances.F32_MODEL,
    "float16": tolerances.F16_MODEL,
    "bfloat16": tolerances.BF16_MODEL,
}


@pytest.mark.parametrize("name", ["qwen3", "folded"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_half_precision_stays_within_its_tolerance(load, name: str, dtype: str) -> None:
    ids = list(tiny.Random(1).integers(0, 100, 40))
    rows = []
    for backend in (MlxBackend(dtype), reference.BACKEND):
        with load(name, backend).session(60, 100) as session:
            rows.append(np.concatenate(list(session.score(ids))))
    assert_allclose(rows[0], rows[1], **BOUNDS[dtype])
    if dtype != "float32":
        assert np.abs(rows[0] - rows[1]).max() > tolerances.F32_MODEL["atol"]


def test_a_head_that_is_the_table_is_kept_once(load) -> None:
    weights = load("qwen3").model.weights
    assert weights.head._parts[0][0] is weights.embedding.part
    untied = load("llama").model.weights
    assert untied.head._parts[0][0] is not untied.embedding.part


@pytest.mark.parametrize("packing", ["t2", "t5", "q8", "bf16"])
def test_loading_holds_no_second_copy(tmp_path: Path, packing: str) -> None:
    spec = Tiny(vocab=12_000, hidden=256, ffn=512, heads=2, packing=packing, head_dim=128)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine = BACKEND.load(checkpoint)
        kept = mx.get_active_memory() - before
        peak = mx.get_peak_memory() - before
    largest = 2 * 512 * 256 * 4  # gate and up while they are joined, at most float32
    assert kept > 0.9 * checkpoint.nbytes
    assert peak <= kept + largest
    assert engine.bytes_per_token > 0


def test_a_snapshot_is_not_written_by_what_comes_after(load) -> None:
    engine = load("qwen35")
    state = engine.new_state(100)
    assert isinstance(state, MlxState)
    with engine.session(100, 100) as session:
        session.prefill(list(range(20)))
        snapshot = session.snapshot()
        kept = [np.array(a) for part in snapshot.state.arrays.values() for a in part]
        list(islice(session.decode(GREEDY), 20))
        session.rewind(0)
        session.prefill([9] * 30)
        now = [np.array(a) for part in snapshot.state.arrays.values() for a in part]
    for a, b in zip(kept, now, strict=True):
        assert_allclose(a, b, **tolerances.EXACT)


def test_memory_limits_that_need_streaming_are_refused(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", Tiny(vocab=200, ffn=1024, layers=8))
    with Checkpoint.open(folder) as checkpoint:
        assert BACKEND.load(checkpoint, memory=MemoryLimit(1 << 40, 100)).vocab == 200
    with Checkpoint.open(folder) as checkpoint, pytest.raises(InvalidRequest) as caught:
        EXACT.load(checkpoint, memory=MemoryLimit(1 << 20, 100))
    assert "memory_limit is 1.0 MiB" in str(caught.value)
    assert caught.value.hint


def test_threads_cannot_be_chosen(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", SPECS["qwen3"])
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(InvalidRequest, match="threads is 2, but backend 'mlx'"),
    ):
        BACKEND.load(checkpoint, threads=2)


def test_the_engine_says_where_it_runs_and_in_which_type(load) -> None:
    engine = load("qwen3", EXACT)
    assert engine.description.startswith("mlx: ")
    assert engine.description.endswith(", float32")
    part = engine.model.weights.embedding.part
    assert isinstance(part, Affine)
    assert (part.bits, part.group) == (2, 32)
