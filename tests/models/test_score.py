"""`Session.score`: the logits after every id, the same as one by one, in small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose
from runners import Runner
from tiny import Tiny

from bonsai.backends import eager
from bonsai.errors import ContextOverflow, InvalidRequest, NumericError
from bonsai.format import Checkpoint
from bonsai.sampling import Sampling

SPEC = Tiny(hidden=64, ffn=96, heads=2, head_dim=32, vocab=100, group=32)
HYBRID = Tiny(architecture="qwen35", dims=16, vocab=100)
IDS = tiny.Random(1).integers(0, 100, 40).tolist()


@pytest.fixture(params=[SPEC, HYBRID], ids=["qwen3", "qwen35"])
def engine(runner: Runner, request, tmp_path: Path) -> Iterator[eager.EagerEngine]:
    with Checkpoint.open(tiny.write(tmp_path / "m", request.param)) as checkpoint:
        yield runner.load(checkpoint, chunk=7)


def one_by_one(engine, ids) -> np.ndarray:
    rows = []
    with engine.session(64, 90) as session:
        for token in ids:
            session.prefill([token])
            rows.append(session.logits())
    return np.array(rows)


def test_rows_are_the_logits_after_each_id(runner, engine, monkeypatch):
    expected = one_by_one(engine, IDS)
    assert (expected[:, 90:] == -np.inf).all()
    for scored in (1, 300, 1 << 22):  # logits in a block: one row, three, all of a forward
        monkeypatch.setattr(eager, "SCORED", scored)
        with engine.session(64, 90) as session:
            session.prefill(IDS[:5])
            blocks = list(session.score(IDS[5:]))
            assert list(session.tokens) == IDS
            assert_allclose(session.logits(), expected[-1], **runner.same)
        assert max(map(len, blocks)) <= max(1, min(7, scored // 100))
        assert all(block.dtype == np.float32 for block in blocks)
        assert_allclose(np.concatenate(blocks), expected[5:], **runner.same)


def test_pending_ids_are_computed_first(runner, engine):
    with engine.session(64, 90) as session:
        session.prefill(IDS[:5])
        decoded = next(session.decode(Sampling.greedy()))
        rows = np.concatenate(list(session.score(IDS[6:])))
    assert_allclose(rows, one_by_one(engine, [*IDS[:5], decoded, *IDS[6:]])[6:], **runner.same)


def test_what_was_not_asked_for_is_pending(runner, engine):
    expected = one_by_one(engine, IDS)
    with engine.session(64, 90) as session:
        rows = session.score(IDS)
        next(rows)
        rows.close()
        assert list(session.tokens) == IDS
        assert_allclose(session.logits(), expected[-1], **runner.same)
        assert list(session.score([])) == []


def test_errors_come_before_anything_changes(engine):
    with engine.session(8, 90) as session:
        session.prefill([1, 2])
        with pytest.raises(ContextOverflow, match="prompt has 9 tokens, max_context is 8"):
            session.score([3] * 7)
        with pytest.raises(InvalidRequest, match="token id 100"):
            session.score([100])
        assert list(session.tokens) == [1, 2]
        rows = session.score([3])
    with pytest.raises(InvalidRequest, match="closed"):
        next(rows)


def test_logits_that_are_not_finite_are_an_error(runner, tmp_path):
    made = tiny.weights(SPEC)
    made.vectors["norm"][:] = 3e38
    with Checkpoint.open(tiny.save(tmp_path / "m", SPEC, made)) as checkpoint:
        session = runner.load(checkpoint).session(64, 90)
    with pytest.raises(NumericError, match="not finite after 3 tokens"):
        list(session.score([1, 2, 3]))
