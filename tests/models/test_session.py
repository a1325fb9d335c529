"""What a session on an eager backend promises: what it holds, forgets, copies and refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner
from tiny import Tiny

from bonsai.backends.eager import EagerEngine, EagerSession
from bonsai.errors import ContextOverflow, InvalidRequest
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling

GREEDY = Sampling.greedy()
SPEC = Tiny(hidden=64, ffn=96, heads=2, head_dim=32, vocab=100, group=32)


@pytest.fixture
def engine(runner: Runner, tmp_path: Path) -> EagerEngine:
    with Checkpoint.open(tiny.write(tmp_path / "m", SPEC)) as checkpoint:
        return runner.load(checkpoint, chunk=7)


@pytest.fixture
def session(engine: EagerEngine) -> Iterator[EagerSession]:
    with engine.session(64, 100) as session:
        yield session


def fresh(engine: EagerEngine, ids) -> np.ndarray:
    with engine.session(1000, 100) as session:
        session.prefill(ids)
        return session.logits()


def test_an_engine_says_what_it_is(engine: EagerEngine) -> None:
    assert (engine.vocab, engine.context) == (100, 4096)
    assert engine.description


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_weight_once_but_one_row_of_an_untied_table(
    runner: Runner, tmp_path: Path, tied: bool
) -> None:
    with Checkpoint.open(tiny.write(tmp_path / "m", replace(SPEC, tied=tied))) as checkpoint:
        found = runner.load(checkpoint).bytes_per_token
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 100 * 64
    gains = 64 + 2 * (2 * 64 + 2 * 32)
    assert found == weights / 4 + weights / 32 * 2 + gains * 4  # codes, scales, gains


def test_a_session_holds_what_it_was_given(session: EagerSession) -> None:
    assert list(session.tokens) == []
    session.prefill([1, 2])
    session.prefill(np.array([3, 4], np.int32))
    session.prefill([])
    assert list(session.tokens) == [1, 2, 3, 4]


def test_progress_counts_every_row_once(session: EagerSession) -> None:
    calls = []
    session.prefill(list(range(20)), lambda *call: calls.append(call))
    assert calls == [("prefill", 7, 20), ("prefill", 14, 20), ("prefill", 20, 20)]


def test_any_history_of_calls_ends_in_the_logits_of_its_tokens(
    runner: Runner, engine: EagerEngine
) -> None:
    """Random walks over prefill, decode, rewind, snapshot and restore."""
    for seed in range(6):
        choose = random.Random(seed)
        session, kept = engine.session(48, 100), []
        expected: list[int] = []
        for _ in range(40):
            action = choose.choice(["prefill", "decode", "rewind", "snapshot", "restore", "logits"])
            if action == "prefill":
                ids = [choose.randrange(100) for _ in range(choose.randint(0, 9))]
                if len(expected) + len(ids) <= 48:
                    session.prefill(ids)
                    expected += ids
            elif action == "decode" and expected:
                count = choose.randint(1, 4)
                expected += islice(session.decode(Sampling(seed=choose.randrange(9))), count)
            elif action == "rewind":
                length = choose.randint(0, 50)
                assert session.rewind(length) == min(length, len(expected))
                del expected[length:]
            elif action == "snapshot":
                kept.append((session.snapshot(), list(expected)))
            elif action == "restore" and kept:
                snapshot, expected = choose.choice(kept)
                expected = list(expected)
                session.restore(snapshot)
            elif action == "logits" and expected:
                assert_allclose(session.logits(), fresh(engine, expected), **runner.same)
            assert list(session.tokens) == expected
        session.prefill([1] * (len(expected) < 48))
        assert_allclose(session.logits(), fresh(engine, session.tokens), **runner.same)


def test_a_snapshot_moves_to_another_session(runner: Runner, engine: EagerEngine) -> None:
    first, second, small = (engine.session(size, 100) for size in (64, 20, 4))
    first.prefill([1, 2, 3, 4, 5])
    snapshot = first.snapshot()
    reply = list(islice(first.decode(GREEDY), 10))
    first.close()
    second.prefill([9] * 20)
    second.restore(snapshot)
    assert list(islice(second.decode(GREEDY), 10)) == reply
    with pytest.raises(ContextOverflow):
        small.restore(snapshot)
    assert list(small.tokens) == []


def test_snapshots_of_other_things_are_refused(
    runner: Runner, engine: EagerEngine, session: EagerSession, tmp_path: Path
) -> None:
    with Checkpoint.open(tiny.write(tmp_path / "other", SPEC)) as checkpoint:
        other = runner.load(checkpoint).session(64, 100)
    session.prefill([1, 2, 3])
    for wrong in (None, [1, 2, 3], other.snapshot()):
        with pytest.raises(InvalidRequest, match="same model"):
            session.restore(wrong)
    assert list(session.tokens) == [1, 2, 3]


def test_closing_a_reply_leaves_the_session_usable(
    runner: Runner, engine: EagerEngine, session: EagerSession
) -> None:
    session.prefill([1, 2, 3])
    reply = session.decode(GREEDY)
    ids = [next(reply), next(reply), next(reply)]
    reply.close()
    assert list(session.tokens) == [1, 2, 3, *ids]
    session.prefill([50, 51])
    assert_allclose(session.logits(), fresh(engine, [1, 2, 3, *ids, 50, 51]), **runner.same)


def test_a_rewind_in_the_middle_of_a_reply_is_seen_by_it(
    engine: EagerEngine, session: EagerSession
) -> None:
    session.prefill([1, 2, 3])
    reply = session.decode(GREEDY)
    first = next(reply)
    next(reply)
    session.rewind(3)
    assert next(reply) == first


def test_a_reply_ends_where_the_context_ends(engine: EagerEngine) -> None:
    session = engine.session(10, 100)
    session.prefill([1, 2, 3])
    assert len(list(session.decode(GREEDY))) == 7
    assert len(session.tokens) == 10
    assert list(session.decode(GREEDY)) == []
    full = engine.session(3, 100)
    full.prefill([1, 2, 3])
    assert list(full.decode(GREEDY)) == []


def test_same_seed_same_reply(engine: EagerEngine) -> None:
    def reply(seed: int | None) -> list[int]:
        with engine.session(40, 100) as session:
            session.prefill([1, 2, 3])
            return list(session.decode(Sampling(temperature=2.0, seed=seed)))

    assert reply(7) == reply(7)
    assert reply(7) != reply(8)
    assert reply(None) != reply(None)


def test_the_penalty_sees_the_prompt_and_the_reply_but_not_what_was_forgotten(
    engine: EagerEngine,
) -> None:
    """With the strongest penalty no id comes twice while there are others."""
    sampling = Sampling(temperature=0.0, repetition_penalty=100.0)
    session = engine.session(45, 100)
    session.prefill([1, 2, 3, 4, 5])
    reply = list(session.decode(sampling))
    assert len({1, 2, 3, 4, 5, *reply}) == 45
    session.rewind(5)
    assert list(session.decode(sampling)) == reply
    cold = engine.session(45, 100)
    cold.prefill([1, 2, 3, 4, 5, *reply[:10]])
    assert list(cold.decode(sampling)) == reply[10:]


def test_a_prompt_that_does_not_fit_changes_nothing(
    engine: EagerEngine, session: EagerSession
) -> None:
    session.prefill([1, 2, 3])
    with pytest.raises(ContextOverflow) as caught:
        session.prefill([4] * 1997)
    assert str(caught.value) == "prompt has 2,000 tokens, max_context is 64"
    assert caught.value.hint.startswith("--max-context 2048 (needs about ")
    assert list(session.tokens) == [1, 2, 3]
    with pytest.raises(ContextOverflow) as caught:
        session.prefill([4] * 5000)
    assert caught.value.hint == "shorten it: the model was made for 4,096 tokens"


@pytest.mark.parametrize("wrong", [-1, 100, 2**40, 1.5, "a", None, True, np.float32(3)])
def test_ids_that_are_no_rows_of_the_table_are_refused(session: EagerSession, wrong) -> None:
    session.prefill([1])
    with pytest.raises(InvalidRequest, match="0 to 99"):
        session.prefill([2, wrong])
    assert list(session.tokens) == [1]


def test_an_empty_session_has_nothing_to_continue(session: EagerSession) -> None:
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        session.logits()
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        next(session.decode(GREEDY))
    session.prefill([1, 2])
    assert session.rewind(0) == 0
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        session.logits()
    with pytest.raises(InvalidRequest, match="rewind to -1"):
        session.rewind(-1)


def test_a_closed_session_refuses_everything(session: EagerSession) -> None:
    session.prefill([1, 2, 3])
    reply = session.decode(GREEDY)
    next(reply)
    snapshot = session.snapshot()
    session.close()
    session.close()
    calls = [
        lambda: session.prefill([1]), session.logits, lambda: session.decode(GREEDY),
        lambda: session.rewind(1), session.snapshot, lambda: session.restore(snapshot),
        lambda: session.tokens, lambda: next(reply),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidRequest, match="closed"):
            call()


def test_a_context_that_no_state_can_count_is_refused(engine: EagerEngine) -> None:
    with pytest.raises(InvalidRequest, match="expected at most 1073741824"):
        engine.session(2**30 + 1, 100)


@pytest.mark.parametrize("sizes", [(0, 100), (-1, 100), (64, 0), (1.5, 100), (True, 100)])
def test_sessions_of_impossible_sizes_are_refused(engine: EagerEngine, sizes) -> None:
    with pytest.raises(InvalidRequest, match="expected a whole number above 0"):
        engine.session(*sizes)


def test_a_huge_context_costs_nothing_until_it_is_used(engine: EagerEngine) -> None:
    session = engine.session(2**30, 100)
    session.prefill([1, 2, 3])
    assert len(list(islice(session.decode(GREEDY), 3))) == 3


def test_an_interrupted_prefill_is_finished_by_the_next_call(
    runner: Runner, engine: EagerEngine, session: EagerSession
) -> None:
    class Stop(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if done >= 14:
            raise Stop

    with pytest.raises(Stop):
        session.prefill(list(range(30)), stop)
    assert list(session.tokens) == list(range(30))
    session.prefill([40])
    assert_allclose(session.logits(), fresh(engine, [*range(30), 40]), **runner.same)


def test_two_sessions_of_one_engine_do_not_meet(runner: Runner, engine: EagerEngine) -> None:
    first, second = engine.session(64, 100), engine.session(64, 100)
    first.prefill([1, 2, 3])
    second.prefill([9, 8])
    replies = zip(first.decode(GREEDY), second.decode(GREEDY), strict=False)
    both = list(islice(replies, 8))
    assert_allclose(first.logits(), fresh(engine, first.tokens), **runner.same)
    assert_allclose(second.logits(), fresh(engine, second.tokens), **runner.same)
    assert list(first.tokens) == [1, 2, 3, *(a for a, _ in both)]
