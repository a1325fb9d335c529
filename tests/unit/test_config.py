"""Strict reading of untrusted objects, and the rotary frequencies."""

from __future__ import annotations

import math

import pytest

from bonsai.config import Fields, RopeSpec, Yarn, read_rope
from bonsai.errors import UnsupportedModel


def test_values_are_taken_with_their_types() -> None:
    fields = Fields({"n": 3, "x": 2, "s": "a", "b": True, "o": {"k": 1}, "none": None}, "c")
    assert fields.take(int, "n") == 3
    x = fields.take(float, "x")
    assert x == 2.0 and isinstance(x, float)
    assert fields.take(str, "s") == "a" and fields.take(bool, "b") is True
    inner = fields.take_object("o")
    assert inner is not None and inner.where == "c: o" and inner.take(int, "k") == 1
    assert fields.take_object("none") is None and fields.take_object("absent") is None
    assert fields.take(int, "absent", 7) == 7
    fields.finish()
    inner.finish()


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'k' is inf, expected a finite number"):
        Fields({"k": 10**400}, "c").take(float, "k")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (True, int, "'k' is True, expected int"),
        (1, bool, "'k' is 1, expected bool"),
        ("1", int, "'k' is '1', expected int"),
        (1.5, int, "'k' is 1.5, expected int"),
        (True, float, "'k' is True, expected float"),
        (math.inf, float, "expected a finite number"),
        (math.nan, float, "expected a finite number"),
        (None, str, "'k' is None, expected str"),
        ("x" * 500, int, "...,"),
    ],
)
def test_other_types_are_refused(value, kind, message) -> None:
    with pytest.raises(UnsupportedModel) as info:
        Fields({"k": value}, "config.json").take(kind, "k")
    assert "config.json: 'k'" in str(info.value) and message in str(info.value)
    assert len(str(info.value)) < 200


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"config.json: 'layers' is missing"):
        Fields({}, "config.json").take(int, "layers")


def test_leftover_keys_are_named() -> None:
    fields = Fields({"b": 1, "a": 2, "known": 3, "dropped": 4}, "config.json")
    fields.take(int, "known")
    fields.ignore("dropped", "absent")
    with pytest.raises(UnsupportedModel, match=r"config.json: unknown keys: a, b") as info:
        fields.finish()
    assert info.value.hint is not None


def test_only_accepted_values_are_accepted() -> None:
    Fields({"k": "silu"}, "c").require("k", "silu", "swish")
    Fields({}, "c").require("k", "silu")
    with pytest.raises(UnsupportedModel, match=r"c: 'k' is 'gelu'; supported: 'silu', 'swish'"):
        Fields({"k": "gelu"}, "c").require("k", "silu", "swish")


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**80])
def test_sizes_are_positive_and_bounded(value: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"'n' is {value}, expected 1 to"):
        Fields({"n": value}, "c").take_size("n")
    assert Fields({"n": 2**31 - 1}, "c").take_size("n") == 2**31 - 1


@pytest.mark.parametrize("value", [[], 3, "x", None])
def test_what_is_no_object_is_refused(value) -> None:
    with pytest.raises(UnsupportedModel, match="c: expected an object"):
        Fields(value, "c")


def test_plain_rope() -> None:
    spec = read_rope(Fields({"theta": 10000, "dims": 8}, "c: rope"), 16)
    assert spec == RopeSpec(10000.0, 8) and spec.amplitude == 1.0
    assert spec.frequencies() == pytest.approx([1, 0.1, 0.01, 0.001])


# Frequencies of Qwen3 heads (128 wide, base 1e6) with factor 4, from an independent computation.
YARN = {
    8192: {
        0: 1,
        1: 0.805842188,
        17: 0.0254829675,
        18: 0.0196292833,
        20: 0.0115702595,
        25: 0.00293220118,
        30: 0.000656733371,
        33: 0.000237012408,
        34: 0.000162345408,
        63: 3.1023444e-7,
    },
    16384: {
        18: 0.0205352503,
        20: 0.0133352143,
        21: 0.0102719866,
        25: 0.0035319696,
        30: 0.000860547176,
        36: 0.000124028383,
        37: 8.49552082e-5,
        63: 3.1023444e-7,
    },
}


@pytest.mark.parametrize("context", YARN)
def test_yarn_frequencies(context: int) -> None:
    scaling = {"factor": 4, "original_context": context, "attention_factor": 1.138629436}
    spec = read_rope(Fields({"theta": 1e6, "dims": 128, "yarn": scaling}, "c: rope"), 128)
    assert spec.yarn == Yarn(4.0, context, 32.0, 1.0, 1.138629436)
    assert spec.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    found = spec.frequencies()
    for pair, expected in YARN[context].items():
        assert found[pair] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"theta": 1e4, "dims": 7},
        {"theta": 1e4, "dims": 32},
        {"theta": 1.0, "dims": 8},
        {"theta": 1e4, "dims": 8, "scaling": {}},
        {
            "theta": 1e4,
            "dims": 8,
            "yarn": {"factor": 0, "original_context": 8, "attention_factor": 1},
        },
        {"theta": 1e4, "dims": 8, "yarn": {"factor": 2, "attention_factor": 1}},
        {
            "theta": 1e4,
            "dims": 8,
            "yarn": {
                "factor": 2,
                "original_context": 8,
                "attention_factor": 1,
                "beta_fast": 1,
                "beta_slow": 2,
            },
        },
    ],
)
def test_impossible_ropes_are_refused(rope: dict) -> None:
    with pytest.raises(UnsupportedModel, match="c: rope"):
        read_rope(Fields(rope, "c: rope"), 16)
