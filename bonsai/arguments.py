"""What callers ask of a model, checked: messages, numbers, words.

Knows what is accepted. Does not know models: whether a prompt fits is not decided here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from bonsai.errors import InvalidRequest

__all__ = ["count", "read_messages", "user_texts", "with_effort"]


def read_messages(prompt: Any, system: str | None) -> list[Mapping[str, Any]]:
    """The messages of a prompt; what is inside each of them is checked by the tokenizer."""
    if system is not None and not isinstance(system, str):
        raise InvalidRequest(f"system is {type(system).__name__}, expected a string")
    first = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*first, {"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(m, Mapping) for m in prompt):
        raise InvalidRequest(
            f"the prompt is {type(prompt).__name__}, expected a string or a list of messages",
            hint='a message is {"role": "user", "content": "..."}',
        )
    if not prompt:
        raise InvalidRequest("the list of messages is empty")
    if first and prompt[0].get("role") == "system":
        raise InvalidRequest("there are two system messages: `system` and the first of the list")
    return [*first, *prompt]


def user_texts(messages: Sequence[Any]) -> list[str]:
    """What users say in messages, as far as it is plain text; stripped, as templates do it."""
    found = (
        message.get("content")
        for message in messages
        if isinstance(message, Mapping) and message.get("role") == "user"
    )
    return [text.strip() for text in found if isinstance(text, str)]


def with_effort(kwargs: Any, effort: Any) -> Any:
    """The variables of a template with the effort among them."""
    if effort is None:
        return kwargs
    if not isinstance(effort, str):
        raise InvalidRequest(f"reasoning_effort is {effort!r:.80}, expected a word such as 'low'")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return kwargs  # the tokenizer says what is wrong with it
    if "reasoning_effort" in (kwargs or {}):
        raise InvalidRequest("reasoning_effort is also in chat_template_kwargs: drop one")
    return {**(kwargs or {}), "reasoning_effort": effort}


def count(value: Any, name: str, least: int = 1) -> int:
    """A whole number; raises InvalidRequest naming the argument."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least:
        raise InvalidRequest(f"{name} is {value!r:.80}, expected a whole number, {least} or more")
    return number
