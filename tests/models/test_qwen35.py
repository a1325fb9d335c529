"""Hybrids of delta nets and attention: what their recurrent memory and their folds promise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import dense
import numpy as np
import pytest
import runners
import tiny
from conftest import RUNNERS
from numpy.testing import assert_allclose
from runners import Runner
from tiny import Gdn, Tiny

from bonsai import models
from bonsai.backends import marks
from bonsai.backends.eager import EagerEngine
from bonsai.backends.reference.ops import ReferenceOps
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.format import Checkpoint
from bonsai.matrix import DenseMatrix, Matrix, SignedHadamard
from bonsai.models import qwen35
from bonsai.sampling import Sampling

GREEDY = Sampling.greedy()
SPEC = Tiny(
    architecture="qwen35", layers=4, hidden=64, ffn=96, heads=2, head_dim=32, dims=8, vocab=100,
    group=32, kinds=("delta", "delta", "delta", "attention"), gdn=Gdn(2, 4, 16, 16),
)  # fmt: skip


@pytest.fixture(params=(*RUNNERS, "defaults"))
def runner(request: pytest.FixtureRequest) -> Runner:
    """Also the compositions in NumPy that backends start from."""
    return runners.get(request.param)


@pytest.fixture
def engine(runner: Runner, tmp_path: Path) -> EagerEngine:
    with Checkpoint.open(tiny.write(tmp_path / "m", SPEC)) as checkpoint:
        return runner.load(checkpoint, chunk=7)


def fresh(engine: EagerEngine, ids) -> np.ndarray:
    with engine.session(4096, engine.vocab) as session:
        session.prefill(ids)
        return session.logits()


def test_200_decoded_tokens_equal_one_prefill_of_them(runner: Runner, tmp_path: Path) -> None:
    """A memory in half precision would drift away (and reply in circles)."""
    with Checkpoint.open(tiny.write(tmp_path / "m", SPEC)) as checkpoint:
        engine = runner.load(checkpoint)
        session = engine.session(400, 100)
        session.prefill([1, 2, 3])
        assert len(list(islice(session.decode(Sampling(seed=1)), 200))) == 200
        found = session.logits()
        assert_allclose(found, fresh(engine, session.tokens), **runner.same)
        truth = dense.logits(checkpoint.config, checkpoint.matrix, checkpoint.vector,
                             session.tokens)  # fmt: skip
    assert_allclose(found, truth[-1], **runner.model)


@pytest.mark.parametrize("chunk", [1, 2, 64, 65, 512])
def test_the_chunk_size_does_not_matter(runner: Runner, tmp_path: Path, chunk: int) -> None:
    ids = tiny.Random(0).integers(0, 100, 150).tolist()
    with Checkpoint.open(tiny.write(tmp_path / "m", SPEC)) as checkpoint:
        expected = dense.logits(checkpoint.config, checkpoint.matrix, checkpoint.vector, ids)
        assert_allclose(fresh(runner.load(checkpoint, chunk), ids), expected[-1], **runner.model)


def test_any_history_of_calls_ends_in_the_logits_of_its_tokens(
    runner: Runner, engine: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for other models, but a rewind may go further back than was asked."""
    monkeypatch.setattr(marks, "WORTH", 4)
    monkeypatch.setattr(marks, "SPACING", 12)
    exact = between = 0
    for seed in range(6):
        choose = random.Random(seed)
        session, kept = engine.session(64, 100), []
        expected: list[int] = []
        for _ in range(40):
            action = choose.choice(["prefill", "decode", "rewind", "snapshot", "restore", "logits"])
            if action == "prefill":
                ids = [choose.randrange(100) for _ in range(choose.randint(0, 20))]
                if len(expected) + len(ids) <= 64:
                    session.prefill(ids)
                    expected += ids
            elif action == "decode" and expected:
                reply = session.decode(Sampling(seed=choose.randrange(9)))
                expected += islice(reply, choose.randint(1, 4))
            elif action == "rewind":
                length = choose.randint(0, 64)
                stays = session.rewind(length)
                assert stays <= min(length, len(expected))
                exact += stays == length
                between += 0 < stays < length < len(expected)
                del expected[stays:]
            elif action == "snapshot":
                kept.append((session.snapshot(), list(expected)))
            elif action == "restore" and kept:
                snapshot, expected = choose.choice(kept)
                expected = list(expected)
                session.restore(snapshot)
            elif action == "logits" and expected:
                assert_allclose(session.logits(), fresh(engine, expected), **runner.same)
            assert list(session.tokens) == expected
        session.prefill([1] * (len(expected) < 64))
        assert_allclose(session.logits(), fresh(engine, session.tokens), **runner.same)
    assert exact
    assert between  # else no mark was ever used


def test_a_rewind_comes_back_to_the_end_of_the_prompt(engine: EagerEngine) -> None:
    """The next turn of a chat repeats the last prompt, but for the opening of the reply."""
    prompt = tiny.Random(1).integers(0, 100, 150).tolist()
    session = engine.session(400, 100)
    session.prefill(prompt)
    list(islice(session.decode(GREEDY), 30))
    assert session.rewind(147) == 150 - marks.TAIL
    session.prefill([1, 2, 3])
    assert list(session.tokens) == [*prompt[:142], 1, 2, 3]
    assert session.rewind(141) == 0
    assert list(session.tokens) == []


def test_what_is_pending_is_cut_exactly(engine: EagerEngine) -> None:
    session = engine.session(400, 100)
    session.prefill([1, 2, 3])
    next(session.decode(GREEDY))  # held but not computed
    assert session.rewind(3) == 3
    assert session.rewind(2) == 0


def test_logits_after_a_rewind_to_a_mark(runner: Runner, engine: EagerEngine) -> None:
    prompt = tiny.Random(2).integers(0, 100, 100).tolist()
    session = engine.session(400, 100)
    session.prefill(prompt)
    assert session.rewind(95) == 92
    assert_allclose(session.logits(), fresh(engine, prompt[:92]), **runner.same)


def test_a_snapshot_brings_its_marks(runner: Runner, engine: EagerEngine) -> None:
    prompt = tiny.Random(3).integers(0, 100, 100).tolist()
    first, second = engine.session(400, 100), engine.session(400, 100)
    first.prefill(prompt)
    snapshot = first.snapshot()
    first.rewind(0)
    first.prefill([9] * 80)
    second.prefill([8] * 90)
    for session in (first, second):
        session.restore(snapshot)
        assert session.rewind(99) == 92
        session.prefill([5])
        assert_allclose(session.logits(), fresh(engine, [*prompt[:92], 5]), **runner.same)


def test_marks_are_few_and_far_apart() -> None:
    found = marks.Marks()
    for position in range(0, 100 * marks.SPACING, 512):
        if found.due(position, 10**9):
            found.add(marks.Mark(position, None, None))
    lengths = [mark.length for mark in found]
    assert len(lengths) == marks.LIMIT
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 99 * marks.SPACING  # the newest is always kept
    assert found.back(lengths[1] + 1).length == lengths[1]
    assert found.back(lengths[0] - 1) is None
    assert list(found) == []


def test_keys_and_values_are_counted_for_attention_blocks_only(engine: EagerEngine) -> None:
    assert engine.model.config.state.kv_layers == 1
    state = engine.new_state(10)
    assert state.bytes_per_token in (2 * 32 * 4, 2 * 32 * 2)


# Folded twins: weights that read a transformed input give the logits of the plain ones.

PLAIN = replace(SPEC, packing="f32", tied=False, hidden=64, ffn=128, gdn=Gdn(2, 6, 16, 16))
IDS = tiny.Random(4).integers(0, 100, 20).tolist()
BLOCK = 32
UNFOLDED = ("gdn.a", "gdn.b")
FAR = 0.1  # of logits up to 5; a right twin is within 1e-4


def folded(matrix: Matrix) -> Matrix:
    """The same matrix for inputs that go through T: W diag(s) H."""
    if matrix.name.endswith(UNFOLDED):
        return matrix
    width = matrix.shape[1]
    transform = tiny.signs(tiny.Random(width), BLOCK, width)
    values = transform.forward(matrix.rows().astype(np.float64)).astype(np.float32)
    return DenseMatrix(matrix.name, "f32", matrix.shape, values, transform)


def logits_of(runner: Runner, folder: Path, spec: Tiny, made: tiny.Weights) -> np.ndarray:
    with Checkpoint.open(tiny.save(folder, spec, made)) as checkpoint:
        return fresh(runner.load(checkpoint), IDS)


def twins(spec: Tiny) -> tuple[tiny.Weights, tiny.Weights]:
    plain = tiny.weights(spec)
    return plain, tiny.Weights({n: folded(m) for n, m in plain.matrices.items()}, plain.vectors)


@pytest.mark.parametrize("tied", [False, True])
def test_a_folded_twin_gives_the_logits_of_the_plain_model(
    runner: Runner, tmp_path: Path, tied: bool
) -> None:
    """Tied: the lookup undoes the transform that the head applies, on one table."""
    spec = replace(PLAIN, tied=tied)
    plain, twin = twins(spec)
    changed = [n for n, m in twin.matrices.items()
               if not np.array_equal(m.rows(), plain.matrices[n].rows())]  # fmt: skip
    assert len(changed) == len(plain.matrices) - 3 * len(UNFOLDED)
    expected = logits_of(runner, tmp_path / "plain", spec, plain)
    assert_allclose(logits_of(runner, tmp_path / "twin", spec, twin), expected, **runner.model)


def without_rotation(matrix: Matrix) -> Matrix:
    return replace(matrix, transform=None)


def without_signs(matrix: Matrix) -> Matrix:
    if matrix.transform is None:
        return matrix
    ones = np.ones_like(matrix.transform.signs)
    return replace(matrix, transform=SignedHadamard(BLOCK, ones))


def with_tiled_heads(matrix: Matrix) -> Matrix:
    """The columns of gdn.out with value head j at (j % 3) * 2 + j // 3, as in GGUF."""
    if not matrix.name.endswith("gdn.out"):
        return matrix
    values = matrix.rows().reshape(-1, 2, 3, 16).transpose(0, 2, 1, 3).reshape(matrix.shape)
    return replace(matrix, values=np.ascontiguousarray(values))


def with_big_halves(matrix: Matrix) -> Matrix:
    """attn.q with all queries before all gates, not head by head."""
    if not matrix.name.endswith("attn.q"):
        return matrix
    values = matrix.rows().reshape(2, 2, 32, -1).transpose(1, 0, 2, 3).reshape(matrix.shape)
    return replace(matrix, values=np.ascontiguousarray(values))


@pytest.mark.parametrize("part", ["all", "embedding", "head", "attn", "gdn.out", "gdn.z", "ffn.up"])
@pytest.mark.parametrize("control", [without_rotation, without_signs])
def test_a_fold_that_is_not_undone_is_far_off(
    runner: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    control: Callable[[Matrix], Matrix],
    part: str,
) -> None:
    """Changed between file and model, since no file can say that signs differ between matrices."""
    plain, twin = twins(PLAIN)
    expected = logits_of(runner, tmp_path / "plain", PLAIN, plain)
    read = Checkpoint.matrix

    def changed(checkpoint: Checkpoint, name: str) -> Matrix:
        matrix = read(checkpoint, name)
        return control(matrix) if part in (name, "all") or f".{part}" in name else matrix

    monkeypatch.setattr(Checkpoint, "matrix", changed)
    found = logits_of(runner, tmp_path / "twin", PLAIN, twin)
    assert np.abs(found - expected).max() > FAR


@pytest.mark.parametrize("control", [with_tiled_heads, with_big_halves])
def test_heads_in_another_order_are_far_off(
    runner: Runner, tmp_path: Path, control: Callable[[Matrix], Matrix]
) -> None:
    plain = tiny.weights(PLAIN)
    wrong = tiny.Weights({n: control(m) for n, m in plain.matrices.items()}, plain.vectors)
    expected = logits_of(runner, tmp_path / "plain", PLAIN, plain)
    found = logits_of(runner, tmp_path / "wrong", PLAIN, wrong)
    assert np.abs(found - expected).max() > FAR


def test_norms_shifted_once_more_are_far_off(runner: Runner, tmp_path: Path) -> None:
    plain = tiny.weights(PLAIN)
    shifted = {
        name: values + np.float32(name.endswith(("_norm", "norm")) and ".gdn." not in name)
        for name, values in plain.vectors.items()
    }
    expected = logits_of(runner, tmp_path / "plain", PLAIN, plain)
    found = logits_of(runner, tmp_path / "wrong", PLAIN, tiny.Weights(plain.matrices, shifted))
    assert np.abs(found - expected).max() > FAR


# What a checkpoint must say and have.


def test_a_config_is_read_whole() -> None:
    cfg = qwen35.read_config(tiny.config(SPEC))
    assert cfg.kinds == ("delta", "delta", "delta", "attention")
    assert (cfg.gdn.key_heads, cfg.gdn.value_heads, cfg.gdn.taps) == (2, 4, 4)
    assert (cfg.gdn.channels, cfg.gdn.values, cfg.rope.dims) == (128, 64, 8)
    memory = cfg.state.delta
    assert (memory.layers, memory.channels, memory.heads) == (3, 128, 4)
    assert (memory.taps, memory.key_dim, memory.value_dim) == (4, 16, 16)


GDN = tiny.config(SPEC)["gdn"]


@pytest.mark.parametrize(("change", "words"), [
    ({"architecture": "qwen3"}, ["architecture", "qwen3"]),
    ({"kinds": None}, ["kinds", "None", "4 layers"]),
    ({"kinds": ["delta"]}, ["kinds", "1 entries", "4 layers"]),
    ({"kinds": ["delta", "delta", "mamba", "attention"]}, ["mamba", "delta, attention"]),
    ({"kinds": ["delta", "delta", 3, "attention"]}, ["kinds", "3"]),
    ({"output_gate": "swish"}, ["output_gate", "swish", "sigmoid"]),
    ({"gdn": None}, ["gdn", "missing"]),
    ({"gdn": {**GDN, "value_heads": 3}}, ["gdn", "3 value_heads", "2 key_heads"]),
    ({"gdn": {**GDN, "taps": 1000}}, ["gdn", "taps", "1000"]),
    ({"gdn": {**GDN, "norm": "l1"}}, ["gdn", "unknown keys", "norm"]),
    ({"gdn": {**GDN, "key_dim": 0}}, ["gdn", "key_dim", "0"]),
    ({"mtp": 1}, ["unknown keys", "mtp"]),
    ({"rope": {"theta": 1e7, "dims": 34}}, ["rope", "34"]),
])  # fmt: skip
def test_a_config_that_we_cannot_honour_is_refused_by_key(change: dict, words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        qwen35.read_config({**tiny.config(SPEC), **change})
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def load(folder: Path) -> models.Model:
    with Checkpoint.open(folder) as checkpoint:
        return models.load(checkpoint, ReferenceOps())


@pytest.mark.parametrize("name", [
    "layers.0.gdn.qkv", "layers.1.gdn.a", "layers.2.gdn.conv", "layers.0.gdn.a_log",
    "layers.0.gdn.norm", "layers.3.attn.q", "layers.3.attn.k_norm", "layers.2.gdn.out",
])  # fmt: skip
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    made = tiny.weights(SPEC)
    made.matrices.pop(name, None)
    made.vectors.pop(name, None)
    with pytest.raises(FormatError, match=f"no tensor '{name}'"):
        load(tiny.save(tmp_path / "m", SPEC, made))


def test_shapes_are_checked_against_the_config(tmp_path: Path) -> None:
    other = replace(SPEC, gdn=Gdn(2, 4, 16, 16, 3))
    with pytest.raises(
        FormatError, match=r"layers.0.gdn.conv is 128 x 4, the config needs 128 x 3"
    ):
        load(tiny.save(tmp_path / "taps", other, tiny.weights(SPEC)))
    kinds = replace(SPEC, kinds=("attention", "delta", "delta", "attention"))
    with pytest.raises(FormatError, match=r"no tensor 'layers.0.attn.q'"):
        load(tiny.save(tmp_path / "kinds", kinds, tiny.weights(SPEC)))
