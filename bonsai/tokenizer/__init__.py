"""Text to token ids and back, and chats to ids.

Knows that text from users must not become control tokens. Does not know files (`files`),
how bytes become text (`stream`), or what templates may do (`template`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bonsai.errors import BonsaiError, InvalidRequest
from bonsai.format.files import child, read_small
from bonsai.thinking import Thinking
from bonsai.tokenizer.files import TokenizerFile, guarded
from bonsai.tokenizer.markers import find_markers
from bonsai.tokenizer.messages import (
    Marks,
    mapped,
    read_messages,
    read_tools,
    read_variables,
    refuse_half_characters,
    texts_of,
)
from bonsai.tokenizer.stream import StreamDecoder
from bonsai.tokenizer.template import ChatTemplate, read_templates

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

__all__ = ["Tokenizer"]

WRITTEN = frozenset(["content", "reasoning_content", "thinking"])  # by the assistant
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
SWITCHES = ("enable_thinking", "thinking")  # what templates call it, in this order
LAST = 16  # ids that surely hold a marker at the end of a prompt, however it is spelled
PROBE = "\ue0f0"  # stands for what an assistant says


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads.

    size               ids that exist are 0 to size - 1; a model may have more rows
    markers            what encloses reasoning in replies; None for models without such tags
    bos                the id of the bos token, or None
    prefix             ids that belong before raw text: what `add_bos` adds, often nothing
    has_chat_template  whether `render` and `encode_chat` work
    """

    def __init__(self, file: TokenizerFile, templates: Mapping[str, tuple[str, str]]) -> None:
        self.size = file.size
        contents = {token.content: i for i, token in file.added.items()}
        self.markers = find_markers(contents, templates.get("default", ("", ""))[0])
        pair = (self.markers.begin, self.markers.end) if self.markers else ()
        self._marker_ids = frozenset(contents[tag] for tag in pair if tag in contents)
        self.bos = file.bos
        self.prefix = file.prefix
        self._file = file
        self._sources = templates
        self._templates: dict[str, ChatTemplate] = {}
        self._plain: dict[bool, Library] = {}
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._eos: frozenset[int] | None = None
        by_content = {token.content: token for token in file.added.values()}
        found = file.finder.get_added_tokens_decoder()
        self._found = {i: by_content[token.content] for i, token in found.items()}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer in a model folder: tokenizer.json, and what lies beside it.

        Raises FormatError, or UnsupportedModel for a decoder or post-processor we do not know.
        """
        folder = Path(folder)
        file = TokenizerFile.read(folder)
        config = str(folder / "tokenizer_config.json")
        templates = read_templates(file.config.get("chat_template"), config)
        sources = {name: (source, config) for name, source in templates.items()}
        path = child(folder, "chat_template.jinja", str(folder))
        if path.exists():
            sources["default"] = (read_small(path).decode("utf-8", "replace"), str(path))
        return cls(file, sources)

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end a reply: from all files that name some, and the special token that the chat
        template writes after what an assistant says."""
        if self._eos is None:
            self._eos = self._file.eos | self._turn_end()
        return self._eos

    def vocabulary(self) -> dict[str, int]:
        """Every token as tokenizer.json spells it, and its id."""
        return self._file.full.get_vocab(with_added_tokens=True)

    # ---- text ----------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """The ids of a text.

        special  the text may spell control tokens (<|im_end|>); otherwise, as for all text from
                 users, what looks like one becomes ordinary pieces that decode to the same text
        add_bos  put `prefix` in front, unless the ids begin with it
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"the text is of type {type(text).__name__}, expected str")
        refuse_half_characters(text, "the text")
        if special or not self._controls(text):
            ids = _ids(self._file.full, text)
        else:
            ids = self._encode_plain(text, later=False)
        prefix = list(self.prefix) if add_bos else []
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def least(self, *texts: str) -> int:
        """How many ids texts have together at least, from their length; 0 where nobody knows."""
        return self._file.bound.least(*texts)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids, without special tokens unless `special`; ids that do not exist are
        nothing, bytes that are no character are U+FFFD."""
        decoder = self.stream_decoder(special=special)
        return decoder.push_all(ids) + decoder.flush()

    def stream_decoder(self, *, special: bool = False, markers: bool = False) -> StreamDecoder:
        """A decoder for ids as they come; its texts together are `decode` of the ids.

        markers  `Tokenizer.markers` are text, also where they are special tokens
        """
        spell = self._spell_all if special else self._spell_markers if markers else self._spell
        return StreamDecoder(spell, strip_first=self._file.spelling.strip_first)

    def _spell(self, token: int) -> bytes:
        added = self._file.added.get(token)
        return b"" if added is not None and added.special else self._spell_all(token)

    def _spell_markers(self, token: int) -> bytes:
        return self._spell_all(token) if token in self._marker_ids else self._spell(token)

    def _spell_all(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def _spelled(self, token: int) -> bytes:
        if token in self._file.added:
            return self._file.added[token].content.encode()
        if not 0 <= token < self.size:
            return b""
        text = self._file.full.id_to_token(token)
        return b"" if text is None else self._file.spelling.spell(text)

    # ---- chats ---------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources)

    @property
    def thinking_switch(self) -> str | None:
        """The variable with which the chat template turns thinking on and off, if it has one."""
        return _switch(self._template("default")) if self.has_chat_template else None

    def thinking(self, prompt: Sequence[int], limit: int | None = None) -> Thinking | None:
        """What is known about the reasoning of a reply to the ids of `encode_chat`; None for models
        whose files have no `markers`. `limit` is as in `Thinking`."""
        if self.markers is None:
            return None
        opened = self.decode(prompt[-LAST:], special=True).rstrip().endswith(self.markers.begin)
        return Thinking(self.markers, opened, limit, () if limit is None else self._closing())

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text that the chat template makes of `messages`.

        tools  JSON schemas of functions that the model may call
        think  sets the template's `thinking_switch` where it has one; None leaves it alone
        chat_template_kwargs   further variables of the template, such as reasoning_effort
        add_generation_prompt  end with the header of the assistant's next message

        Raises InvalidRequest: for messages that are none, for variables that the template does not
        have, and for whatever it refuses.
        """
        text, marks = self._rendered(
            messages, tools, think, chat_template_kwargs, add_generation_prompt
        )
        return text if marks is None else marks.remove(text)

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of `render`. Control tokens come from the template only: what messages, tools and
        variables spell are ordinary pieces. In what the assistant said and thought, tokens that are
        not special (such as <think>) stay tokens, because the model wrote them."""
        text, marks = self._rendered(
            messages, tools, think, chat_template_kwargs, add_generation_prompt
        )
        if marks is None:
            return _ids(self._file.full, text)
        ids: list[int] = []
        done = 0
        for start, end, token in self._controls(text):
            ids += self._encode_plain(marks.remove(text[done:start]), later=bool(ids))
            ids.append(token)
            done = end
        return ids + self._encode_plain(marks.remove(text[done:]), later=bool(ids))

    def _rendered(
        self,
        messages: Messages,
        tools: Tools | None,
        think: bool | None,
        variables: Mapping[str, Any] | None,
        prompt: bool,
    ) -> tuple[str, Marks | None]:
        """The rendered text, in which control tokens that messages spell are taken apart."""
        plain, schemas = read_messages(messages), read_tools(tools)
        template = self._template("tool_use" if schemas else "default")
        if schemas and not template.mentions("tools"):
            raise InvalidRequest(
                f"{template.where}: the chat template has no place for tools",
                hint="this model was not made to call tools; leave them out",
            )
        given = self._variables(template, think, read_variables(variables))
        size = sum(len(text) for text in texts_of([plain, schemas, given]))
        plain, (schemas, given), marks = self._marked(plain, [schemas, given], template)
        known = {
            **self._file.names,
            "documents": None,
            **given,
            "messages": plain,
            "tools": schemas,
            "add_generation_prompt": prompt,
        }
        return template.render(known, size), marks

    def _variables(
        self, template: ChatTemplate, think: bool | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """What the template gets beside messages and tools."""
        for name in given.keys() - template.variables:
            ours = {"messages", "tools", "add_generation_prompt", *self._file.names}
            others = ", ".join(sorted(template.variables - ours)) or "none"
            raise InvalidRequest(
                f"{template.where}: the chat template has no variable {name!r:.80}",
                hint=f"its variables: {others}",
            )
        if think is not None and not isinstance(think, bool):
            raise InvalidRequest(f"think is {think!r:.80}, expected True, False or None")
        switch = _switch(template)
        if think is None or switch is None:
            return given
        if given.get(switch, think) is not think:
            raise InvalidRequest(f"think is {think}, but {switch} is {given[switch]!r:.80}")
        return {**given, switch: think}

    def _marked(
        self, messages: Any, others: Any, template: ChatTemplate
    ) -> tuple[Any, Any, Marks | None]:
        """Messages and other data in which control tokens are taken apart, if they spell any."""
        fields = [(_written(m, k), [k, v]) for m in messages for k, v in m.items()]
        spans: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for own, value in (*fields, (False, others)):
            for text in texts_of(value):
                if (text, own) not in spans:
                    found = self._controls(text, special_only=own)
                    spans[text, own] = [(start, end) for start, end, _ in found]
        if not any(spans.values()):
            return messages, others, None
        for i, message in enumerate(messages):
            if spans[message["role"], False]:
                raise InvalidRequest(f"messages[{i}].role spells a control token")
        marks = Marks([template.source, *(text for text, _ in spans)])

        def marked(value: Any, own: bool) -> Any:
            return mapped(value, lambda text: self._apart(text, spans[text, own], marks, own))

        messages = [
            {marked(k, _written(m, k)): marked(v, _written(m, k)) for k, v in m.items()}
            for m in messages
        ]
        return messages, marked(others, False), marks

    def _apart(self, text: str, spans: list[tuple[int, int]], marks: Marks, own: bool) -> str:
        if not spans:
            return text
        text = marks.apart(text, spans)
        if self._controls(text, special_only=own):  # a normalizer that drops the marks
            raise InvalidRequest("a message spells a control token, which this model cannot tell")
        return text

    def _template(self, name: str) -> ChatTemplate:
        name = name if name in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequest(
                f"{self._file.path.parent}: the model has no chat template",
                hint="--raw lets it continue a text; it may not be made for chats",
            )
        with self._lock:
            if name not in self._templates:
                self._templates[name] = ChatTemplate(*self._sources[name])
            return self._templates[name]

    def _turn_end(self) -> frozenset[int]:
        """The special token that the template writes after what an assistant says, if there is one
        that follows at once: models learn to end with it, whatever the other files say."""
        if not self.has_chat_template:
            return frozenset()
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": PROBE}]
        try:
            text = self.render(chat, add_generation_prompt=False)
            _, found, tail = text.rpartition(PROBE)
            ends = self._controls(tail, special_only=True) if found else []
        except BonsaiError:  # a template that refuses this chat says nothing about ends
            return frozenset()
        return frozenset(i for start, _, i in ends[:1] if not tail[:start].strip())

    def _closing(self) -> tuple[int, ...]:
        """The ids of the end marker, on lines of its own."""
        assert self.markers is not None
        end = self.markers.end
        ids = [i for i in self._marker_ids if self._file.added[i].content == end]
        if not ids:
            return tuple(self._encode_plain(f"\n{end}\n\n", later=True))
        return (
            *self._encode_plain("\n", later=True),
            *ids,
            *self._encode_plain("\n\n", later=True),
        )

    # ---- control tokens ------------------------------------------------------------------------

    def _controls(self, text: str, special_only: bool = False) -> list[tuple[int, int, int]]:
        """(start, end, id) of the control tokens that the text spells."""
        found = guarded(self._file.finder.encode, text, add_special_tokens=False)
        controls = []
        for i, (start, end) in zip(found.ids, found.offsets, strict=True):
            added = self._found.get(i)
            if added is not None and (added.special if special_only else added.control):
                controls.append((start, end, added.id))
        return controls

    def _encode_plain(self, text: str, *, later: bool) -> list[int]:
        """The ids of a text in which nothing is a control token."""
        if not text:
            return []
        with self._lock:
            if later not in self._plain:
                self._plain[later] = self._file.plain(later=later)
        ids = _ids(self._plain[later], text)
        for token in set(ids) & self._file.added.keys() - {self._file.unknown}:
            if self._file.added[token].control:
                name = self._file.added[token].content
                raise InvalidRequest(
                    f"the text cannot be told apart from the control token {name!r}"
                )
        return ids


def _written(message: Mapping[str, Any], key: str) -> bool:
    """Whether the model wrote this part of a message."""
    return message["role"] == "assistant" and key in WRITTEN


def _switch(template: ChatTemplate) -> str | None:
    return next((name for name in SWITCHES if name in template.variables), None)


def _ids(library: Library, text: str) -> list[int]:
    ids: list[int] = guarded(library.encode, text, add_special_tokens=False).ids
    return ids
