"""Replies: text, ends, limits and errors, on a backend that says what it is told."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from contextlib import closing

import pytest

from bonsai.errors import ContextOverflow, FormatError, InvalidRequest, NumericError
from bonsai.generate import DEFAULT_CONTEXT, Model
from bonsai.sampling import Sampling
from bonsai.testing import END, ScriptedBackend, model


def said(*pieces, prompt="Hi", **options):
    """The chunks' texts and the completion of a reply made of these pieces."""
    stream = model(ScriptedBackend(list(pieces))).stream(prompt, **options)
    texts = [chunk.text for chunk in stream]
    again = model(ScriptedBackend(list(pieces))).generate(prompt, **options)
    assert "".join(texts) == stream.completion.text == again.text
    assert stream.completion.finish_reason == again.finish_reason
    assert "" not in texts
    return texts, stream.completion


def test_reply_is_its_text():
    texts, reply = said("Hello", " world")
    assert texts == ["Hello", " world"]
    assert str(reply) == reply.text == "Hello world"
    assert reply.finish_reason == "stop"
    assert reply.tokens == (257, 258, END)


def test_results_are_frozen_and_hold_what_they_say():
    reply = said("a", "b", prompt="Hi")[1]
    prompt = len("user: Hi\nassistant: ")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, 3)
    assert reply.usage.cached_tokens == 0
    assert reply.timings.prefill_s > 0 and reply.timings.decode_s > 0
    assert reply.timings.prefill_tps == pytest.approx(prompt / reply.timings.prefill_s)
    assert reply.timings.decode_tps == pytest.approx(2 / reply.timings.decode_s)
    for result in (reply, reply.usage, reply.timings):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, dataclasses.fields(result)[0].name, 1)
    assert "completion_tokens=3" in repr(reply)


def test_chunks_carry_the_ids_since_the_last_one():
    stream = model(ScriptedBackend([b"\xf0\x9f", b"\x98\x80", "x"])).stream("Hi")
    assert [(c.text, c.tokens) for c in stream] == [("\U0001f600", (257, 258)), ("x", (259,))]


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["\U0001f600"]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["\U0001f600"]),
        ([b"\xe2", "(", "A"], ["\ufffd(", "A"]),
        ([b"\x9c"], ["\ufffd"]),
        (["a", b"\xf0\x9f\x98"], ["a", "\ufffd"]),
    ],
)
def test_split_and_invalid_characters(pieces, texts):
    assert said(*pieces)[0] == texts


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (["ab", "cE", "ND", "x"], "END", "abc", "stop"),
        (["ab", "cE", "ND"], "ENDING", "abcEND", "stop"),
        (["aaab"], "aab", "a", "stop"),
        (["a", "a", "a", "b"], ["aab"], "a", "stop"),
        (["x", "END", "ING"], ["ENDING", "END"], "x", "stop"),
        (["END"], "END", "", "stop"),
        (["ab"], [""], "ab", "stop"),
        (["ab"], "", "ab", "stop"),
        (["ab"], None, "ab", "stop"),
        (["abcdef"], ["v", "w", "x", "f", "e"], "abcd", "stop"),
        (["a", b"\xc3", b"\xa9", "b"], "\u00e9", "a", "stop"),
        (["a", b"\xf0\x9f", b"\x98\x80", "b"], "\U0001f600b", "a", "stop"),
        (["a", b"\xf0\x9f"], "\ufffd", "a", "stop"),
    ],
)
def test_stop_strings(pieces, stop, text, reason):
    reply = said(*pieces, stop=stop)[1]
    assert (reply.text, reply.finish_reason) == (text, reason)


def test_stop_string_ends_the_work_before_the_last_chunk_comes():
    backend = ScriptedBackend(["a", "bEND", "x", "y"])
    stream = model(backend).stream("Hi", stop="END")
    assert [c.text for c in stream] == ["a", "b"]
    assert backend.steps == 2
    assert stream.completion.usage.completion_tokens == 2


def test_max_tokens_is_a_length_finish():
    texts, reply = said("a", "b", "c", max_tokens=2)
    assert (texts, reply.finish_reason, len(reply.tokens)) == (["a", "b"], "length", 2)


def test_held_back_text_is_flushed_at_max_tokens():
    reply = said("a", "E", "N", "D", max_tokens=3, stop="END")[1]
    assert (reply.text, reply.finish_reason) == ("aEN", "length")


def test_end_marker_at_the_limit_is_a_stop():
    assert said("a", max_tokens=2)[1].finish_reason == "stop"
    assert said("aX", max_tokens=1, stop="X")[1].finish_reason == "stop"


def test_half_a_character_at_max_tokens_is_flushed_once():
    assert said("a", b"\xf0", b"\x9f", b"\x98", b"\x80", max_tokens=3)[0] == ["a", "\ufffd"]


def test_full_context_is_a_length_finish():
    prompt = len("user: Hi\nassistant: ")
    reply = model(ScriptedBackend(["a"], ends=False), max_context=prompt + 5).generate("Hi")
    assert (reply.text, reply.finish_reason) == ("aaaaa", "length")
    more = model(ScriptedBackend(["a"], ends=False), max_context=prompt + 5)
    assert more.generate("Hi", max_tokens=10**9).text == "aaaaa"


def test_prompt_that_does_not_fit_is_refused_before_any_work():
    backend = ScriptedBackend(["a"], context=100_000)
    small = model(backend, max_context=100)
    for size in (80, 81, 1000):
        if len("user: \nassistant: ") + size < 100:
            small.stream("x" * size)
            continue
        with pytest.raises(ContextOverflow) as caught:
            small.stream("x" * size)
        assert f"{size + 18:,} tokens, max_context is 100" in str(caught.value)
        assert "--max-context" in caught.value.hint
    assert (backend.prompts, backend.steps, backend.open_sessions) == ([], 0, 0)


def test_hint_says_when_no_setting_helps():
    with pytest.raises(ContextOverflow) as caught:
        model(ScriptedBackend(["a"], context=50)).generate("x" * 60)
    assert "made for 50 tokens" in caught.value.hint
    assert "--max-context" not in caught.value.hint


def test_max_context_defaults_to_what_the_model_can_and_is_bounded():
    assert model(ScriptedBackend(["a"], context=500)).max_context == 500
    assert model(ScriptedBackend(["a"], context=10**6)).max_context == DEFAULT_CONTEXT
    assert model(ScriptedBackend(["a"], context=10**6), max_context=10**5).max_context == 10**5
    with pytest.raises(InvalidRequest, match=r"600.*500"):
        model(ScriptedBackend(["a"], context=500), max_context=600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop": 5}, "stop is 5"),
        ({"sampling": {"temperature": 1}}, "sampling is"),
        ({"system": 5}, "system is int"),
        ({"raw": True, "system": "x"}, "raw prompt"),
        ({"raw": True, "think": False}, "raw prompt"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    backend = ScriptedBackend(["a"])
    with pytest.raises(InvalidRequest, match=message):
        model(backend).stream("Hi", **options)
    assert backend.prompts == []


@pytest.mark.parametrize("prompt", [None, 5, b"Hi", [], ["Hi"], {"role": "user"}])
def test_bad_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest):
        model(ScriptedBackend(["a"])).generate(prompt)


def test_prompt_forms():
    backend = ScriptedBackend(["a"])
    m = model(backend)
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Brief."}
    m.generate("Hi", system="Brief.")
    m.generate([system, user])
    m.generate([user], system="Brief.")
    m.generate("system: Brief.\nuser: Hi\nassistant: ", raw=True)
    assert len({tuple(p) for p in backend.prompts}) == 1
    with pytest.raises(InvalidRequest, match="two system messages"):
        m.generate([system, user], system="Brief.")
    with pytest.raises(InvalidRequest, match="raw prompt is list"):
        m.generate([user], raw=True)
    with pytest.raises(InvalidRequest, match="empty"):
        m.generate("", raw=True)


def test_model_without_template_says_how_to_go_on():
    m = model(ScriptedBackend(["a"]))
    m.tokenizer.has_chat_template = False
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        m.generate("Hi")
    assert "--raw" in caught.value.hint
    assert m.generate("Hi", raw=True).text == "a"


def test_sampling_defaults_to_the_models():
    backend = ScriptedBackend(["a"])
    warm = Sampling(temperature=0.7, top_p=0.95)
    model(backend, sampling=warm).generate("Hi")
    model(backend).generate("Hi")
    model(backend, sampling=warm).generate("Hi", sampling=Sampling(seed=3))
    assert backend.samplings == [warm, Sampling.greedy(), Sampling(seed=3)]


def test_closing_a_stream_stops_the_work():
    backend = ScriptedBackend(["a", "b"], ends=False)
    stream = model(backend).stream("Hi")
    assert [next(stream).text for _ in range(3)] == ["a", "b", "a"]
    stream.close()
    assert backend.steps == 3
    assert list(stream) == []
    reply = stream.completion
    assert (reply.text, reply.finish_reason, reply.usage.completion_tokens) == (
        "aba",
        "cancelled",
        3,
    )
    stream.close()


def test_dropping_a_stream_or_leaving_its_block_stops_the_work():
    backend = ScriptedBackend(["a"], ends=False)
    m = model(backend)
    for chunk in m.stream("Hi"):
        assert chunk.text == "a"
        break
    with m.stream("Hi") as stream:
        next(stream)
    assert backend.steps == 2
    assert stream.completion.finish_reason == "cancelled"
    m.close()
    assert backend.open_sessions == 0


def test_stream_that_never_started_does_nothing():
    backend = ScriptedBackend(["a"])
    stream = model(backend).stream("Hi")
    with pytest.raises(InvalidRequest, match="not ended"):
        stream.completion  # noqa: B018
    stream.close()
    assert (backend.prompts, stream.completion.text) == ([], "")


def test_stream_can_be_cancelled_from_another_thread():
    backend = ScriptedBackend(["a"], ends=False, context=10**6)
    stream = model(backend, max_context=10**6).stream("Hi")
    reader = threading.Thread(target=lambda: [None for _ in stream])
    reader.start()
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    stream.close()
    assert stream.completion.finish_reason == "cancelled"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NumericError("logits are NaN")])
def test_error_in_the_middle_passes_and_its_session_is_not_used_again(error):
    backend = ScriptedBackend(["a", error, "b"], ["fine"])
    m = model(backend)
    stream = m.stream("Hi")
    assert next(stream).text == "a"
    with pytest.raises(type(error)):
        next(stream)
    assert backend.open_sessions == 0
    assert m.generate("Hi").text == "fine"
    if isinstance(error, KeyboardInterrupt):
        assert stream.completion.finish_reason == "cancelled"
    else:
        stream.close()
        with pytest.raises(InvalidRequest, match="failed"):
            stream.completion  # noqa: B018


def test_interrupt_leaves_generate_clean():
    backend = ScriptedBackend(["a", KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        model(backend).generate("Hi")
    assert backend.open_sessions == 0


def test_idle_session_is_used_again_and_forgets():
    backend = ScriptedBackend(["a"])
    m = model(backend)
    first, second = m.generate("Hi"), m.generate("Hi")
    assert backend.open_sessions == 1
    assert backend.prompts[0] == backend.prompts[1]
    assert first.usage == second.usage


def test_streams_run_side_by_side():
    backend = ScriptedBackend(["a", "b"], ends=False)
    m = model(backend)
    one, two = m.stream("Hi"), m.stream("Hi")
    assert [next(s).text for s in (one, two, one, one, two)] == ["a", "a", "b", "a", "b"]
    assert backend.open_sessions == 2
    one.close()
    two.close()
    assert backend.open_sessions == 1  # one is kept for the next reply


def test_streams_in_several_threads():
    backend = ScriptedBackend([*"abcdefgh"] * 8)
    m = model(backend)
    start, replies = threading.Barrier(4), []

    def work():
        start.wait(10)
        replies.extend(m.generate("Hi").text for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert replies == ["abcdefgh" * 8] * 40
    assert backend.open_sessions == 1
    assert backend.steps == 40 * 65


def test_closed_model_refuses_and_running_replies_end_first():
    backend = ScriptedBackend(["a", "b"])
    with model(backend) as m:
        stream = m.stream("Hi")
        next(stream)
    for call in (lambda: m.generate("Hi"), m.session, lambda: m.chat().send("Hi")):
        with pytest.raises(InvalidRequest, match="was closed"):
            call()
    assert [c.text for c in stream] == ["b"]
    assert backend.open_sessions == 0


def test_closing_a_model_frees_the_weights():
    m = model(ScriptedBackend(["a"]))
    m.generate("Hi")
    engine = weakref.ref(m.engine)
    m.close()
    gc.collect()
    assert engine() is None
    assert "scripted" in repr(m)
    m.close()


def test_session_is_ids_in_ids_out():
    backend = ScriptedBackend(["Hello", " world"])
    m = model(backend)
    with m.session() as session:
        session.prefill(m.tokenizer.encode("Hi"))
        with closing(session.decode(Sampling.greedy())) as ids:
            assert m.tokenizer.decode([next(ids), next(ids)]) == "Hello world"
        assert list(session.tokens) == [*b"Hi", 257, 258]
    assert backend.open_sessions == 0


def test_progress_of_the_prefill_is_reported():
    seen = []
    model(ScriptedBackend(["a"])).generate("Hi", progress=lambda *step: seen.append(step))
    assert seen == [("prefill", 20, 20)]


def test_prompt_id_that_the_model_lacks_is_named():
    backend = ScriptedBackend(["a"])
    m = model(backend)
    small = Model(backend.engine([[1]], END, 100), m.tokenizer)
    with pytest.raises(FormatError, match="token id 257, the model has ids below 100"):
        small.generate("Hi")


def test_model_says_what_it_is():
    assert repr(model(ScriptedBackend(["a"]))) == (
        "Model('scripted', 'scripted: no weights', max_context=4096)"
    )


@pytest.mark.parametrize("pieces", [(), ("Hello",), ([""],), ([b""],), ([5],), ([None],)])
def test_scripted_backend_refuses_what_is_no_script(pieces):
    with pytest.raises(InvalidRequest):
        ScriptedBackend(*pieces)
