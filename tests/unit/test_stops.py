"""Stop strings: what is shown, what waits, and that it does not matter how the text was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai.errors import InvalidRequest
from bonsai.stops import StopStrings, read_stops


def shown(pieces, *stops):
    """What comes out for each piece, and at the end."""
    rule = StopStrings(stops)
    return [rule.push(p) for p in pieces] + [rule.flush()]


def plain(text, stops):
    """The text up to the stop string that is completed first, found by looking at every prefix."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(found)], True
    return text, False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("END", ("END",)),
        ("", ()),
        ([], ()),
        ([""], ()),
        (["a", "", "b", "a"], ("a", "b")),
        (("a", "b", "c", "d", "e"), ("a", "b", "c", "d", "e")),
    ],
)
def test_forms_of_stop(given, expected):
    assert read_stops(given) == expected


@pytest.mark.parametrize("wrong", [5, b"END", ["a", 5], [None], {"a": 1}, [["a"]]])
def test_other_forms_are_refused(wrong):
    with pytest.raises(InvalidRequest, match=r"stop is .* expected a string, a list"):
        read_stops(wrong)


def test_without_stops_everything_passes_at_once():
    assert shown(["a", "bc"]) == ["a", "bc", ""]


def test_stop_across_pieces_is_found_and_left_out():
    assert shown(["ab", "cE", "ND", "x"], "END") == ["ab", "c", "", "", ""]


def test_partial_stop_is_flushed_at_the_end():
    assert shown(["ab", "cE", "ND"], "ENDING") == ["ab", "c", "", "END"]


def test_hold_back_is_released_when_it_cannot_match():
    assert shown(["aE", "N", "?", "E"], "END") == ["a", "", "EN?", "", "E"]


def test_overlapping_beginning():
    assert shown(["a", "a", "a", "b", "c"], "aab") == ["", "", "a", "", "", ""]
    assert shown(["aaab"], "aab") == ["a", ""]
    assert shown(["abababac"], "ababac") == ["ab", ""]


@pytest.mark.parametrize("order", [("END", "ENDING"), ("ENDING", "END")])
def test_of_two_stops_the_one_completed_first_counts(order):
    assert shown(["x", "ENDING"], *order) == ["x", "", ""]
    assert shown(["x", "E", "N", "D", "ING"], *order) == ["x", "", "", "", "", ""]


def test_of_two_that_end_together_the_longer_counts():
    assert shown(["abcd"], "cd", "bcd") == ["a", ""]


def test_stop_at_character_zero():
    assert shown(["ENDx"], "END") == ["", ""]
    assert shown(["", "E"], "E") == ["", "", ""]


def test_nothing_comes_after_the_match():
    rule = StopStrings(["b"])
    assert rule.push("abc") == "a" and rule.matched
    assert rule.push("abc") == "" and rule.flush() == ""


def test_long_hold_back_takes_linear_time():
    rule = StopStrings(["a" * 100_000 + "b"])
    for _ in range(50):
        rule.push("a" * 10_000)
    assert len(rule.flush()) == 100_000


TEXT = st.text("aAb\u00e9\U0001f600", max_size=30)
STOPS = st.lists(st.text("aAb\u00e9\U0001f600", min_size=1, max_size=5), max_size=4)


@settings(deadline=None, max_examples=300)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_result_does_not_depend_on_the_pieces(text, stops, cuts):
    edges = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    expected, found = plain(text, stops)
    rule = StopStrings(stops)
    parts = [rule.push(p) for p in pieces]
    assert "".join(parts) + rule.flush() == expected
    assert rule.matched == found


@settings(deadline=None, max_examples=200)
@given(TEXT, STOPS)
def test_only_what_can_still_become_a_stop_is_held(text, stops):
    rule = StopStrings(stops)
    out = "".join(rule.push(c) for c in text)
    if not rule.matched:
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held) for s in stops)
        longer = [text[i:] for i in range(len(out))]
        assert not any(s.startswith(t) for s in stops for t in longer)
