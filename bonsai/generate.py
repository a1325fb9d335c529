"""A model ready to talk: from a name to weights on a backend, from a prompt to a reply.

Knows what a user may ask for, and checks all of it before anything is computed. Does not know how a
reply unfolds (`reply`), what a conversation remembers (`chat`) or any backend by name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bonsai import backends, hub
from bonsai.arguments import count, read_messages, user_texts, with_effort
from bonsai.backends import Backend, Engine, MemoryLimit, Progress, Session
from bonsai.chat import Chat
from bonsai.errors import ContextOverflow, FormatError, InvalidRequest
from bonsai.format import Checkpoint
from bonsai.reply import Chunk, Completion, Record, Request, Stream, Timings, Usage, run
from bonsai.sampling import Sampling
from bonsai.sizes import read_size
from bonsai.stops import read_stops
from bonsai.thinking import Thinking
from bonsai.tokenizer import Tokenizer

__all__ = ["DEFAULT_CONTEXT", "Chunk", "Completion", "Model", "Stream", "Timings", "Usage", "load"]

DEFAULT_CONTEXT = 8192  # tokens: a long conversation, in memory that most machines have


def load(
    name_or_path: str | os.PathLike[str],
    *,
    backend: str | Backend = "auto",
    max_context: int | None = None,
    threads: int | None = None,
    memory_limit: int | str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """The model in a directory, or one that was pulled, on a backend that works here.

    `max_context` is how many tokens prompt and reply may have together; by default what the model
    was made for, but at most 8192. `threads` are CPU threads; by default the backend chooses.
    `memory_limit` ("2GiB", or bytes) is what the process may have while one reply runs; layers that
    do not fit are read from the files as they are needed (docs/memory.md).
    `revision` is the branch, tag or commit of a pulled model. `progress(stage, done, total)` is
    called while weights are loaded.

    Raises ModelNotFound, FormatError, UnsupportedModel, BackendUnavailable or InvalidRequest.
    """
    if max_context is not None:
        max_context = count(max_context, "max_context")
    if threads is not None:
        threads = count(threads, "threads")
    memory = None
    if memory_limit is not None:
        limit = read_size(memory_limit, "memory_limit")
        memory = MemoryLimit(limit, DEFAULT_CONTEXT if max_context is None else max_context)
    chosen = _backend(backend)
    checkpoint = Checkpoint.open(hub.resolve(os.fspath(name_or_path), revision))
    try:
        tokenizer = Tokenizer.open(checkpoint.path)  # first: the limit counts its memory
        return Model(
            chosen.load(checkpoint, progress, threads=threads, memory=memory),
            tokenizer,
            name=os.fspath(name_or_path),
            sampling=_recommended(checkpoint.manifest.sampling),
            max_context=max_context,
            checkpoint=checkpoint,
        )
    except BaseException:
        checkpoint.close()
        raise


class Model:
    """Weights and a tokenizer. Shareable: every reply that runs has a session of its own.

    engine       the weights on their backend
    description  where they run, for people
    tokenizer    ids <-> text
    name         what it was loaded as
    sampling     what replies use when they are not told: the checkpoint's recommended settings,
                 or greedy where it recommends none. `dataclasses.replace` changes some of them
    max_context  tokens that prompt and reply may have together
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str = "model",
        sampling: Sampling | None = None,
        max_context: int | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        wanted = DEFAULT_CONTEXT if max_context is None else max_context
        if max_context is not None and max_context > engine.context:
            raise InvalidRequest(
                f"max_context is {max_context:,}, the model was made for {engine.context:,} tokens"
            )
        self.description = engine.description
        self.tokenizer = tokenizer
        self.name = name
        self.sampling = Sampling.greedy() if sampling is None else sampling
        self.max_context = min(wanted, engine.context)
        self._engine: Engine | None = engine
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._idle: Session | None = None  # kept because a session's memory is large

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise InvalidRequest(f"{self.name} was closed", hint="load it again")
        return self._engine

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.description!r}, max_context={self.max_context})"

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        think: bool | None = None,
        reasoning_effort: str | None = None,
        max_thinking: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        raw: bool = False,
        progress: Progress | None = None,
    ) -> Completion:
        """The reply to `prompt`: a message, or a list of {"role", "content"} messages.

        system      a system message to put first
        max_tokens  the longest reply; by default what fits into the context, which also ends it
        stop        strings that end the reply; they are not part of it. Empty ones are ignored.
                    They are looked for in the answer only, not in the reasoning before it
        sampling    how tokens are chosen; by default the model's own settings (`Model.sampling`)
        think       the template's thinking switch, where it has one; None leaves it as it is
        reasoning_effort  how much to think, in a word that the template knows ("low", "high", ...)
        max_thinking      tokens of reasoning after which the model has to answer
        chat_template_kwargs  further variables of the template, such as preserve_thinking
        raw         no chat template: the model continues the prompt, which may spell out its
                    special tokens. All that it writes is text, markers of reasoning too
        progress    called as progress("prefill", done, total)

        Raises ContextOverflow or InvalidRequest before anything is computed, and NumericError.
        """
        with self.stream(
            prompt,
            system=system,
            max_tokens=max_tokens,
            stop=stop,
            sampling=sampling,
            think=think,
            reasoning_effort=reasoning_effort,
            max_thinking=max_thinking,
            chat_template_kwargs=chat_template_kwargs,
            raw=raw,
            progress=progress,
        ) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        think: bool | None = None,
        reasoning_effort: str | None = None,
        max_thinking: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        raw: bool = False,
        progress: Progress | None = None,
    ) -> Stream:
        """The reply as it comes; the arguments and errors are those of `generate`.

        The work starts with the first piece and stops when the stream is closed or dropped.
        """
        if raw:
            others = (system, think, reasoning_effort, max_thinking, chat_template_kwargs)
            ids, thinking = self._encode_raw(prompt, others), None
        else:
            ids = self.encode_messages(
                read_messages(prompt, system),
                think=think,
                reasoning_effort=reasoning_effort,
                chat_template_kwargs=chat_template_kwargs,
            )
            thinking = self.thinking(ids, max_thinking)
        request = self.request(
            ids,
            max_tokens=max_tokens,
            stop=stop,
            sampling=sampling,
            thinking=thinking,
            progress=progress,
        )
        record = Record(len(ids))
        return Stream(self._reply(request, record), record)

    def chat(self, *, system: str | None = None) -> Chat:
        """A conversation that remembers its turns."""
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"system is {type(system).__name__}, expected a string")
        return Chat(self, system=system)

    def session(self) -> Session:
        """Ids in, ids out: a fresh session, for one thread; close it, or use it in a `with`."""
        engine = self.engine
        return engine.session(self.max_context, min(self.tokenizer.size, engine.vocab))

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        think: bool | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation as ids, up to where the reply begins."""
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest(
                f"{self.name} has no chat template",
                hint="it can only continue text: --raw (in Python: raw=True)",
            )
        self._refuse_overlong(*user_texts(messages))
        return self.tokenizer.encode_chat(
            messages,
            think=think,
            chat_template_kwargs=with_effort(chat_template_kwargs, reasoning_effort),
        )

    def thinking(self, prompt: Sequence[int], max_thinking: int | None = None) -> Thinking | None:
        """What is known about the reasoning of a reply to these ids; None for models without."""
        if max_thinking is not None:
            max_thinking = count(max_thinking, "max_thinking", least=0)
        return self.tokenizer.thinking(prompt, max_thinking)

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        sampling: Sampling | None = None,
        thinking: Thinking | None = None,
        progress: Progress | None = None,
        remedy: str = "shorten the prompt",
    ) -> Request:
        """Everything about one reply, checked. `remedy` completes the hint when it does not fit."""
        engine = self.engine
        if not prompt:
            raise InvalidRequest("the prompt is empty: there is nothing to reply to")
        if max(prompt) >= engine.vocab:
            raise FormatError(
                f"the prompt has token id {max(prompt)}, the model has ids below {engine.vocab}",
                hint="tokenizer and weights come from different models; convert it again",
            )
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"prompt has {len(prompt):,} tokens, max_context is {self.max_context:,}",
                hint=_more_context(len(prompt), engine.context, remedy),
            )
        if sampling is not None and not isinstance(sampling, Sampling):
            raise InvalidRequest(f"sampling is {sampling!r:.80}, expected a bonsai.Sampling")
        limit = room if max_tokens is None else min(room, count(max_tokens, "max_tokens"))
        stops = read_stops(stop)
        chosen = self.sampling if sampling is None else sampling
        return Request(prompt, limit, stops, chosen, self.tokenizer.eos, progress, thinking)

    def close(self) -> None:
        """Free the weights; replies that still run end first. Later calls raise InvalidRequest."""
        with self._lock:
            idle, self._idle = self._idle, None
            self._engine = None
        if idle is not None:
            idle.close()
        if self._checkpoint is not None:
            self._checkpoint.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode_raw(self, prompt: Any, others: Sequence[Any]) -> list[int]:
        if not isinstance(prompt, str):
            raise InvalidRequest(f"a raw prompt is {type(prompt).__name__}, expected a string")
        if any(value is not None for value in others):
            raise InvalidRequest(
                "a raw prompt has no system message, no thinking and no template",
                hint="write them into the prompt, or leave raw out",
            )
        self._refuse_overlong(prompt)
        return self.tokenizer.encode(prompt, special=True, add_bos=True)

    def _refuse_overlong(self, *texts: str) -> None:
        """Raise ContextOverflow for a prompt that is too long by its length alone, which is known
        before many megabytes of it are taken apart."""
        least = self.tokenizer.least(*texts)
        if least >= self.max_context:
            raise ContextOverflow(
                f"prompt has at least {least:,} tokens, max_context is {self.max_context:,}",
                hint=_more_context(least, self.engine.context, "shorten the prompt"),
            )

    def _reply(self, request: Request, record: Record) -> Generator[Chunk, None, None]:
        with self._lend() as session:
            session.rewind(0)  # a reply never depends on the replies before it
            yield from run(session, self.tokenizer.stream_decoder(markers=True), request, record)

    @contextmanager
    def _lend(self) -> Iterator[Session]:
        """A session for one reply: the idle one, or a new one if others are running."""
        with self._lock:
            session, self._idle = self._idle, None
        if session is None:
            session = self.session()
        healthy = False
        try:
            yield session
            healthy = True
        except GeneratorExit:
            healthy = True  # the consumer stopped between two tokens
            raise
        finally:
            with self._lock:
                kept = healthy and self._idle is None and self._engine is not None
                if kept:
                    self._idle = session
            if not kept:
                session.close()


def _backend(wanted: Any) -> Backend:
    """The backend of a name, or the one that is given."""
    if isinstance(wanted, str):
        return backends.select(wanted)
    if not callable(getattr(wanted, "load", None)):
        names = ", ".join(backends.NAMES)
        raise InvalidRequest(f"backend is {wanted!r:.80}, expected a name", hint=f"auto, {names}")
    found: Backend = wanted
    return found


def _more_context(needed: int, model_context: int, remedy: str) -> str:
    """What to do when a prompt of `needed` tokens does not fit; `remedy` is what always helps."""
    if needed >= model_context:
        return f"{remedy}: the model was made for {model_context:,} tokens"
    larger = min(model_context, 1 << needed.bit_length())
    return f"{remedy}, or --max-context {larger} (in Python: max_context={larger})"


def _recommended(settings: Mapping[str, Any] | None) -> Sampling | None:
    """The sampling of a manifest; None where it recommends nothing."""
    if not settings:
        return None
    try:
        return Sampling(**settings)
    except (TypeError, InvalidRequest) as error:
        raise FormatError(f"manifest.json: sampling cannot be used: {error}") from error
