"""Messages and tools as callers give them: checked, made plain, marked where they spell tokens.

Knows the shape of chat messages. Does not know jinja or ids: the tokenizer says which parts of a
text spell a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bonsai.errors import InvalidRequest

__all__ = [
    "Marks",
    "mapped",
    "read_messages",
    "read_tools",
    "read_variables",
    "refuse_half_characters",
    "texts_of",
]

Spans = Sequence[tuple[int, int]]
DEEPEST = 64  # levels of lists and objects in one message
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}")
PRIVATE = range(0xE000, 0xF900)
RESERVED = frozenset(["messages", "tools", "add_generation_prompt"])


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Fresh plain copies of `messages`: dicts of str, int, float, bool, None, list and dict.

    Text in parts ({"type": "text", "text": ...}) is joined, absent content is "", keys that are
    None are left out. Arguments of tool calls that are JSON in a string, as the OpenAI API has
    them, become objects, which templates expect; strings that are no JSON stay as they are.

    Raises InvalidRequest, naming the message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages is {_kind(messages)}, expected a list",
            hint='a message is {"role": "user", "content": "..."}',
        )
    if not messages:
        raise InvalidRequest("messages is empty, expected at least one message")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Plain copies of JSON schemas of tools; None for none."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools is {_kind(tools)}, expected a list of JSON schemas")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"tools[{i}] is {_kind(tool)}, expected an object")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def read_variables(variables: Any) -> dict[str, Any]:
    """Plain copies of what a caller gives the template beside messages and tools."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {_kind(variables)}, expected an object")
    plain: dict[str, Any] = _plain(variables, "chat_template_kwargs")
    for name in plain.keys() & RESERVED:
        raise InvalidRequest(f"chat_template_kwargs: {name!r} has an argument of its own")
    return plain


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {_kind(message)}, expected an object")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role is {_shown(role)}",
            hint="roles are names such as system, user, assistant or tool",
        )
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    calls = plain.get("tool_calls") or ()
    if "content" not in message and not calls:
        raise InvalidRequest(f"{where} has no content")
    plain["content"] = _text(plain.get("content", ""), f"{where}.content")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} is {_kind(content)}, expected text or a list of parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(
                f"{where}[{i}] is {_shown(kind)}, expected a part of type 'text'",
                hint="only text can be read by this model",
            )
    return "".join(part["text"] for part in content)


def _arguments(text: str) -> Any:
    """The object that `text` spells as JSON; the text itself where it spells none."""
    if not text.strip():
        return {}
    try:
        return _plain(json.loads(text), "arguments")
    except (ValueError, RecursionError):  # InvalidRequest is a ValueError
        return text


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of plain JSON types: nothing with methods of its own gets near a template."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        refuse_half_characters(value, where)
        return str.__str__(value)
    if depth > DEEPEST:
        raise InvalidRequest(f"{where} is nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(f"{where} has a key that is {_kind(key)}, expected text")
        return {
            _plain(key, where): _plain(item, f"{where}.{key:.40}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(f"{where} is {_kind(value)}, expected plain JSON data")


def refuse_half_characters(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{where} holds half of a character (U+{ord(text[error.start]):04X}) at {error.start}"
        ) from None


class Marks:
    """Takes parts of texts apart with a private-use character that occurs in none of them.

    A part such as <|im_end|> gets the character between any two of its own, so nothing that a
    template does with the text (cut it, join it, turn it into JSON) makes the part whole again.
    What is whole in the template's output is the template's own. `remove` gives the texts back.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        present: set[str] = set()
        lowered = []
        for text in texts:
            present.update(c for c in text if "\ue000" <= c <= "\uf8ff")
            lowered.append(text.lower())
        everything = "\n".join(lowered)  # the code of the character must not be in it either
        self._free = (
            chr(c) for c in PRIVATE if chr(c) not in present and f"{c:x}" not in everything
        )
        self._mark = self._next()
        self._letters: dict[str, str] = {}

    def apart(self, text: str, spans: Spans) -> str:
        """`text` with its parts [start, end) taken apart; spans are in order, without overlap."""
        pieces = []
        done = 0
        for start, end in spans:
            part = text[start:end]
            core = part.strip() or part  # a token may take the white space beside it
            at = start + part.index(core)
            pieces += [text[done:at], self._mark.join(core) if core[1:] else self._letter(core)]
            done = at + len(core)
        return "".join(pieces) + text[done:]

    def remove(self, text: str) -> str:
        text = text.replace(self._mark, "")
        for letter, replacement in self._letters.items():
            text = text.replace(replacement, letter)
        return text

    def _letter(self, letter: str) -> str:
        """What stands for a part of one character, which cannot be taken apart."""
        if letter not in self._letters:
            self._letters[letter] = self._next()
        return self._letters[letter]

    def _next(self) -> str:
        free = next(self._free, None)
        if free is None:
            raise InvalidRequest("the messages use every private-use character of Unicode")
        return free


def texts_of(value: Any) -> Iterable[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
