"""Perplexity and comparison: every token once, the numbers of a plain float64 computation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import command
import dense
import numpy as np
import pytest
import successor
import tiny

import bonsai
import bonsai.convert as convert
from bonsai import fidelity
from bonsai.errors import FormatError, InvalidRequest
from bonsai.fidelity import compare, perplexity, windows
from bonsai.format import Checkpoint
from bonsai.testing import ScriptedBackend, model

TEXT = "The quick brown fox jumps over the lazy dog. \u00fcber\n" * 3
WORDS = successor.Vocabulary(())
SPEC = tiny.Tiny(hidden=64, ffn=96, heads=2, head_dim=32, group=32, vocab=WORDS.size + 6)


def load(folder: Path, spec: tiny.Tiny = SPEC, **files: bytes) -> bonsai.Model:
    if not folder.exists():
        tiny.write(folder, spec, {**WORDS.files(), **files})
    return bonsai.load(folder, backend="reference")


def logits64(folder: Path, ids) -> np.ndarray:
    with Checkpoint.open(folder) as checkpoint:
        return dense.logits(checkpoint.config, checkpoint.matrix, checkpoint.vector, ids)


def log_p(logits: np.ndarray) -> np.ndarray:
    """ln p [T, ids that the tokenizer has]."""
    kept = logits[:, : WORDS.size]
    return kept - np.log(np.exp(kept).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("prefix", [(), (7,)])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 40, 43])
@pytest.mark.parametrize(("window", "stride"), [(10, 5), (10, 1), (10, 9), (2, 1), (50, 20)])
def test_each_token_is_scored_once_with_enough_before_it(prefix, count, window, stride):
    ids = list(range(100, 100 + count))
    if count == 1 and not prefix:
        with pytest.raises(InvalidRequest, match="1 tokens: there is nothing to predict"):
            windows(ids, prefix, window, stride)
        return
    scored = []
    for i, part in enumerate(windows(ids, prefix, window, stride)):
        assert len(part.ids) <= window
        first = len(part.ids) - part.scored
        assert first >= (window - stride if i else 1)
        assert part.ids[: len(prefix)] == prefix
        body = list(part.ids[len(prefix) :])
        assert body == list(range(body[0], body[0] + len(body)))
        scored += part.ids[first:]
    assert scored == ids[0 if prefix else 1 :]


@pytest.mark.parametrize(("window", "stride"), [(10, 0), (10, 10), (1, 1), (10, -1)])
def test_windows_that_cannot_be_are_refused(window, stride):
    with pytest.raises(InvalidRequest, match="is not possible"):
        windows([1, 2, 3], [], window, stride)
    with pytest.raises(InvalidRequest, match="stride of 2 in windows of 3"):
        windows([1, 2, 3], [1, 2], 3, 2)


def test_perplexity_equals_float64(tmp_path):
    with load(tmp_path / "m") as m:
        ids = m.tokenizer.encode(TEXT)
        found = perplexity(m, TEXT, window=30, stride=10)
    losses, done = [], 1
    for end in range(30, len(ids) + 10, 10):
        end = min(end, len(ids))
        start = max(0, end - 30)
        predicted = log_p(logits64(tmp_path / "m", ids[start:end]))
        losses += [-predicted[i - 1 - start, ids[i]] for i in range(done, end)]
        done = end
    assert found.tokens == len(losses) == len(ids) - 1
    assert found.loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert found.loss_error == pytest.approx(np.std(losses, ddof=1) / len(losses) ** 0.5, rel=1e-4)
    assert found.value == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert found.error == pytest.approx(found.value * found.loss_error)
    assert (found.window, found.stride) == (30, 10)


def test_comparison_equals_float64(tmp_path):
    other = replace(SPEC, seed=1)
    with load(tmp_path / "a") as a, load(tmp_path / "b", other) as b:
        ids = a.tokenizer.encode(TEXT)
        found = compare(a, b, TEXT, window=4096 // 2)
    p, q = (log_p(logits64(tmp_path / name, ids))[:-1] for name in "ab")
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-3)
    assert found.mean == pytest.approx(kl.mean(), rel=1e-4)
    assert found.median == pytest.approx(np.median(kl), rel=1e-3)
    assert found.percentile_99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert found.max == pytest.approx(kl.max(), rel=1e-3)
    assert found.same_top == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    top = np.arange(len(p)), p.argmax(axis=1)
    difference = np.exp(q[top]) - np.exp(p[top])
    assert found.top_rms == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-3)
    ratio = np.exp((p - q)[np.arange(len(p)), ids[1:]].mean())
    assert found.ratio == pytest.approx(ratio, rel=1e-4)
    assert found.ratio == pytest.approx(found.b.value / found.a.value)
    assert 0 < found.ratio_error < found.a.error  # paired: less than that of each


def test_a_model_is_not_apart_from_itself(tmp_path):
    with load(tmp_path / "m") as a, load(tmp_path / "m") as b:
        found = compare(a, b, TEXT, window=20)
    assert not found.kl.any()
    assert (found.same_top, found.top_rms, found.ratio, found.ratio_error) == (1, 0, 1, 0)
    assert found.a == found.b


def test_two_packings_of_the_same_trits_are_not_apart(tmp_path):
    load(tmp_path / "t2", replace(SPEC, hidden=128, ffn=128, group=128)).close()
    convert(tmp_path / "t2", tmp_path / "t5", packing="t5")
    with load(tmp_path / "t2") as a, load(tmp_path / "t5") as b:
        assert compare(a, b, TEXT, window=64).max == 0


def test_models_with_a_beginning_token_see_it_in_every_window(tmp_path):
    config = json.dumps({"bos_token": "<|stop|>", "add_bos_token": True}).encode()
    with load(tmp_path / "m", **{"tokenizer_config.json": config}) as m:
        ids = m.tokenizer.encode(TEXT)
        found = perplexity(m, TEXT, window=4096, limit=9)
        bos = m.tokenizer.bos
    predicted = log_p(logits64(tmp_path / "m", [bos, *ids[:8]]))
    expected = -predicted[np.arange(9), ids[:9]]
    assert found.tokens == 9
    assert found.loss == pytest.approx(expected.mean(), abs=1e-5)


def test_different_vocabularies_are_refused(tmp_path):
    words = successor.Vocabulary((b"xyz",))
    tiny.write(tmp_path / "b", SPEC, words.files())
    with load(tmp_path / "a") as a, bonsai.load(tmp_path / "b", backend="reference") as b:
        with pytest.raises(InvalidRequest, match=r"3 ids differ, the first is 256: '<\|end\|>' an"):
            compare(a, b, TEXT)


def test_a_text_that_the_model_has_no_ids_for_is_refused(tmp_path):
    spec = replace(SPEC, vocab=100)
    with load(tmp_path / "m", spec) as m:
        with pytest.raises(FormatError, match=r"has token id 195, .* has ids below 100"):
            perplexity(m, "\u00fc")


def test_windows_follow_the_context(tmp_path):
    with load(tmp_path / "m", replace(SPEC, context=50)) as m:
        assert perplexity(m, TEXT).window == 50
        with pytest.raises(InvalidRequest, match="window is 60 tokens, max_context is 50"):
            perplexity(m, TEXT, window=60)


def test_one_token_has_no_uncertainty(tmp_path):
    with load(tmp_path / "m") as m:
        found = perplexity(m, "ab")
    assert found.tokens == 1 and np.isnan(found.loss_error)


def test_progress_counts_tokens_and_blocks_do_not_matter():
    calls = []
    scripted = model(ScriptedBackend(["a"]))
    found = perplexity(scripted, "a" * 10, window=4, progress=lambda *call: calls.append(call))
    assert calls == [("score", i, 9) for i in range(1, 10)]
    p = np.e / (np.e + scripted.tokenizer.size - 1)
    assert found.loss == pytest.approx(-np.log(p))


def test_logits_far_apart_do_not_overflow():
    row = fidelity.log_softmax(np.array([3e38, -3e38, 0], np.float32))
    assert row[0] == 0 and np.isfinite(row).all()


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BONSAI_BACKEND", raising=False)
    (tmp_path / "text").write_text(TEXT, encoding="utf-8", newline="")
    load(tmp_path / "a").close()
    load(tmp_path / "b", replace(SPEC, seed=1)).close()
    return lambda *words, **streams: command.run(monkeypatch, *words, **streams)


def test_the_verb_ppl(run):
    words = ("ppl", "text", "-m", "a", "--backend", "reference", "--window", "20", "--limit", "50")
    result = run(*words)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[2] == "scored      49 tokens, window 20, stride 10"
    facts = json.loads(run(*words, "--json").out)
    with load(Path("a")) as m:
        expected = perplexity(m, TEXT, window=20, limit=50)
    assert facts["perplexity"] == expected.value and facts["loss_error"] == expected.loss_error
    assert (facts["tokens"], facts["model"]) == (49, "a")
    assert f"{expected.value:.4f} +/- {expected.error:.4f}" in result.out
    assert run(*words[:1], "-", *words[2:], stdin=TEXT).out == result.out


def test_the_verb_compare(run):
    sides = ("--backend-a", "reference", "--backend-b", "reference")
    words = ("compare", "a", "b", "-t", "text", *sides, "--limit", "30")
    result = run(*words)
    assert (result.code, result.err) == (0, "")
    assert "KL(A||B)" in result.out and "same top" in result.out
    facts = json.loads(run(*words, "--json").out)
    with load(Path("a")) as a, load(Path("b")) as b:
        expected = compare(a, b, TEXT, limit=30)
    assert facts["kl_mean"] == expected.mean and facts["kl_99"] == expected.percentile_99
    assert facts["a"]["perplexity"] == expected.a.value and facts["b"]["model"] == "b"
    assert facts["perplexity_ratio"] == expected.ratio


def test_compare_two_backends_of_one_model(run):
    pytest.importorskip("bonsai.backends.cpu._native", reason="needs the native module")
    sides = ("--backend-a", "reference", "--backend-b", "cpu-exact", "--json")
    facts = json.loads(run("compare", "a", "-t", "text", *sides).out)
    assert facts["kl_max"] < 1e-9 and facts["same_top"] == 1
    assert facts["b"]["backend"].endswith("exact")


def test_bad_words_are_usage_errors(run, tmp_path):
    assert run("compare", "a", "-t", "text").code == 2
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    result = run("ppl", "bytes", "-m", "a")
    assert result.code == 2 and "bytes is not UTF-8 text (byte 0xff at 2)" in result.err
    assert run("ppl", "nothing", "-m", "a").code == 1
    (tmp_path / "empty").write_text("")
    assert "0 tokens: there is nothing to predict" in run("ppl", "empty", "-m", "a").err
