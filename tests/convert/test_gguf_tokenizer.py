"""The tokenizer of a GGUF file becomes files that encode as the original does.

The rules of how text is cut are written out a second time here, by hand and without regular
expressions, from the description of the families.
"""

from __future__ import annotations

import json
import unicodedata

import counted
import numpy as np
import pytest
import vocab
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from bonsai.convert.gguf_tokenizer import CUTTINGS, tokenizer_files
from bonsai.errors import FormatError, UnsupportedModel
from bonsai.tokenizer import Tokenizer

GOLDEN = vocab.data("tokenizer_golden.json")
SMOLLM2 = vocab.data("smollm2_vocab.json")
PIECES = vocab.data("sentencepiece_vocab.json")


def metadata(pre: str = "gpt-2", words: tuple[str, ...] = (), **more) -> dict:
    """Bytes, the letters of `words` merged from the left, and <|im_end|>, all as GGUF has them."""
    document = vocab.byte_level(words)
    tokens = [*document["model"]["vocab"], "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in document["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


def opened(folder, values: dict) -> Tokenizer:
    return Tokenizer.open(vocab.write(folder, tokenizer_files(values)))


def files_of(values: dict) -> dict:
    return {
        name: json.loads(text) if name.endswith(".json") else text.decode()
        for name, text in tokenizer_files(values).items()
    }


# ---- real vocabularies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "golden"), [(SMOLLM2, "smollm2_small"), (PIECES, "sentencepiece")]
)
def test_ids_equal_the_original(tmp_path, values, golden):
    tokenizer = opened(tmp_path, values)
    for text, ids in zip(GOLDEN["texts"], GOLDEN[golden], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


def test_smollm2_comes_out_as_the_original_is_set_up(tmp_path):
    files = files_of(SMOLLM2)
    tokenizer = opened(tmp_path, SMOLLM2)
    assert (tokenizer.bos, tokenizer.prefix, tokenizer.eos) == (1, (), {0, 2})
    assert files["generation_config.json"]["eos_token_id"] == [0, 2]
    assert files["chat_template.jinja"] == SMOLLM2["tokenizer.chat_template"]
    special = [t["content"] for t in files["tokenizer.json"]["added_tokens"] if t["special"]]
    assert special[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] and len(special) == 17
    rendered = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_sentencepiece_has_bos_and_byte_tokens(tmp_path):
    tokenizer = opened(tmp_path, PIECES)
    assert (tokenizer.prefix, tokenizer.eos, tokenizer.size) == ((1,), {2}, 600)
    assert tokenizer.encode("</s><s>") and not {1, 2} & set(tokenizer.encode("</s><s>"))
    assert tokenizer.decode(tokenizer.encode("</s><s>")) == "</s><s>"
    ids = tokenizer.encode("\U0001f409")
    assert tokenizer.decode(ids) == "\U0001f409"
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(i) for i in ids][-1] == "\U0001f409"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    return opened(tmp_path_factory.mktemp("pieces"), PIECES)


@given(st.text(max_size=30))
def test_pieces_decode_to_the_text(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


# ---- how text is cut -----------------------------------------------------------------------------

LETTERS = "abzAZ\u00e9\u4e2d\u3042\u0e01\u0431\u0928\u02b0"
MARKS = "\u0301\u0308\u094d\u0e34\u0902"
NUMBERS = "0179\u00b2\u00bd\u0663\u2177"
SPACES = " \t\n\r\u00a0\u2003\u2028\u3000\u0085"
OTHERS = "'._-+(){}$<=>|\U0001f600\u200d\u20ac\u3002\ufe0f"
CONTRACTIONS = ("re", "ve", "ll", "s", "t", "m", "d")


def is_letter(char: str, marks: bool = False) -> bool:
    return unicodedata.category(char)[0] in ("LM" if marks else "L")


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def run(text: str, start: int, belongs, limit: int | None = None) -> int:
    """The end of the characters from `start` on that belong."""
    end = start
    while end < len(text) and belongs(text[end]) and (limit is None or end - start < limit):
        end += 1
    return end


def contraction(text: str, at: int, ignore_case: bool) -> int:
    """The end of 's, 't, 're ... at this place, or the place itself."""
    if text[at] != "'":
        return at
    for tail in CONTRACTIONS:
        found = text[at + 1 : at + 1 + len(tail)]
        if found == tail or (ignore_case and found.lower() == tail):
            return at + 1 + len(tail)
    return at


def blank(text: str, at: int) -> int:
    """The end of white space: its last character goes with what follows."""
    end = run(text, at, str.isspace)
    return end - 1 if end < len(text) and end - at > 1 else end


def next_modern(text: str, at: int, *, digits: int, marks: bool) -> int:
    """The end of the piece at `at` for Qwen and Llama 3."""

    def letter(char: str) -> bool:
        return is_letter(char, marks)

    def other(char: str) -> bool:
        return not (char.isspace() or letter(char) or is_number(char))

    if (end := contraction(text, at, True)) > at:
        return end
    loose = not (text[at] in "\r\n" or is_letter(text[at]) or is_number(text[at]))
    if loose and (end := run(text, at + 1, letter)) > at + 1:
        return end
    if (end := run(text, at, letter)) > at:
        return end
    if is_number(text[at]):
        return run(text, at, is_number, digits)
    start = at + (text[at] == " ")
    if (end := run(text, start, other)) > start:
        return run(text, end, "\r\n".__contains__)
    end = run(text, at, str.isspace)
    lines = [i for i in range(at, end) if text[i] in "\r\n"]
    return lines[-1] + 1 if lines else blank(text, at)


def next_gpt2(text: str, at: int) -> int:
    if (end := contraction(text, at, False)) > at:
        return end
    start = at + (text[at] == " ")
    for kind in (is_letter, is_number):
        if (end := run(text, start, kind)) > start:
            return end

    def other(char: str) -> bool:
        return not (char.isspace() or is_letter(char) or is_number(char))

    return end if (end := run(text, start, other)) > start else blank(text, at)


def cut(text: str, step) -> list[str]:
    pieces = []
    at = 0
    while at < len(text):
        end = step(text, at)
        pieces.append(text[at:end])
        at = end
    return pieces


def cut_smollm(text: str) -> list[str]:
    """Each number alone, then the pieces of GPT-2 in what is between them."""
    parts = [""]
    for char in text:
        if is_number(char):
            parts += [char, ""]
        else:
            parts[-1] += char
    return [p for part in parts for p in (cut(part, next_gpt2) if part else [])]


RULES = {
    "gpt-2": lambda text: cut(text, next_gpt2),
    "olmo": lambda text: cut(text, next_gpt2),
    "smollm": cut_smollm,
    "qwen2": lambda text: cut(text, lambda t, i: next_modern(t, i, digits=1, marks=False)),
    "qwen35": lambda text: cut(text, lambda t, i: next_modern(t, i, digits=1, marks=True)),
    "llama-bpe": lambda text: cut(text, lambda t, i: next_modern(t, i, digits=3, marks=False)),
    "falcon3": lambda text: cut(text, lambda t, i: next_modern(t, i, digits=3, marks=False)),
}
LIBRARIES = {
    pre: Library.from_buffer(tokenizer_files(metadata(pre))["tokenizer.json"]) for pre in CUTTINGS
}


def cut_by_library(pre: str, text: str) -> list[str]:
    found = LIBRARIES[pre].pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


mixed = st.lists(
    st.one_of(
        *(st.sampled_from(kind) for kind in (LETTERS, MARKS, NUMBERS, SPACES, OTHERS)),
        st.sampled_from(["'s", "'LL", "'Ve", "'re", " ", "\r\n"]),
    ),
    max_size=24,
).map("".join)


@pytest.mark.parametrize("pre", RULES)
@given(text=mixed)
def test_text_is_cut_by_the_rules(pre, text):
    assert cut_by_library(pre, text) == RULES[pre](text)


@pytest.mark.parametrize(
    ("text", "qwen2", "qwen35", "llama"),
    [
        ("12345", "1|2|3|4|5", "1|2|3|4|5", "123|45"),
        ("n\u0303a", "n|\u0303a", "n\u0303a", "n|\u0303a"),
        ("\u0301", "\u0301", "\u0301", "\u0301"),
        ("(x):\n", "(x|):\n", "(x|):\n", "(x|):\n"),
        ("a  b", "a| | b", "a| | b", "a| | b"),
        ("\n\n\n", "\n\n\n", "\n\n\n", "\n\n\n"),
        (" \n x", " \n| x", " \n| x", " \n| x"),
        ("I'LL", "I|'LL", "I|'LL", "I|'LL"),
        ("->", "->", "->", "->"),
    ],
)
def test_families_differ_where_they_should(text, qwen2, qwen35, llama):
    expected = {"qwen2": qwen2, "qwen35": qwen35, "llama-bpe": llama}
    assert {pre: "|".join(cut_by_library(pre, text)) for pre in expected} == expected


def test_files_without_the_key_are_cut_as_llama_cpp_does():
    values = metadata()
    del values["tokenizer.ggml.pre"]
    assert tokenizer_files(values) == tokenizer_files(metadata("default"))
    assert cut_by_library("default", "a->b 12345") == ["a", "->", "b", " ", "123", "45"]


@pytest.mark.parametrize(
    ("pre", "composed"),
    [("qwen2", True), ("qwen35", True), ("olmo", True), ("smollm", False), ("llama-bpe", False)],
)
def test_only_some_families_compose_characters(tmp_path, pre, composed):
    tokenizer = opened(tmp_path, metadata(pre))
    text = tokenizer.decode(tokenizer.encode("e\u0301"))
    assert text == ("\u00e9" if composed else "e\u0301")


def test_llama_takes_whole_pieces_before_merges(tmp_path):
    """ "abc" is a token, but the merges lead to "ab" and "c"."""
    for pre, ids in (("llama-bpe", [257]), ("qwen2", [256, ord("c")])):
        values = metadata(pre, ("abc",))
        values["tokenizer.ggml.merges"] = values["tokenizer.ggml.merges"][:1]
        assert opened(tmp_path / pre, values).encode("abc") == ids


# ---- special tokens ------------------------------------------------------------------------------


def with_tokens(*tokens: tuple[str, int], **more) -> dict:
    values = metadata(**more)
    for token, kind in tokens:
        values["tokenizer.ggml.tokens"].append(token)
        values["tokenizer.ggml.token_type"].append(kind)
    return values


def test_control_and_user_tokens_are_added_tokens(tmp_path):
    values = with_tokens(("<s>", 3), ("<think>", 4), ("<unk>", 2), ("<|eot_id|>", 4), ("plain", 1))
    tokenizer = opened(tmp_path, values)
    ids = tokenizer.encode("<s><think><unk><|eot_id|>", special=True)
    assert ids == [257, 258, 259, 260]
    assert tokenizer.decode(ids) == "<think>"
    assert not set(ids) & set(tokenizer.encode("<s><think><unk><|eot_id|>"))


def test_every_known_end_token_ends_a_reply(tmp_path):
    ends = [("<|endoftext|>", 3), ("<|eot_id|>", 3), ("<|end_of_text|>", 3), ("</s>", 3)]
    values = with_tokens(*ends, ("<s>", 3), ("[EOT]", 1), ("<turn>", 3), ("<fim>", 3))
    values["tokenizer.ggml.eot_token_id"] = 263
    tokenizer = opened(tmp_path, values)
    assert tokenizer.eos == {256, 257, 258, 259, 260, 263}  # not 262: "[EOT]" is ordinary text


@pytest.mark.parametrize(
    ("more", "pre", "prefix"),
    [
        ({}, "qwen2", ()),
        ({}, "llama-bpe", (257,)),
        ({"ggml.add_bos_token": False}, "llama-bpe", ()),
        ({"ggml.add_bos_token": True}, "qwen2", (257,)),
    ],
)
def test_bos_comes_where_the_file_or_the_family_wants_it(tmp_path, more, pre, prefix):
    values = with_tokens(("<s>", 3), pre=pre, **more)
    values["tokenizer.ggml.bos_token_id"] = 257
    tokenizer = opened(tmp_path, values)
    assert tokenizer.prefix == prefix
    assert tokenizer.encode("a", add_bos=True) == [*prefix, ord("a")]
    files = files_of(values)
    del files["tokenizer_config.json"]["add_bos_token"]  # the tokenizer.json says the same alone
    assert Tokenizer.open(vocab.write(tmp_path / "alone", files)).prefix == prefix


def test_without_a_bos_token_none_is_added(tmp_path):
    assert opened(tmp_path, metadata("llama-bpe")).prefix == ()


def test_rows_without_a_token_are_left_out(tmp_path):
    values = with_tokens(("[PAD257]", 5), ("[PAD258]", 5))
    tokenizer = opened(tmp_path, values)
    assert tokenizer.size == 257
    assert tokenizer.decode([257, 258, ord("a")]) == "a"


def test_files_without_types_know_their_special_ids(tmp_path):
    values = metadata()
    del values["tokenizer.ggml.token_type"]
    tokenizer = opened(tmp_path, values)
    assert tokenizer.encode("<|im_end|>", special=True) == [256]
    assert tokenizer.eos == {256}


def test_old_sentencepiece_files_have_the_usual_ids(tmp_path):
    values = {k: v for k, v in PIECES.items() if not k.endswith("_id")}
    tokenizer = opened(tmp_path, values)
    assert (tokenizer.prefix, tokenizer.eos) == ((1,), {2})


def test_templates_are_kept_by_name(tmp_path):
    more = {"chat_template": "{{ 1 }}", "chat_template.tool_use": "{{ tools|length }}"}
    values = metadata(**more)
    tokenizer = opened(tmp_path, values)
    message = [{"role": "user", "content": ""}]
    assert tokenizer.render(message) == "1"
    assert tokenizer.render(message, tools=[{}, {}]) == "2"
    assert not opened(tmp_path / "none", metadata()).has_chat_template


def test_arrays_may_be_numpy(tmp_path):
    values = {**PIECES}
    for key, kind in (("scores", np.float32), ("token_type", np.int32)):
        values[f"tokenizer.ggml.{key}"] = np.array(PIECES[f"tokenizer.ggml.{key}"], kind)
    assert opened(tmp_path, values).encode("hello") == opened(tmp_path, PIECES).encode("hello")


# ---- what is refused -----------------------------------------------------------------------------


def changed(base: dict, key: str, value) -> dict:
    values = {**base, f"tokenizer.{key}": value}
    return {k: v for k, v in values.items() if v is not None}


def replaced(base: dict, key: str, at: int, value) -> dict:
    array = list(base[f"tokenizer.{key}"])
    array[at] = value
    return changed(base, key, array)


BASE = metadata("gpt-2", ("the",))
REFUSED = {
    "no model": (changed(BASE, "ggml.model", None), "ggml.model is missing"),
    "model of a type": (changed(BASE, "ggml.model", 3), "ggml.model is of type int"),
    "no tokens": (changed(BASE, "ggml.tokens", None), "ggml.tokens is missing"),
    "token of a type": (replaced(BASE, "ggml.tokens", 5, 7), r"ggml.tokens\[5\]"),
    "two of a kind": (replaced(BASE, "ggml.tokens", 9, "a"), "'a' has ids 9 and 97"),
    "fewer types": (changed(BASE, "ggml.token_type", [1]), "259 tokens and 1 token types"),
    "unknown type": (replaced(BASE, "ggml.token_type", 9, 17), r"token_type\[9\] is 17"),
    "no merges": (changed(BASE, "ggml.merges", None), "ggml.merges is missing"),
    "merge of one": (replaced(BASE, "ggml.merges", 0, "th"), r"merges\[0\] is 'th'"),
    "merge of no token": (replaced(BASE, "ggml.merges", 1, "t zz"), r"merges\[1\] .* 'zz'"),
    "merge to no token": (replaced(BASE, "ggml.merges", 1, "t x"), r"merges\[1\] .* 'tx'"),
    "eos beyond": (changed(BASE, "ggml.eos_token_id", 999), "999, the vocabulary has 259"),
    "eos of a type": (changed(BASE, "ggml.eos_token_id", "2"), "eos_token_id is of type str"),
    "bos flag of a type": (changed(BASE, "ggml.add_bos_token", 1), "add_bos_token"),
    "template of a type": (changed(BASE, "chat_template", 1), "chat_template"),
    "byte -1": (replaced(PIECES, "ggml.tokens", 3, "<0x-1>"), r"tokens\[3\] .* '<0x-1>'"),
    "byte 100": (replaced(PIECES, "ggml.tokens", 3, "<0x100>"), "<0x100>"),
    "no scores": (changed(PIECES, "ggml.scores", None), "ggml.scores is missing"),
    "fewer scores": (changed(PIECES, "ggml.scores", [0.0]), "600 finite numbers"),
    "no number": (replaced(PIECES, "ggml.scores", 7, float("nan")), "600 finite numbers"),
    "long piece": (replaced(PIECES, "ggml.tokens", 599, "x" * 5000), "5000 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_one_error_that_names_the_key(name):
    values, message = REFUSED[name]
    with pytest.raises(FormatError, match=message) as caught:
        tokenizer_files(values, "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (metadata("falcon_e"), "'falcon_e'"),
        (metadata("tekken"), "'tekken'"),
        (changed(BASE, "ggml.model", "bert"), "'bert'"),
        (changed(PIECES, "ggml.precompiled_charsmap", [1, 2]), "normalization"),
        (changed(PIECES, "ggml.remove_extra_whitespaces", True), "drops spaces"),
    ],
)
def test_what_would_encode_differently_is_refused_by_name(values, message):
    with pytest.raises(UnsupportedModel, match=message):
        tokenizer_files(values)


# ---- work ----------------------------------------------------------------------------------------


def synthetic(count: int, model: str) -> dict:
    """A vocabulary of `count` tokens: 64 letters, and pairs of them."""
    letters = [chr(0x4E00 + i) for i in range(64)]
    pairs = [(a, b) for a in letters for b in letters][: count - 64]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [counted.Text(t) for t in (*letters, *map("".join, pairs))],
        "tokenizer.ggml.merges": [counted.Text(" ".join(pair)) for pair in pairs],
        "tokenizer.ggml.scores": [float(-i) for i in range(count)],
        "tokenizer.ggml.token_type": [1] * count,
    }


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_work_grows_with_the_vocabulary_and_not_faster(model):
    def work(count: int) -> tuple[int, int]:
        """Lines, and comparisons of tokens: a search in a list is one line."""
        values = synthetic(count, model)
        counted.Text.comparisons = 0
        lines = counted.lines(lambda: tokenizer_files(values))
        return lines, counted.Text.comparisons

    small, middle, large = map(work, (1000, 2000, 4000))
    assert small[0] > 1000
    for one, two in ((small, middle), (middle, large)):
        assert two[0] < 2.5 * one[0] and two[1] < 2.5 * one[1] + 1000
