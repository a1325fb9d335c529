"""One reply: ids from a session become text, until something ends it.

Knows sessions, decoders and stop rules. Does not know models, files or chat templates: `generate`
and `chat` check what the user asked for and hand over a `Request` that needs no further checks.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from bonsai.backends import Progress, Session
from bonsai.errors import InvalidRequest
from bonsai.sampling import Sampling
from bonsai.stops import StopStrings

__all__ = ["Chunk", "Completion", "Record", "Request", "Stream", "Timings", "Usage", "run"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one reply: those of the prompt, those of them that the state already held
    (`cached_tokens`), and all that the model produced, an end marker included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the model, without what the caller did between pieces, and tokens per second.

    The first token comes out of the prefill, so `decode_tps` counts the tokens after it.
    """

    prefill_s: float
    prefill_tps: float
    decode_s: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply. `str(completion)` is its text.

    `finish_reason`: "stop" (the model ended it, or a stop string), "length" (max_tokens, or the
    context is full) or "cancelled" (the stream was closed). `tokens` are all ids that the model
    produced, also those whose text was cut off by a stop string, and the end marker.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply, never empty, and the ids that came since the piece before it."""

    text: str
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Request:
    """What one reply needs, already checked: the prompt fits, every id is one of the model's."""

    prompt: Sequence[int]
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    eos: frozenset[int]
    progress: Progress | None = None


@dataclass(slots=True)
class Record:
    """What has happened so far in one reply; written by `run` only, but for `cancelled`."""

    prompt_tokens: int
    cached_tokens: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cancelled: bool = False

    def completion(self) -> Completion:
        prefilled = self.prompt_tokens - self.cached_tokens
        return Completion(
            self.text,
            tuple(self.tokens),
            self.finish_reason,
            Usage(self.prompt_tokens, len(self.tokens), self.cached_tokens),
            Timings(
                self.prefill_s,
                _per_second(prefilled, self.prefill_s),
                self.decode_s,
                _per_second(len(self.tokens) - 1, self.decode_s),
            ),
        )


class Stream(Iterator[Chunk]):
    """The pieces of a reply as they come. Closing it stops the work at once; so does `with`.

    `completion` is the whole reply once the stream has ended or was closed. `close` may be called
    from any thread; the work then ends with the token it is at.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], record: Record) -> None:
        self._chunks = chunks
        self._record = record
        self._ended = False
        self._failed = False

    def __next__(self) -> Chunk:
        try:
            return next(self._chunks)
        except (StopIteration, KeyboardInterrupt):
            self._ended = True
            raise
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        self._record.cancelled = True
        try:
            self._chunks.close()
        except ValueError:  # another thread is inside `next`: it will see `cancelled`
            return
        self._ended = not self._failed

    @property
    def completion(self) -> Completion:
        if not self._ended:
            state = "has failed" if self._failed else "has not ended: read it, or close it"
            raise InvalidRequest(f"there is no completion: the stream {state}")
        return self._record.completion()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    session: Session, decoder: Any, request: Request, record: Record
) -> Generator[Chunk, None, None]:
    """Prefill what `session` does not hold yet, then yield text until the reply ends.

    `decoder` is a fresh stream decoder of the tokenizer. When the last chunk is yielded the session
    is no longer decoding.
    """
    _prefill(session, request, record)
    stops = StopStrings(request.stops)
    pending: list[int] = []
    text = ""
    with closing(_decode(session, request, record)) as ids:
        for token in ids:
            pending.append(token)
            if token in request.eos:
                record.finish_reason = "stop"
                break
            text = stops.push(decoder.push(token))
            if stops.matched:
                break
            if text:
                record.text += text
                yield Chunk(text, tuple(pending))
                pending.clear()
    if not stops.matched:
        text = stops.push(decoder.flush()) + stops.flush()
    if stops.matched:
        record.finish_reason = "stop"
    if text:
        record.text += text
        yield Chunk(text, tuple(pending))


def _prefill(session: Session, request: Request, record: Record) -> None:
    started = time.perf_counter()
    # At least one token is computed again, so that there are logits after the last one.
    common = _shared_prefix(session.tokens, request.prompt[:-1])
    record.cached_tokens = session.rewind(common)
    session.prefill(request.prompt[record.cached_tokens :], request.progress)
    record.prefill_s = time.perf_counter() - started


def _decode(session: Session, request: Request, record: Record) -> Generator[int, None, None]:
    """At most max_tokens ids, with their time; "length" unless the caller finds another reason."""
    with closing(cast("Generator[int, None, None]", session.decode(request.sampling))) as ids:
        while not record.cancelled and len(record.tokens) < request.max_tokens:
            started = time.perf_counter()
            token = next(ids, None)
            record.decode_s += time.perf_counter() - started
            if token is None:  # the context is full
                record.finish_reason = "length"
                break
            record.tokens.append(token)
            if len(record.tokens) == request.max_tokens:
                record.finish_reason = "length"
            yield token


def _shared_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many first ids are the same."""
    for i, (a, b) in enumerate(zip(held, wanted, strict=False)):
        if a != b:
            return i
    return min(len(held), len(wanted))


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
