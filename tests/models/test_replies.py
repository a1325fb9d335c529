"""Replies through real files, tokenizers and weights: a model that must say what the test wants."""

from __future__ import annotations

import json
import threading

import pytest
import successor
from successor import Successor

import bonsai
from bonsai.matrix import DenseMatrix
from bonsai.sampling import Sampling

FLAG = b"\xf0\x9f\x8f\xb3\xef\xb8\x8f\xe2\x80\x8d\xf0\x9f\x8c\x88"  # four code points, one flag


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    try:
        return bonsai.backends.get(request.param).name
    except bonsai.BackendUnavailable as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.fixture
def say(tmp_path, backend):
    """say(pieces, **options): the chunks' texts and the completion; generate gives the same."""

    def run(what, prompt="Hi", files=None, **options):
        path = successor.write(tmp_path / "m", what, **(files or {}))
        with bonsai.load(path, backend=backend) as model:
            stream = model.stream(prompt, **options)
            texts = [chunk.text for chunk in stream]
            again = model.generate(prompt, **options)
        assert "".join(texts) == stream.completion.text == again.text
        assert (again.tokens, again.finish_reason) == (
            stream.completion.tokens,
            stream.completion.finish_reason,
        )
        assert "" not in texts
        return texts, stream.completion

    return run


def test_model_says_what_it_must(say):
    texts, reply = say(["Hel", "lo", "!"])
    assert texts == ["Hel", "lo", "!"]
    assert reply.finish_reason == "stop"
    assert reply.usage.completion_tokens == 4


def test_all_thousand_tokens_have_their_successor(tmp_path, backend):
    pieces = [f"<{i}>" for i in range(1000)]
    path = successor.write(tmp_path / "m", pieces)
    with bonsai.load(path, backend=backend) as model:
        assert model.generate("Hi").text == "".join(pieces)


def test_a_huge_prompt_is_refused_by_its_length(tmp_path, monkeypatch):
    """Thirty megabytes would take minutes to encode."""
    path = successor.write(tmp_path / "m", ["Hel", "lo"])
    with bonsai.load(path, backend="reference", max_context=1000) as model:
        widest = max(map(len, model.tokenizer.vocabulary()))
        text = "ab " * 10_000_000
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(
                type(model.tokenizer), name, lambda *_, **__: pytest.fail("encoded")
            )
        chat = model.chat()
        for ask in (
            lambda: model.stream(text),
            lambda: model.stream(text, raw=True),
            lambda: model.stream([{"role": "user", "content": text[:-100]}] * 2),
            lambda: chat.stream(text),
        ):
            with pytest.raises(bonsai.ContextOverflow) as caught:
                ask()
            least = int(str(caught.value).split()[4].replace(",", ""))
            assert least >= len(text) // widest - 1
            assert str(caught.value).endswith("max_context is 1,000")
            assert "shorten the prompt" in caught.value.hint
        assert chat.messages == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_sampled_reply_is_the_greedy_one_where_the_model_is_sure(say, architecture):
    what = Successor(["Hel", "lo"], architecture=architecture)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=1)
    assert say(what, sampling=sampling)[0] == ["Hel", "lo"]


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["\U0001f600"]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["\U0001f600"]),
        ([b"\xe4\xbd", b"\xa0", b"\xe5", b"\xa5\xbd"], ["\u4f60", "\u597d"]),
        ([b"\xc4", b"\x8f"], ["\u010f"]),
        ([b"\xe2", "(", "A"], ["\ufffd(", "A"]),
        ([b"\x9c"], ["\ufffd"]),
        ([b"\xe2\x9c\x85", b"\x85", "ok"], ["\u2705", "\ufffd", "ok"]),
        (["a", b"\xf0\x9f\x98"], ["a", "\ufffd"]),
    ],
)
def test_split_and_invalid_characters(say, pieces, texts):
    found, reply = say(pieces)
    assert "".join(found) == "".join(texts)
    assert reply.finish_reason == "stop"
    json.dumps(reply.text).encode()


def test_flag_of_several_code_points_arrives_whole(say):
    cut = [FLAG[:3], FLAG[3:5], FLAG[5:9], FLAG[9:]]
    assert "".join(say(cut)[0]) == FLAG.decode()


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["ab", "cE", "ND", "x"], "END", "abc"),
        (["ab", "cE", "ND"], "ENDING", "abcEND"),
        (["a", "aa", "b"], "aab", "a"),
        (["x", "EN", "DING"], ["ENDING", "END"], "x"),
        (["END"], "END", ""),
        (["ab", "c"], [""], "abc"),
        (["a", b"\xc3", b"\xa9", "b"], "\u00e9", "a"),
    ],
)
def test_stop_strings(say, pieces, stop, text):
    reply = say(pieces, stop=stop)[1]
    assert (reply.text, reply.finish_reason) == (text, "stop")


def test_limit_is_a_length_finish(say):
    reply = say(["a", "b", "c"], max_tokens=2)[1]
    assert (reply.text, reply.finish_reason) == ("ab", "length")


def eos_ids(*names):
    return [successor.Vocabulary((b"Hi",)).id(name) for name in names]


@pytest.mark.parametrize("end", ["<|end|>", "<|stop|>"])
@pytest.mark.parametrize(
    ("config", "generation"),
    [
        (("<|end|>", "<|stop|>"), None),
        ((), ("<|end|>", "<|stop|>")),
        (("<|end|>",), ("<|stop|>",)),
        (("<|stop|>",), ("<|end|>",)),
    ],
)
def test_every_end_marker_ends_the_reply(say, end, config, generation):
    files = {}
    if generation is not None:
        listed = eos_ids(*generation)
        wanted = listed if len(listed) > 1 else listed[0]
        files["generation_config"] = json.dumps({"eos_token_id": wanted}).encode()
    reply = say(Successor(["Hi"], end=end, eos=config), files=files, max_tokens=9)[1]
    assert (reply.text, reply.finish_reason) == ("Hi", "stop")
    assert reply.tokens[-1] == eos_ids(end)[0]


def test_end_marker_of_the_tokenizer_ends_the_reply(say):
    files = {"tokenizer_config": b'{"eos_token": "<|end|>"}'}
    reply = say(Successor(["Hi"], eos=()), files=files, max_tokens=9)[1]
    assert (reply.text, reply.finish_reason) == ("Hi", "stop")


@pytest.mark.parametrize("sampling", [Sampling.greedy(), Sampling(temperature=1.0, seed=1)])
def test_ids_beyond_the_tokenizer_are_never_chosen(say, sampling):
    louder = {1010: successor.TRIGGER.to_bytes(1, "big"), 500: "Hel"}
    what = Successor(["Hel", "lo"], vocab=1024, louder=louder)
    assert say(what, sampling=sampling)[1].text == "Hello"


def test_louder_row_wins_where_the_tokenizer_knows_it(say):
    """The control of the test above: without the mask the padded row would have won."""
    what = Successor(["Hel", "lo"], louder={ord("!"): "Hel"})
    assert say(what, max_tokens=2)[1].text == "Hel!"


def test_bad_bytes_of_one_reply_do_not_touch_another(tmp_path, backend):
    bad = successor.write(tmp_path / "bad", [b"\xe2", "(", "A", b"\xf0\x9f\x98"])
    replies = []
    with bonsai.load(bad, backend=backend) as model:
        start = threading.Barrier(2)

        def work():
            start.wait(10)
            replies.extend(model.generate("Hi").text for _ in range(3))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert replies == ["\ufffd(A\ufffd"] * 6


def test_logits_that_overflow_end_that_reply_only(tmp_path, backend):
    """A row of the head gives infinity after one byte, and something finite and small elsewhere."""
    what = Successor(["Hi"])
    made = successor.weights(what)
    rows, head = made.matrices["embedding"].rows(), made.matrices["head"].rows()
    said = rows[[successor.TRIGGER, what.vocabulary.id("Hi")]]
    bad = next(b for b in range(ord("A"), ord("z")) if (said @ rows[b] < 0).all())
    head[0] = 5e36 * rows[bad]  # times 128 is beyond float32
    made.matrices["head"] = DenseMatrix("head", "f32", head.shape, head)
    path = successor.write(tmp_path / "m", what, made)
    with bonsai.load(path, backend=backend) as model:
        waiting = model.stream(">", raw=True, max_tokens=2)
        assert next(waiting).text == "Hi"
        for sampling in (Sampling.greedy(), Sampling(seed=1)):
            with pytest.raises(bonsai.NumericError, match="not finite"):
                model.generate(chr(bad), raw=True, sampling=sampling)
        assert list(waiting) == [] and waiting.completion.finish_reason == "stop"
        assert model.generate("Hi").text == "Hi"


def test_chat_computes_only_what_is_new(tmp_path, backend):
    path = successor.write(tmp_path / "m", ["Hel", "lo"])
    with bonsai.load(path, backend=backend) as model:
        chat = model.chat()
        first = chat.send("Hi")
        second = chat.send("Ho")
        fresh = model.generate(chat.messages[:-1])
    assert (first.text, second.text) == ("Hello", "Hello")
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert fresh.tokens == second.tokens


def test_scripted_backend_speaks_a_real_tokenizer(tmp_path):
    path = successor.write(tmp_path / "m", ["Hel", "lo"])
    backend = bonsai.testing.ScriptedBackend(["ca", "f\u00e9"])
    with bonsai.load(path, backend=backend) as model:
        reply = model.generate("Hi")
    assert (reply.text, reply.usage.completion_tokens) == ("caf\u00e9", 6)
    assert backend.open_sessions == 0


def test_recommended_sampling_is_the_default(tmp_path, backend):
    path = successor.write(tmp_path / "m", ["Hi"])
    with bonsai.load(path, backend=backend) as model:
        assert model.sampling == Sampling.greedy()
    manifest = json.loads((path / "manifest.json").read_text("utf-8"))
    manifest["sampling"] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with bonsai.load(path, backend=backend) as model:
        assert model.sampling == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    manifest["sampling"] = {"top_p": 1.5}
    (path / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(bonsai.BonsaiError, match="top_p"):
        bonsai.load(path, backend=backend)


def test_load_refuses_before_it_reads(tmp_path):
    with pytest.raises(bonsai.ModelNotFound):
        bonsai.load(tmp_path / "nothing", backend="reference")
    with pytest.raises(bonsai.BackendUnavailable, match="nonsense"):
        bonsai.load(tmp_path / "nothing", backend="nonsense")
    for nothing in (None, 3, object()):
        with pytest.raises(
            bonsai.InvalidRequest, match=r"backend is .*, expected a name"
        ) as caught:
            bonsai.load(tmp_path / "nothing", backend=nothing)
        assert caught.value.hint.startswith("auto, ")
    with pytest.raises(bonsai.InvalidRequest, match="max_context is 0"):
        bonsai.load(tmp_path / "nothing", max_context=0)
    path = successor.write(tmp_path / "m", Successor(["Hi"], context=100))
    with pytest.raises(bonsai.InvalidRequest, match=r"200.*100"):
        bonsai.load(path, backend="reference", max_context=200)
