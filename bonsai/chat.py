"""A conversation: turns, and a session that remembers them so that only new tokens are computed.

Knows messages. Does not know templates (the tokenizer renders them) or stop rules (`reply`).
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bonsai.backends import Progress, Session
from bonsai.errors import InvalidRequest
from bonsai.reply import Chunk, Completion, Record, Request, Stream, run
from bonsai.sampling import Sampling

if TYPE_CHECKING:
    from bonsai.generate import Model

__all__ = ["Chat"]


class Chat:
    """Turns with one model; made by `Model.chat`. Not shareable between threads.

    `messages` is a plain list of {"role", "content"} and may be edited between turns: the next
    prompt is rendered from it, and the session keeps as many tokens as are still the same. What the
    model thought is "reasoning_content" of its message; the template keeps it or leaves it out.

    A turn that fails changes nothing. A turn that is cancelled (its stream closed, or Ctrl-C) keeps
    the message and the part of the answer that was delivered, or nothing if that is empty.
    """

    def __init__(self, model: Model, *, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._model = model
        self._session: Session | None = None
        self._stream: weakref.ref[Stream] | None = None

    def send(
        self,
        message: str,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        think: bool | None = None,
        reasoning_effort: str | None = None,
        max_thinking: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Completion:
        """Say something; the whole reply. The keywords are those of `Model.generate`."""
        with self.stream(
            message,
            max_tokens=max_tokens,
            stop=stop,
            sampling=sampling,
            think=think,
            reasoning_effort=reasoning_effort,
            max_thinking=max_thinking,
            chat_template_kwargs=chat_template_kwargs,
            progress=progress,
        ) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        message: str,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        think: bool | None = None,
        reasoning_effort: str | None = None,
        max_thinking: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Stream:
        """Say something; the reply as it comes. An earlier stream that still runs is closed.

        Raises ContextOverflow, and changes nothing, when the conversation no longer fits.
        """
        self._end_stream()
        if not isinstance(message, str):
            raise InvalidRequest(f"a chat message is {type(message).__name__}, expected a string")
        user = {"role": "user", "content": message}
        prompt = self._model.encode_messages(
            [*self.messages, user],
            think=think,
            reasoning_effort=reasoning_effort,
            chat_template_kwargs=chat_template_kwargs,
        )
        request = self._model.request(
            prompt,
            max_tokens=max_tokens,
            stop=stop,
            sampling=sampling,
            thinking=self._model.thinking(prompt, max_thinking),
            progress=progress,
            remedy="/reset (in Python: reset(), or remove old messages)",
        )
        record = Record(len(request.prompt))
        stream = Stream(self._turn(user, request, record), record)
        self._stream = weakref.ref(stream)
        return stream

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self._end_stream()
        del self.messages[1 if self.messages[:1] and self.messages[0]["role"] == "system" else 0 :]

    def close(self) -> None:
        """Free the session's memory; the next turn would start with a new one."""
        self._end_stream()
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(
        self, user: dict[str, str], request: Request, record: Record
    ) -> Generator[Chunk, None, None]:
        session = self._model.session() if self._session is None else self._session
        self._session = None  # until the turn has ended well
        try:
            yield from run(
                session, self._model.tokenizer.stream_decoder(markers=True), request, record
            )
        except GeneratorExit:
            self._session = session
            self._keep(user, record)
            raise
        except BaseException as error:
            session.close()  # nobody knows what it holds now
            if isinstance(error, KeyboardInterrupt):
                self._keep(user, record)
            raise
        self._session = session
        self._keep(user, record)

    def _keep(self, user: dict[str, str], record: Record) -> None:
        if record.text or record.finish_reason != "cancelled":
            reply = {"role": "assistant", "content": record.text}
            if record.reasoning:
                reply["reasoning_content"] = record.reasoning
            self.messages += [user, reply]

    def _end_stream(self) -> None:
        earlier = None if self._stream is None else self._stream()
        if earlier is not None:
            earlier.close()
