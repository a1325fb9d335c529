"""Conversations: what is computed again, and that messages stay consistent whatever happens."""

from __future__ import annotations

import pytest

from bonsai.errors import ContextOverflow, InvalidRequest, NumericError
from bonsai.testing import ScriptedBackend, model

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def rendered(m, chat, text):
    """The ids of the prompt of a turn that says `text`."""
    return m.tokenizer.encode_chat([*chat.messages, user(text)])


def test_turns_are_remembered():
    backend = ScriptedBackend(["A tree", "."], ["Old."])
    m = model(backend)
    chat = m.chat(system="Be brief.")
    assert str(chat.send("What is a bonsai?")) == "A tree."
    assert "".join(c.text for c in chat.stream("How old?")) == "Old."
    assert chat.messages == [
        SYSTEM,
        user("What is a bonsai?"),
        assistant("A tree."),
        user("How old?"),
        assistant("Old."),
    ]
    assert all(type(m) is dict and list(m) == ["role", "content"] for m in chat.messages)


def test_only_new_tokens_are_computed():
    backend = ScriptedBackend(["A tree", "."])
    m = model(backend)
    chat = m.chat()
    first = chat.send("What?")
    whole = rendered(m, chat, "And?")
    second = chat.send("And?")
    held = first.usage.prompt_tokens + 2  # the end marker is not in the template's history
    assert second.usage.prompt_tokens == len(whole)
    assert second.usage.cached_tokens == held
    assert backend.prompts[1] == whole[held:]
    assert backend.open_sessions == 1


def test_history_that_renders_differently_is_computed_again_from_there():
    backend = ScriptedBackend(["<think>hm</think>", "yes"])
    m = model(backend)
    chat = m.chat()
    prompt = chat.send("Ok?").usage.prompt_tokens
    chat.messages[-1]["content"] = "yes"
    whole = rendered(m, chat, "Sure?")
    usage = chat.send("Sure?").usage
    assert usage.cached_tokens == prompt
    assert backend.prompts[1] == whole[prompt:]


def test_same_prompt_again_computes_at_least_one_token():
    backend = ScriptedBackend(["a"])
    m = model(backend)
    chat = m.chat()
    first = chat.send("Hi")
    chat.reset()
    again = chat.send("Hi")
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1
    assert len(backend.prompts[1]) == 1
    assert again.text == first.text


def test_cancelled_turn_keeps_what_was_delivered():
    backend = ScriptedBackend(["a", "b", "c"])
    m = model(backend)
    chat = m.chat()
    with chat.stream("Hi") as stream:
        next(stream)
        next(stream)
    assert chat.messages == [user("Hi"), assistant("ab")]
    assert stream.completion.finish_reason == "cancelled"
    whole = rendered(m, chat, "Go on")
    usage = chat.send("Go on").usage
    assert usage.cached_tokens == stream.completion.usage.prompt_tokens + 2
    assert usage.prompt_tokens == len(whole)


def test_turn_cancelled_before_any_text_keeps_nothing():
    backend = ScriptedBackend([b"\xf0", b"\x9f", "x"])
    chat = model(backend).chat()
    chat.stream("Hi").close()
    assert (chat.messages, backend.prompts) == ([], [])


def test_dropped_stream_is_a_cancelled_turn():
    chat = model(ScriptedBackend(["a", "b"])).chat()
    for chunk in chat.stream("Hi"):
        assert chunk.text == "a"
        break
    assert chat.messages == [user("Hi"), assistant("a")]


def test_next_turn_closes_a_stream_that_still_runs():
    chat = model(ScriptedBackend(["a", "b"], ["c"])).chat()
    stream = chat.stream("Hi")
    next(stream)
    assert chat.send("Ho").text == "c"
    assert list(stream) == []
    assert chat.messages == [user("Hi"), assistant("a"), user("Ho"), assistant("c")]


def test_failed_turn_changes_nothing():
    backend = ScriptedBackend(["fine"], ["a", NumericError("NaN")], ["again"])
    chat = model(backend).chat()
    chat.send("Hi")
    before = [dict(m) for m in chat.messages]
    with pytest.raises(NumericError):
        chat.send("Ho")
    assert chat.messages == before
    assert backend.open_sessions == 0
    assert chat.send("Ho").text == "again"
    assert chat.messages == [*before, user("Ho"), assistant("again")]


def test_interrupted_turn_keeps_the_part_that_came():
    backend = ScriptedBackend(["a", KeyboardInterrupt()], [KeyboardInterrupt()], ["c"])
    chat = model(backend).chat()
    with pytest.raises(KeyboardInterrupt):
        chat.send("Hi")
    assert chat.messages == [user("Hi"), assistant("a")]
    with pytest.raises(KeyboardInterrupt):
        chat.send("Ho")
    assert chat.messages == [user("Hi"), assistant("a")]
    assert chat.send("Ho").text == "c"


def test_empty_reply_is_still_a_turn():
    chat = model(ScriptedBackend([])).chat()
    assert chat.send("Hi").finish_reason == "stop"
    assert chat.messages == [user("Hi"), assistant("")]


def test_stop_string_and_limit_shape_the_history():
    chat = model(ScriptedBackend(["abEND", "x"])).chat()
    assert chat.send("Hi", stop="END").text == "ab"
    assert chat.send("Ho", max_tokens=1).finish_reason == "length"
    assert [m["content"] for m in chat.messages] == ["Hi", "ab", "Ho", "abEND"]


def test_conversation_that_outgrows_the_context_says_what_to_do():
    backend = ScriptedBackend(["a" * 10], context=10_000)
    chat = model(backend, max_context=100).chat(system="Be brief.")
    chat.send("x" * 20)
    before = [dict(m) for m in chat.messages]
    work = len(backend.prompts)
    with pytest.raises(ContextOverflow, match="max_context is 100") as caught:
        chat.send("y" * 30)
    assert caught.value.hint.startswith("/reset (in Python: reset(), ")
    assert "max_context" in caught.value.hint
    assert chat.messages == before and len(backend.prompts) == work
    chat.reset()
    assert chat.messages == [SYSTEM]
    assert chat.send("y" * 30).text == "a" * 10


def test_bad_turn_is_refused_and_changes_nothing():
    chat = model(ScriptedBackend(["a"])).chat()
    for call in (lambda: chat.send(5), lambda: chat.send("Hi", max_tokens=0)):
        with pytest.raises(InvalidRequest):
            call()
    assert chat.messages == []
    with pytest.raises(InvalidRequest, match="system is int"):
        model(ScriptedBackend(["a"])).chat(system=5)


def test_closing_a_chat_frees_its_session():
    backend = ScriptedBackend(["a"])
    with model(backend).chat() as chat:
        chat.send("Hi")
        assert backend.open_sessions == 1
    assert backend.open_sessions == 0
    assert chat.send("Ho").usage.cached_tokens == 0
    assert len(chat.messages) == 4


def test_chats_of_one_model_do_not_share_history():
    backend = ScriptedBackend(["a"])
    m = model(backend)
    one, two = m.chat(), m.chat(system="Be brief.")
    one.send("Hi")
    two.send("Ho")
    assert one.messages[0] == user("Hi") and two.messages[0] == SYSTEM
    assert backend.open_sessions == 2
