"""Whole tiny models on every backend against a plain float64 forward of the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import dense
import numpy as np
import pytest
import runners
import tiny
import tolerances
from numpy.testing import assert_allclose
from runners import Runner
from tiny import Gdn, Tiny

from bonsai import backends
from bonsai.config import Yarn
from bonsai.errors import NumericError
from bonsai.format import Checkpoint
from bonsai.matrix import DenseMatrix, PackedMatrix
from bonsai.sampling import Sampling

YARN = Yarn(4.0, 32, 32.0, 1.0, 1.1386294361)
SPECS = {
    "qwen3": Tiny(),
    "llama": Tiny(architecture="llama"),
    "qwen3-untied": Tiny(tied=False),
    "llama-untied-1001": Tiny(architecture="llama", tied=False, vocab=1001),
    "qwen3-ffn192": Tiny(ffn=192),
    "llama-ffn192-1001": Tiny(architecture="llama", ffn=192, vocab=1001),
    "qwen3-head96": Tiny(head_dim=96, heads=3, kv_heads=3),
    "llama-hidden192": Tiny(architecture="llama", hidden=192, heads=3, kv_heads=1),
    "qwen3-hidden256": Tiny(hidden=256, heads=4, kv_heads=2),
    "qwen3-ffn4": Tiny(ffn=4),
    "qwen3-yarn": Tiny(yarn=YARN, theta=1e6),
    "llama-yarn": Tiny(architecture="llama", yarn=YARN),
    "qwen3-hadamard": Tiny(hidden=256, hadamard=128, heads=4),
    "qwen3-hadamard-untied": Tiny(hadamard=64, ffn=192, tied=False),
    "llama-3-layers": Tiny(architecture="llama", layers=3),
    "npz": Tiny(container="npz"),
    "shards": Tiny(shard_bytes=40_000, tied=False),
    **{f"tied-{p}": Tiny(packing=p, group=64, ffn=192) for p in ("t2", "t5", "b1", "q4", "q8")},
    **{f"untied-{p}": Tiny(packing=p, tied=False) for p in ("t5", "b1", "q4", "q8")},
    **{p: Tiny(packing=p, architecture="llama") for p in ("f32", "f16", "bf16")},
    **{f"t2-group{g}": Tiny(group=g, ffn=192) for g in (32, 64, 256)},
    "q4-q8-mixed": Tiny(architecture="llama", packing="q4", table="q8", group=32, ffn=192),
    "t2-f16-mixed": Tiny(packing="t2", table="f16", tied=False),
}
HYBRID = {"architecture": "qwen35", "dims": 16}
SPECS |= {
    "qwen35": Tiny(**HYBRID),
    "qwen35-4-layers": Tiny(**HYBRID, layers=4, kinds=("delta", "delta", "delta", "attention")),
    "qwen35-untied-1001": Tiny(**HYBRID, tied=False, vocab=1001, heads=4, kv_heads=2),
    "qwen35-t5-ffn192": Tiny(**HYBRID, packing="t5", ffn=192),
    "qwen35-f32": Tiny(**HYBRID, packing="f32"),
    "qwen35-hadamard": Tiny(**HYBRID, hadamard=64, heads=3),
    "qwen35-no-attention": Tiny(**HYBRID, kinds=("delta", "delta")),
    "qwen35-no-delta": Tiny(**HYBRID, kinds=("attention", "attention")),
    "qwen35-odd-gdn": Tiny(**HYBRID, gdn=Gdn(3, 3, 24, 40, 3)),
}
TOKENS = np.random.default_rng(0).integers(0, 1000, 40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, np.ndarray]]:
    """name -> the folder of the model and its true logits after each of TOKENS; made once."""

    @functools.cache
    def make(name: str) -> tuple[Path, np.ndarray]:
        folder = tiny.write(tmp_path_factory.mktemp("models") / "m", SPECS[name])
        with Checkpoint.open(folder) as checkpoint:
            return folder, truth(checkpoint, TOKENS)

    return make


def truth(checkpoint: Checkpoint, tokens) -> np.ndarray:
    return dense.logits(checkpoint.config, checkpoint.matrix, checkpoint.vector, tokens)


def after(engine, tokens, max_context: int = 4096) -> np.ndarray:
    """Logits after one prefill."""
    with engine.session(max_context, engine.vocab) as session:
        session.prefill(list(tokens))
        return session.logits()


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_float64(runner: Runner, made, name: str) -> None:
    folder, expected = made(name)
    assert np.abs(expected).max() > 0.5  # else a model of zeros would pass
    with Checkpoint.open(folder) as checkpoint:
        engine = runner.load(checkpoint)
    for count in (1, 2, 5, 33, 40):
        found = after(engine, TOKENS[:count])
        assert found.dtype == np.float32
        bound = runner.bound(SPECS[name].architecture)
        assert_allclose(found, expected[count - 1], **bound)


def test_two_shards_are_two_files(made) -> None:
    assert len(list(made("shards")[0].glob("*.safetensors"))) >= 2


@pytest.mark.parametrize(
    "name", ["qwen3", "llama-ffn192-1001", "qwen3-yarn", "qwen3-hadamard", "qwen35"]
)
@pytest.mark.parametrize("chunk", [1, 3, 32, 33])
def test_the_chunk_size_does_not_matter(runner: Runner, made, name: str, chunk: int) -> None:
    with Checkpoint.open(made(name)[0]) as checkpoint:
        whole = after(runner.load(checkpoint), TOKENS)
        parts = after(runner.load(checkpoint, chunk), TOKENS)
        assert_allclose(parts, whole, **runner.same)


@pytest.mark.parametrize(
    "name", ["qwen3", "llama-ffn192-1001", "qwen3-yarn", "qwen3-head96", "qwen35"]
)
def test_decode_continues_prefill(runner: Runner, made, name: str) -> None:
    with Checkpoint.open(made(name)[0]) as checkpoint:
        engine = runner.load(checkpoint)
    session = engine.session(4096, engine.vocab)
    session.prefill(list(TOKENS[:20]))
    for count, token in zip(range(25), session.decode(Sampling.greedy()), strict=False):
        assert session.tokens[-1] == token
        if count in (0, 1, 7, 24):
            assert_allclose(session.logits(), after(engine, session.tokens), **runner.same)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "qwen35-no-attention", "qwen35-no-delta"])
def test_a_snapshot_holds_every_kind_of_memory(runner: Runner, made, name: str) -> None:
    with Checkpoint.open(made(name)[0]) as checkpoint:
        engine = runner.load(checkpoint)
    session = engine.session(4096, engine.vocab)
    session.prefill(list(TOKENS[:20]))
    snapshot = session.snapshot()
    session.prefill(list(TOKENS[30:]))
    session.restore(snapshot)
    session.prefill(list(TOKENS[20:]))
    assert_allclose(session.logits(), after(engine, TOKENS), **runner.same)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_theta_counts_at_position_500(runner: Runner, tmp_path: Path, architecture: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 1000, 501)
    spec = Tiny(architecture=architecture, theta=1e6)
    with Checkpoint.open(tiny.write(tmp_path / "m", spec)) as checkpoint:
        found = after(runner.load(checkpoint), tokens)
        expected = truth(checkpoint, tokens)[-1]
        assert_allclose(found, expected, **runner.model)
        other = {**checkpoint.config, "rope": {"theta": 1e4, "dims": 64}}
        wrong = dense.logits(other, checkpoint.matrix, checkpoint.vector, tokens)[-1]
        assert np.abs(expected - wrong).max() > 10 * runner.model["atol"]


def test_groups_of_zeros_and_padded_vocabulary_rows_do_no_harm(
    runner: Runner, tmp_path: Path
) -> None:
    spec = Tiny(vocab=1024, tied=False)
    made = tiny.weights(spec)
    for name, matrix in made.matrices.items():
        scales = matrix.scales.copy()
        scales[1000 if name in ("head", "embedding") else len(scales) - 3 :] = 0
        planes = (matrix.shape, matrix.group, matrix.codes, scales)
        made.matrices[name] = PackedMatrix(name, matrix.packing, *planes)
    with Checkpoint.open(tiny.save(tmp_path / "m", spec, made)) as checkpoint:
        found = after(runner.load(checkpoint), [5, 1010, 7])
        assert_allclose(found, truth(checkpoint, [5, 1010, 7])[-1], **runner.model)
        assert_allclose(found[1000:], 0, **tolerances.EXACT)


def test_ids_that_the_tokenizer_lacks_are_never_chosen(runner: Runner, tmp_path: Path) -> None:
    spec = Tiny(vocab=1024, tied=False, table="f32")
    made = tiny.weights(spec)
    head = made.matrices["head"].values.copy()
    head[1010] = 100 * head[17]
    head[1011] = -100 * head[17]  # one of the two wins, whatever the text is
    made.matrices["head"] = DenseMatrix("head", "f32", head.shape, head)
    with Checkpoint.open(tiny.save(tmp_path / "m", spec, made)) as checkpoint:
        engine = runner.load(checkpoint)
    with engine.session(100, 1024) as free:
        free.prefill([1, 2, 3])
        assert next(free.decode(Sampling.greedy())) in (1010, 1011)
    for sampling in (Sampling.greedy(), Sampling(temperature=50.0, seed=1)):
        with engine.session(60, 1000) as session:
            session.prefill([1, 2, 3])
            assert np.isneginf(session.logits()[1000:]).all()
            assert np.isfinite(session.logits()[:1000]).all()
            chosen = list(session.decode(sampling))
        assert len(chosen) == 57
        assert max(chosen) < 1000


def scaled(tmp_path: Path, name: str, factor: float, spec: Tiny = Tiny()) -> Checkpoint:  # noqa: B008
    """A model with one norm gain multiplied."""
    made = tiny.weights(spec)
    made.vectors[name] = made.vectors[name] * np.float32(factor)
    return Checkpoint.open(tiny.save(tmp_path / "m", spec, made))


def test_activations_beyond_fp16_are_kept(runner: Runner, tmp_path: Path) -> None:
    with scaled(tmp_path, "layers.0.ffn_norm", 3e3) as checkpoint:
        found = after(runner.load(checkpoint), TOKENS)
        h = np.float64(3e3) ** 2  # gate * up is about this
        assert h > 65504
        assert_allclose(found, truth(checkpoint, TOKENS)[-1], **runner.model)


@pytest.mark.parametrize("name", ["llama-ffn192-1001", "qwen3-hadamard-untied", "qwen3-head96"])
def test_every_instruction_set_says_the_same(made, name: str) -> None:
    """Scales are below 1, sizes are odd. Ids are compared where no activation is rounded: a step of
    int8 more or less may decide between two tokens that are nearly as good."""
    cpu = pytest.importorskip("bonsai.backends.cpu._native", reason="the native library is absent")
    with Checkpoint.open(made(name)[0]) as checkpoint:
        assert checkpoint.matrix("layers.0.attn.q").scales.max() < 1
        found = {}
        for isa in cpu.supported():
            for exact in (False, True):
                runner = runners.on_cpu(isa, exact)
                engine = runner.load(checkpoint)
                with engine.session(100, engine.vocab) as session:
                    session.prefill(list(TOKENS))
                    logits = session.logits()
                    ids = list(islice(session.decode(Sampling.greedy()), 20)) if exact else []
                found[isa, exact] = logits, ids
    for (isa, exact), (logits, ids) in found.items():
        expected, same_ids = found["portable", exact]
        bound = tolerances.F32_MODEL if exact else tolerances.INT8_SAME
        assert_allclose(logits, expected, **bound, err_msg=isa)
        assert ids == same_ids, isa


@pytest.mark.parametrize("name", ["reference", "cpu-exact", "cpu"])
def test_the_largest_scales_of_fp16_are_computed_or_refused_with_a_way_out(
    tmp_path: Path, name: str
) -> None:
    """Only keys and values in fp16 cannot hold what they lead to; sums have room for it."""
    spec = Tiny(layers=1)
    made = tiny.weights(spec)
    for key, matrix in made.matrices.items():
        made.matrices[key] = replace(matrix, scales=np.full_like(matrix.scales, 65504))
    with Checkpoint.open(tiny.save(tmp_path / "m", spec, made)) as checkpoint:
        engine = backends.get(name).load(checkpoint)
        expected = truth(checkpoint, TOKENS[:5])[-1]
    if name == "cpu":
        with pytest.raises(NumericError) as caught:
            after(engine, TOKENS[:5])
        assert "--backend cpu-exact" in str(caught.value.hint)
    else:
        largest = np.abs(expected).max()
        assert largest > 1e5
        assert_allclose(after(engine, TOKENS[:5]), expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("norm", ["layers.1.ffn_norm", "norm"])
def test_logits_that_are_not_finite_end_the_reply_and_no_other(
    runner: Runner, tmp_path: Path, norm: str
) -> None:
    """Every weight is finite; what the model makes of them is not."""
    with scaled(tmp_path / "bad", norm, 1e38) as checkpoint:
        engine = runner.load(checkpoint)
    with Checkpoint.open(tiny.write(tmp_path / "good", Tiny())) as checkpoint:
        other = runner.load(checkpoint).session(100, 1000)
    other.prefill([1, 2, 3])
    replies = other.decode(Sampling.greedy())
    next(replies)
    with engine.session(100, 1000) as session:
        session.prefill([1, 2, 3])
        with pytest.raises(NumericError, match="not finite after 3 tokens"):
            next(session.decode(Sampling.greedy()))
        with pytest.raises(NumericError):
            session.logits()
    assert 0 <= next(replies) < 1000
