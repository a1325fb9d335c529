"""Replies of models that think first: reasoning never becomes answer, however it comes."""

from __future__ import annotations

import pytest

from bonsai.errors import InvalidRequest
from bonsai.testing import ScriptedBackend, model

THOUGHT = ["<think>\n", "hm", "m", "\n</think>", "\n\n", "Yes", "."]
SPLIT = ["<th", "ink>\n", "hm", "m", "\n</", "thi", "nk>", "\n\nYes", "."]
OPENED = ["hm", "m", "\n</think>\n", "\nYes", "."]
BYTES = [b"<think>h", b"\xc3", b"\xa9", b"</think>", b"\xc3", b"\xa8"]


def reply(pieces, thinks="reply", **options):
    """Chunks and the completion; generate gives the same."""
    backend = ScriptedBackend(pieces)
    m = model(backend, thinks=thinks)
    stream = m.stream("Ok?", **options)
    chunks = list(stream)
    done = stream.completion
    again = m.generate("Ok?", **options)
    assert (again.text, again.reasoning, again.tokens) == (done.text, done.reasoning, done.tokens)
    assert all(bool(chunk.text) != bool(chunk.reasoning) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == done.text == str(done)
    assert "".join(chunk.reasoning for chunk in chunks) == done.reasoning
    return chunks, done


@pytest.mark.parametrize(
    ("pieces", "thinks"),
    [(THOUGHT, "reply"), (SPLIT, "reply"), (OPENED, "prompt"), (THOUGHT, "prompt")],
)
def test_reasoning_is_apart_from_the_answer(pieces, thinks):
    chunks, done = reply(pieces, thinks)
    assert (done.reasoning, done.text, done.finish_reason) == ("hmm", "Yes.", "stop")
    assert [chunk.reasoning for chunk in chunks][:2] == ["hm", "m"]
    assert done.usage.completion_tokens == len(pieces) + 1


def test_characters_split_over_tokens():
    assert [(c.reasoning, c.text) for c in reply(BYTES)[0]] == [
        ("h", ""),
        ("\xe9", ""),
        ("", "\xe8"),
    ]


def test_one_piece_may_end_reasoning_and_begin_the_answer():
    chunks, done = reply(["<think>", "a</think>b", "c"])
    assert [(c.reasoning, c.text) for c in chunks] == [("a", ""), ("", "b"), ("", "c")]
    # Every id is in a chunk up to the last text; the end marker has none.
    assert sum((c.tokens for c in chunks), ()) == done.tokens[:-1]


def test_a_model_that_does_not_think_this_time():
    assert reply(["Yes", "."])[1].reasoning == ""
    assert reply(["Yes: ", "<think>", "x", "</think>"])[1].text == "Yes: <think>x</think>"


def test_markers_mean_nothing_to_models_without_them():
    done = reply(THOUGHT, thinks=None)[1]
    assert (done.text, done.reasoning) == ("".join(THOUGHT), "")
    assert done.usage.reasoning_tokens == 0


def test_raw_text_is_not_taken_apart():
    done = reply(THOUGHT, raw=True)[1]
    assert (done.text, done.reasoning) == ("".join(THOUGHT), "")


@pytest.mark.parametrize(("limit", "reasoning"), [(1, ""), (2, "hm"), (3, "hmm"), (5, "hmm")])
def test_a_limit_inside_of_the_reasoning_is_a_length_finish(limit, reasoning):
    done = reply(THOUGHT, max_tokens=limit)[1]
    assert (done.text, done.reasoning, done.finish_reason) == ("", reasoning, "length")


def test_the_end_of_the_text_inside_of_the_reasoning():
    done = reply(["<think>", "hm", "</th"])[1]
    assert (done.text, done.reasoning, done.finish_reason) == ("", "hm</th", "stop")


def test_stop_strings_are_looked_for_in_the_answer_only():
    done = reply(["<think>", "a END b", "</think>", "c E", "ND d"], stop="END")[1]
    assert (done.reasoning, done.text, done.finish_reason) == ("a END b", "c ", "stop")
    # Nor can one begin in the reasoning and end in the answer.
    assert reply(["<think>", "a E", "</think>", "ND d"], stop="END")[1].text == "ND d"
    assert reply(["<think>a</think>", "\n\nb"], stop="\n\n")[1].text == "b"


def test_thinking_off_is_the_templates_switch():
    backend = ScriptedBackend(["Yes."])
    m = model(backend, thinks="prompt")
    done = m.generate("Ok?", think=False)
    assert m.tokenizer.decode(backend.prompts[-1]).endswith("<think>\n\n</think>\n\n")
    assert (done.text, done.reasoning) == ("Yes.", "")


def test_effort_is_a_variable_of_the_template():
    backend = ScriptedBackend(["Yes."])
    m = model(backend, thinks="reply")
    for given in (
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
    ):
        m.generate("Ok?", **given)
        assert m.tokenizer.decode(backend.prompts[-1]).startswith("effort: low\nuser: Ok?")
    with pytest.raises(InvalidRequest, match="drop one"):
        m.generate("Ok?", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    with pytest.raises(InvalidRequest, match="reasoning_effort is 3"):
        m.generate("Ok?", reasoning_effort=3)
    with pytest.raises(InvalidRequest, match="no variable 'reasoning_effort'"):
        model(backend).generate("Ok?", reasoning_effort="low")


@pytest.mark.parametrize(
    "given",
    [
        {"think": True},
        {"reasoning_effort": "low"},
        {"max_thinking": 3},
        {"chat_template_kwargs": {}},
    ],
)
def test_raw_has_no_thinking(given):
    with pytest.raises(InvalidRequest, match="raw prompt"):
        model(ScriptedBackend(["x"]), thinks="reply").generate("Ok?", raw=True, **given)


# ---- a budget ------------------------------------------------------------------------------------


def budget(limit, pieces=("hm ",), answer=("Yes", "."), **options):
    """A model that thinks with `pieces` for ever, and answers once its thinking is ended."""
    backend = ScriptedBackend(list(pieces) * 50, list(answer))
    m = model(backend, thinks=options.pop("thinks", "prompt"))
    return backend, m, m.generate("Ok?", max_thinking=limit, **options)


def test_a_budget_ends_the_reasoning_and_lets_the_model_answer():
    backend, m, done = budget(3)
    assert (done.reasoning, done.text, done.finish_reason) == ("hm hm hm", "Yes.", "stop")
    assert done.usage.reasoning_tokens == 3
    assert m.tokenizer.decode(backend.prompts[-1]) == "\n</think>\n\n"
    closing = len(backend.prompts[-1])
    assert done.usage.completion_tokens == 3 + closing + 3
    assert m.tokenizer.decode(done.tokens) == "hm hm hm \n</think>\n\nYes."
    assert backend.open_sessions == 1  # kept for the next reply


def test_a_budget_of_nothing_is_an_answer_at_once():
    done = reply(["Yes", "."], "prompt", max_thinking=0)[1]
    assert (done.reasoning, done.text, done.usage.reasoning_tokens) == ("", "Yes.", 0)
    done = budget(0, pieces=("<think>", "hm"), thinks="reply")[2]
    assert (done.reasoning, done.text, done.usage.reasoning_tokens) == ("", "Yes.", 1)


def test_a_budget_in_the_middle_of_a_marker_or_a_character():
    done = budget(2, pieces=("hm", "</th", "x"))[2]
    assert (done.reasoning, done.text) == ("hm</th", "Yes.")
    done = budget(1, pieces=(b"a\xc3", b"\xa9"), answer=(b"\xa9", "b"))[2]
    assert (done.reasoning, done.text) == ("a\ufffd", "\ufffdb")


def test_a_budget_that_is_not_used_up_changes_nothing():
    done = reply(OPENED, "prompt", max_thinking=9)[1]
    assert (done.reasoning, done.text) == ("hmm", "Yes.")
    assert done.tokens == reply(OPENED, "prompt")[1].tokens


def test_the_longest_reply_counts_what_a_budget_adds():
    for limit in range(1, 20):
        done = budget(3, max_tokens=limit)[2]
        assert len(done.tokens) <= limit
        assert done.finish_reason == ("stop" if limit >= 17 else "length")
    short = model(ScriptedBackend(["hm "] * 50), thinks="prompt", max_context=40)
    done = short.generate("Ok?", max_thinking=2)
    assert (done.text, done.finish_reason) == ("", "length")


def test_a_budget_needs_a_number():
    for wrong in (-1, True, "3", 1.5):
        with pytest.raises(InvalidRequest, match=r"max_thinking is .*0 or more"):
            budget(wrong)
    plain = model(ScriptedBackend(["Yes."]))
    assert plain.generate("Ok?", max_thinking=0).text == "Yes."  # nothing to end


def test_a_cancelled_reply_is_not_given_an_end_of_its_reasoning():
    backend = ScriptedBackend(["hm "] * 9, ["Yes"])
    stream = model(backend, thinks="prompt").stream("Ok?", max_thinking=2)
    next(stream)
    stream.close()
    assert stream.completion.finish_reason == "cancelled"
    assert (stream.completion.reasoning, len(backend.prompts)) == ("hm", 1)


# ---- conversations -------------------------------------------------------------------------------


def test_a_chat_keeps_reasoning_apart_in_its_messages():
    backend = ScriptedBackend(THOUGHT, ["No."])
    m = model(backend, thinks="reply")
    chat = m.chat()
    first = chat.send("Ok?")
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hmm",
    }
    second = chat.send("Sure?", max_thinking=5, reasoning_effort=None)
    whole = m.tokenizer.encode_chat(chat.messages[:3])
    assert m.tokenizer.decode(whole).count("hmm") == 0  # this template leaves it out
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert second.usage.prompt_tokens == len(whole)
    assert chat.messages[-1] == {"role": "assistant", "content": "No."}


def test_a_turn_cancelled_while_it_thinks_keeps_nothing():
    chat = model(ScriptedBackend(THOUGHT), thinks="reply").chat()
    stream = chat.stream("Ok?")
    assert next(stream).reasoning == "hm"
    stream.close()
    assert chat.messages == []
    assert chat.send("Ok?", max_tokens=2).finish_reason == "length"
    assert chat.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
