"""Reasoning and answer in a stream of text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonsai.thinking import Markers, Splitter

THINK = Markers("<think>", "</think>")


def split(pieces, markers=THINK, opened=False):
    splitter = Splitter(markers, opened)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


CASES = [
    (False, "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
    (False, "\n <think>hm</think>yes", ("hm", "yes")),
    (False, "yes", ("", "yes")),
    (False, "  yes\n", ("", "  yes\n")),
    (False, "<thin", ("", "<thin")),
    (False, "<thinker>", ("", "<thinker>")),
    (False, "say <think>hm</think>", ("", "say <think>hm</think>")),
    (False, "<think></think>yes", ("", "yes")),
    (False, "<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d")),
    (False, "<think>hm", ("hm", "")),
    (False, "<think> hm \n", ("hm", "")),
    (False, "<think>hm</thi", ("hm</thi", "")),
    (False, "</think>yes", ("", "</think>yes")),
    (False, " \n", ("", " \n")),
    (True, "hm\n</think>\n\nyes", ("hm", "yes")),
    (True, "<think>\nhm</think>yes", ("hm", "yes")),
    (True, "</think>yes", ("", "yes")),
    (True, "hm", ("hm", "")),
    (True, "a </ b </think </think>c", ("a </ b </think", "c")),
    (True, "a\n\nb \n</think>c ", ("a\n\nb", "c ")),
    (True, "<<</</think>", ("<<</", "")),
    (True, "", ("", "")),
    (True, "<thi", ("<thi", "")),
]


@pytest.mark.parametrize(("opened", "text", "parts"), CASES)
def test_reasoning_comes_before_the_answer(opened, text, parts):
    assert split([text], opened=opened) == parts
    assert split(list(text), opened=opened) == parts


@given(st.text("<think>/ \na", max_size=40), st.booleans(), st.data())
def test_result_does_not_depend_on_the_pieces(text, opened, data):
    text = text.replace("a", data.draw(st.sampled_from(["a", "<think>", "</think>"])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, opened=opened) == split([text], opened=opened)


def test_without_markers_everything_is_answer_at_once():
    splitter = Splitter(None, opened=True)
    assert not splitter.thinking
    assert splitter.push("<think>") == ("", "<think>")
    assert splitter.push("") == splitter.flush() == ("", "")


def test_only_what_may_be_a_marker_is_held_back():
    splitter = Splitter(THINK, opened=True)
    assert splitter.push("a b") == ("a b", "")
    assert splitter.push(" </thin") == ("", "")
    assert splitter.push("g>") == (" </thing>", "")
    assert splitter.push("</think>\n") == ("", "")
    assert splitter.push(" c") == ("", "c")
    assert splitter.push("</think>") == ("", "</think>")


def test_thinking_says_what_text_would_be_now():
    splitter = Splitter(THINK)
    assert not splitter.thinking
    splitter.push("<think>")
    assert splitter.thinking
    splitter.push("hm</think>")
    assert not splitter.thinking
    assert Splitter(THINK, opened=True).thinking


def test_reasoning_can_be_ended_early():
    splitter = Splitter(THINK, opened=True)
    assert splitter.push("hm </th") == ("hm", "")
    assert splitter.end() == " </th"
    assert not splitter.thinking
    assert splitter.push("\n\nyes") == ("", "yes")
    assert splitter.flush() == ("", "")
