"""Chat templates: what they may do, what they may not, and what they are given."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import pytest
from vocab import CHATML, byte_level, write

from bonsai.errors import FormatError, InvalidRequest
from bonsai.tokenizer import Tokenizer, meter
from bonsai.tokenizer.messages import Marks, read_messages
from bonsai.tokenizer.template import ChatTemplate, read_templates

FILE = "chat_template.jinja"
MEMORY = 400 << 20  # bytes; the limit on what may be made is 256 MB


def render(source: str, size: int = 100, **variables) -> str:
    return ChatTemplate(source, FILE).render(variables, size)


def opened(folder, template: str | None = CHATML, **config) -> Tokenizer:
    files = {"tokenizer.json": byte_level(), "tokenizer_config.json": config}
    if template is not None:
        files[FILE] = template
    return Tokenizer.open(write(folder, files))


def user(text: str = "hi") -> list[dict]:
    return [{"role": "user", "content": text}]


# ---- what hostile templates get ------------------------------------------------------------------

LOOPS = "{% for i in X %}{% for j in X %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{%% set ns = namespace(a='xx', l=[1], m=[1]) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
)
HOSTILE = {
    "internals": "{{ ''.__class__ }}",
    "internals by item": "{{ ''['__class__'] }}",
    "internals by filter": "{{ ''|attr('__class__') }}",
    "internals by format": "{{ '{0.__class__}'.format(1) }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a dict": "{{ messages[0].update(a=1) }}",
    "bytes": "{{ 'a'.encode() }}",
    "files": "{% include '/etc/passwd' %}",
    "long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": LOOPS.replace("X", "range(99999)"),
    "loops over text": LOOPS.replace("X", "'ab' * 999999"),
    "recursive loop": "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros": "{% macro a() %}{{ b() }}{% endmacro %}"
    + "{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "text * n": "{{ 'x' * 10**9 }}",
    "n * text": "{{ 10**9 * 'x' }}",
    "list * n": "{{ [[1]] * 10**9 }}",
    "power": "{{ (2**8000)**(2**20) }}",
    "long division": "{{ ('f' * 1000000)|int(0, 16) // 7 }}",
    "doubled by +": DOUBLING % "{% set ns.a = ns.a + ns.a %}",
    "doubled by ~": DOUBLING % "{% set ns.a = ns.a ~ ns.a %}",
    "doubled by a block": DOUBLING % "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}",
    "doubled by join": DOUBLING % "{% set ns.a = [ns.a, ns.a]|join %}",
    "doubled by replace": DOUBLING % "{% set ns.a = ns.a|replace('x', 'xx') %}",
    "doubled by format": DOUBLING % "{% set ns.a = '%s%s'|format(ns.a, ns.a) %}",
    "doubled lists": DOUBLING % "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    + "{{ ns.l == ns.m }}",
    "doubled dicts": DOUBLING % "{% set ns.l = dict(a=ns.l, b=ns.l) %}" + "{{ ns.l|tojson }}",
    "doubled namespaces": DOUBLING % "{% set ns.l = [namespace(a=ns.l), namespace(a=ns.l)] %}"
    + "{{ ns.l|string * 9**9 }}",
    "width of a method": "{{ 'x'.center(10**9) }}",
    "width of a filter": "{{ 'x'|center(10**9) }}",
    "width of safe text": "{{ ('x'|safe).ljust(10**9) }}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of % as argument": "{{ '%*d' % (1000000000, 1) }}",
    "width of format": "{{ '{:1000000000}'.format(1) }}",
    "width of format as argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(1000000) }}",
    "indent": "{{ ('a\\n' * 1000000)|indent(900) }}",
    "replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "method replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "join": "{{ ('a' * 1000000)|join('b' * 1000000) }}",
    "method join": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "split": "{{ ('a ' * 8000000).split()|length }}",
    "list": "{{ ('a' * 16000000)|list|length }}",
    "batch": "{{ [1]|batch(10**9, 2)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "json": "{{ [1]|tojson(indent=10**9) }}",
    "json separators": "{{ [1]|tojson(separators=('x' * 1000000, 'y')) }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "many copies": "{% set x = 'a' * 16000000 %}"
    + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(200)) + "{{ x0|length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_error_of_what_it_asks_for(name, monkeypatch):
    """A clock that stands still stops none of them, and few steps are soon taken."""
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(meter, "STEPS", 500_000)
    with pytest.raises((InvalidRequest, FormatError), match=r"chat_template\.jinja"):
        render(HOSTILE[name], messages=[{"role": "user"}])


@pytest.mark.parametrize("name", ["doubled by ~", "many copies", "split", "list"])
def test_a_hostile_template_uses_bounded_memory(name):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            ChatTemplate(HOSTILE[name], FILE).render({}, 0)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_the_deadline_ends_a_template():
    nested = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="takes too long"):
        ChatTemplate(nested, FILE, seconds=0.05).render({}, 0)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x|nosuchfilter }}",
        "{{ x",
        "{% for x in y %}",
        "{{ " + "(" * 100_000,
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{% for a in b %}" * 300 + "{% endfor %}" * 300,
        "x" * 2_000_000,
    ],
    ids=range(8),
)
def test_what_is_no_template_is_a_format_error(source):
    with pytest.raises(FormatError, match=r"chat_template\.jinja"):
        ChatTemplate(source, FILE)


def test_long_conversations_are_no_attack():
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    text = render(CHATML, size=4_000_000, messages=messages, add_generation_prompt=True)
    assert len(text) > 4_000_000


# ---- what honest templates find ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),
        ("  {% set x = 1 %}\n{{ x }}\n", "1"),
        ("{{ {'a': '<é&\\'>'}|tojson }}", '{"a": "<é&\'>"}'),
        ("{{ {'b': [1, none, true], 'a': 2.5}|tojson(indent=1, sort_keys=true) }}",
         '{\n "a": 2.5,\n "b": [\n  1,\n  null,\n  true\n ]\n}'),
        ("{{ ['é\ue000']|tojson(ensure_ascii=true) }}", '["\\u00e9\ue000"]'),
        ("{{ ['\\\\ue000']|tojson(ensure_ascii=true) }}", '["\\\\ue000"]'),
        ("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y }}", "x"),
        ("{% for i in [1,2,3,4] %}{% if i == 2 %}{% continue %}{% endif %}"
         "{% if i == 4 %}{% break %}{% endif %}{{ i }}/{{ loop.length }} {% endfor %}", "1/4 3/4 "),
        ("{% for x in [[1, [2, [3]]]] recursive %}{% if x is iterable %}({{ loop(x) }})"
         "{% else %}{{ x }}{% endif %}{% endfor %}", "(1(2(3)))"),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}"
         "{{ ns.n }}", "10"),
        ("{{ 'a' ~ 1 ~ [1, 2] ~ none }}", "a1[1, 2]None"),
        ("{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ (1, 2)[0] }}", "[2, 3]cba1"),
        ("{{ {'a': 1}.items()|list }}{{ dict(a=1) }}", "[('a', 1)]{'a': 1}"),
        ("{{ 'a,b'.split(',')|map('upper')|join('-') }}", "A-B"),
        ("{{ ', '.join({'a': 1, 'b': 2}.keys()) }}", "a, b"),
        ("{{ '%s is %03d' % ('x', 7) }} {{ '{:>3}'.format(5) }}", "x is 007   5"),
        ("{{ '%d'|format(3) }} {{ '%(a)s'|format(a=1) }}", "3 1"),
        ("{{ '  a '.strip() }}{{ 'a\nb'|indent(2) }}{{ 'x'|center(3) }}", "aa\n  b x "),
        ("{{ [3, 1]|sort }}{{ [1, 2]|sum }}{{ 2.55|round(1) }}{{ '7'|int + 1 }}", "[1, 3]32.58"),
        ("{{ [{'r': 1}, {'r': 2}]|selectattr('r', 'equalto', 2)|map(attribute='r')|list }}", "[2]"),
        ("{{ [1, 2, 3]|batch(2)|list }}{{ [1, 2]|slice(2)|list }}", "[[1, 2], [3]][[1], [2]]"),
        ("{{ undefined_thing }}{{ x is defined }}", "False"),
        ("{{ strftime_now('%Y')|length }}{{ strftime_now('%d %b %Y')|length }}", "411"),
        ("{% macro m(a, b='!') %}{{ a }}{{ b }}{% endmacro %}{{ m(0) }}{{ m(1, b='?') }}", "0!1?"),
        ("{% for x in [] %}{% else %}0{% endfor %}{% for x in ''|map('upper') %}{% endfor %}", "0"),
    ],
)  # fmt: skip
def test_honest_templates_find_what_they_expect(source, expected):
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("a\nb\n{{ raise_exception('roles must alternate') }}", 3, "roles must alternate"),
        ("{% for m in messages %}\n\n{{ m.x.y }}\n{% endfor %}", 3, "has no attribute 'x'"),
        ("\n{{ 1 / 0 }}", 2, "ZeroDivisionError"),
        ("{% macro m() %}\n{{ none + 'a' }}{% endmacro %}\n\n{{ m() }}", 2, "TypeError"),
    ],
)
def test_errors_name_the_file_and_the_line(source, line, reason):
    with pytest.raises(InvalidRequest, match=rf"chat_template\.jinja, line {line}: .*{reason}"):
        render(source, messages=[1])


def test_syntax_errors_name_the_line():
    with pytest.raises(FormatError, match=r"chat_template\.jinja, line 3: "):
        ChatTemplate("a\n\n{% endfor %}", FILE)


def test_a_failing_request_leaves_the_template_usable(tmp_path):
    tokenizer = opened(tmp_path, "{{ messages[0].content * 3 if messages[0].content else 1 / 0 }}")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            tokenizer.render(user(""))
        assert tokenizer.render(user("ab")) == "ababab"


# ---- which template, with which variables --------------------------------------------------------


def test_a_model_without_a_template_says_what_to_do(tmp_path):
    tokenizer = opened(tmp_path, None)
    assert not tokenizer.has_chat_template
    for call in (tokenizer.render, tokenizer.encode_chat):
        with pytest.raises(InvalidRequest, match="no chat template") as caught:
            call(user())
        assert "--raw" in caught.value.hint


def test_a_broken_template_does_not_keep_a_model_from_loading(tmp_path):
    tokenizer = opened(tmp_path, "{% if %}")
    assert tokenizer.encode("hi") == [104, 105]
    with pytest.raises(FormatError, match=r"chat_template\.jinja, line 1"):
        tokenizer.encode_chat(user())


def test_the_file_wins_over_the_config(tmp_path):
    assert opened(tmp_path / "a", "file", chat_template="config").render(user()) == "file"
    assert opened(tmp_path / "b", None, chat_template="config").render(user()) == "config"


def test_named_templates_are_chosen_by_need(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools|length }}"},
    ]
    tokenizer = opened(tmp_path, None, chat_template=named)
    assert tokenizer.render(user()) == "plain"
    assert tokenizer.render(user(), tools=[{"type": "function"}]) == "tools: 1"
    assert tokenizer.render(user(), tools=[]) == "plain"


@pytest.mark.parametrize("declared", [3, [3], [{"name": "default"}], {"template": "x"}])
def test_templates_of_no_known_form_are_damage(declared):
    with pytest.raises(FormatError, match=r"c\.json: chat_template"):
        read_templates(declared, "c.json")


def test_tools_that_the_template_ignores_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no place for tools"):
        opened(tmp_path).encode_chat(user(), tools=[{"type": "function"}])


@pytest.mark.parametrize(("think", "expected"), [(None, "unset"), (True, "True"), (False, "False")])
def test_thinking_is_a_switch_of_the_template(tmp_path, think, expected):
    source = "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
    assert opened(tmp_path, source).render(user(), think=think) == expected
    assert opened(tmp_path / "without").render(user(), think=think).startswith("<|im_start|>")


def test_templates_know_the_special_tokens(tmp_path):
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ add_generation_prompt }}{{ tools }}"
    names = {"bos_token": "!", "eos_token": {"content": "?"}, "add_bos_token": True}
    tokenizer = opened(tmp_path, source, **names)
    assert tokenizer.render(user(), add_generation_prompt=False) == "!?FalseNone"


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}),
        ("", {}),
        ("  ", {}),
        ("not json", "not json"),
        ('{"a": ', '{"a": '),
        ({"a": 1}, {"a": 1}),
        ("[" * 10_000, "[" * 10_000),
        ('{"a": ' + "9" * 9999 + "}", '{"a": ' + "9" * 9999 + "}"),
    ],
    ids=range(8),
)
def test_arguments_of_earlier_calls_are_objects_where_they_can_be(arguments, expected):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (read,) = read_messages([message])
    assert read["tool_calls"][0]["function"]["arguments"] == expected
    assert read["content"] == ""
    assert message["tool_calls"] == [call]  # the caller's own is not touched


def test_arguments_that_are_no_json_fail_one_request_at_most(tmp_path):
    items = (
        "{% for c in messages[0].tool_calls %}{% for k, v in c.function.arguments|items %}{{ k }}"
    )
    tokenizer = opened(tmp_path, items + "={{ v }}{% endfor %}{% endfor %}")

    def render_with(arguments) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return tokenizer.render([{"role": "assistant", "tool_calls": [call]}])

    assert render_with('{"a": 1}') == "a=1"
    assert render_with("") == ""
    with pytest.raises(InvalidRequest, match="mapping"):
        render_with("not json")
    assert render_with({"b": 2}) == "b=2"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hi", "type str"),
        ({"role": "user"}, "type dict"),
        (None, "null"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([*user(), {"role": "user", "content": [{"type": "image_url"}]}],
         r"messages\[1\]\.content\[0\] is 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "key"),
        ([{"role": "user", "content": "\ud800"}], r"half of a character \(U\+D800\) at 0"),
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused_by_place(messages, reason):
    with pytest.raises(InvalidRequest, match=reason):
        read_messages(messages)


def test_deep_messages_are_refused():
    deep: list = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="levels deep"):
        read_messages([{"role": "user", "content": "x", "extra": deep}])


@pytest.mark.parametrize("tools", ["x", {"a": 1}, [3], 5])
def test_tools_that_are_none_are_refused(tmp_path, tools):
    with pytest.raises(InvalidRequest, match="tools"):
        opened(tmp_path, "{{ tools }}").render(user(), tools=tools)


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = read_messages([{"role": "user", "content": parts, "name": None}])
    assert message == {"role": "user", "content": "ab"}


def test_text_with_methods_of_its_own_becomes_plain():
    class Loud(str):
        def __html__(self) -> str:
            return "<b>"

    (message,) = read_messages([{"role": "user", "content": Loud("x")}])
    assert type(message["content"]) is str


def test_marks_take_parts_apart_and_go_without_a_trace():
    marks = Marks(["a\ue000b", "E001"])  # neither a character nor the spelling of its code
    text = marks.apart("xTOK yA z", [(1, 5), (6, 7)])
    assert text == "xT\ue002O\ue002K y\ue003 z"
    assert marks.remove(text) == "xTOK yA z"
    assert marks.apart("plain", []) == "plain" == marks.remove("plain")
    assert marks.apart("  ", [(0, 2)]) == " \ue002 "


def test_no_room_for_marks_is_an_error():
    with pytest.raises(InvalidRequest, match="private-use"):
        Marks(["".join(map(chr, range(0xE000, 0xF900)))])
