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
from bonsai.thinking import Splitter, Thinking

__all__ = ["Chunk", "Completion", "Record", "Request", "Stream", "Timings", "Usage", "run"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one reply: those of the prompt, those of them that the state already held
    (`cached_tokens`), all of the reply, an end marker included, and those of them that are
    reasoning (`reasoning_tokens`)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


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
    """A reply. `str(completion)` is its text: the answer, without what the model thought before it,
    which is `reasoning` (empty for models that do not think).

    `finish_reason`: "stop" (the model ended it, or a stop string), "length" (max_tokens, or the
    context is full) or "cancelled" (the stream was closed). `tokens` are all ids of the reply, also
    those whose text was cut off by a stop string, markers of reasoning, and the end marker.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply, and the ids that came since the piece before it.

    It is a piece of the answer (`text`) or of the reasoning before it (`reasoning`): one of the two
    is empty, never both.
    """

    text: str
    tokens: tuple[int, ...]
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Request:
    """What one reply needs, already checked: the prompt fits, every id is one of the model's.

    `stops` end the answer; they are not looked for in reasoning. Without `thinking` everything is
    answer.
    """

    prompt: Sequence[int]
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    eos: frozenset[int]
    progress: Progress | None = None
    thinking: Thinking | None = None


@dataclass(slots=True)
class Record:
    """What has happened so far in one reply; written by `run` only, but for `cancelled`."""

    prompt_tokens: int
    cached_tokens: int = 0
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
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
            Usage(self.prompt_tokens, len(self.tokens), self.cached_tokens, self.reasoning_tokens),
            Timings(
                self.prefill_s,
                _per_second(prefilled, self.prefill_s),
                self.decode_s,
                _per_second(len(self.tokens) - 1, self.decode_s),
            ),
            self.reasoning,
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
    """Prefill what `session` does not hold yet, then yield pieces until the reply ends.

    `decoder` is a fresh stream decoder of the tokenizer, for which markers of reasoning are text.
    When the last chunk is yielded the session is no longer decoding.
    """
    _prefill(session, request, record)
    reader = _Reader(decoder, request)
    piece = ("", "")
    shown = 0  # ids of the chunks so far
    with closing(_decode(session, request, record, reader)) as ids:
        for token in ids:
            if token in request.eos:
                record.finish_reason = "stop"
                break
            piece = reader.push(token)
            record.reasoning_tokens += reader.thinking
            if reader.stopped:
                break
            for chunk in _chunks(piece, record, shown):
                shown += len(chunk.tokens)
                yield chunk
    if not reader.stopped:
        piece = reader.flush()
    if reader.stopped:
        record.finish_reason = "stop"
    yield from _chunks(piece, record, shown)


class _Reader:
    """Ids to (reasoning, answer), as far as they may be shown: two texts, both often empty."""

    def __init__(self, decoder: Any, request: Request) -> None:
        thinking = request.thinking
        self._decoder = decoder
        self._splitter = (
            Splitter(None) if thinking is None else Splitter(thinking.markers, thinking.opened)
        )
        self._stops = StopStrings(request.stops)
        self._left = ""  # reasoning that goes with the next piece

    @property
    def thinking(self) -> bool:
        return self._splitter.thinking

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    def push(self, token: int) -> tuple[str, str]:
        return self._piece(self._decoder.push(token))

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more ids come."""
        reasoning, answer = self._piece(self._decoder.flush())
        if self.stopped:
            return reasoning, answer
        more, held = self._splitter.flush()
        return reasoning + more, answer + self._stops.push(held) + self._stops.flush()

    def end_thinking(self) -> None:
        """What comes now is answer."""
        self._left, _ = self._piece(self._decoder.flush())
        self._left += self._splitter.end()

    def _piece(self, text: str) -> tuple[str, str]:
        reasoning, answer = self._splitter.push(text)
        reasoning, self._left = self._left + reasoning, ""
        return reasoning, self._stops.push(answer)


def _chunks(piece: tuple[str, str], record: Record, shown: int) -> Iterator[Chunk]:
    """The chunks of a piece, written into `record`; `shown` ids were in chunks before."""
    reasoning, text = piece
    if reasoning:
        record.reasoning += reasoning
        tokens = tuple(record.tokens[shown:])
        shown += len(tokens)
        yield Chunk("", tokens, reasoning)
    if text:
        record.text += text
        yield Chunk(text, tuple(record.tokens[shown:]))


def _prefill(session: Session, request: Request, record: Record) -> None:
    started = time.perf_counter()
    # At least one token is computed again, so that there are logits after the last one.
    common = _shared_prefix(session.tokens, request.prompt[:-1])
    record.cached_tokens = session.rewind(common)
    session.prefill(request.prompt[record.cached_tokens :], request.progress)
    record.prefill_s = time.perf_counter() - started


def _decode(
    session: Session, request: Request, record: Record, reader: _Reader
) -> Generator[int, None, None]:
    """The ids that the model produces, at most max_tokens of the whole reply; thinking that takes
    too long is ended in between."""
    limit = None if request.thinking is None else request.thinking.limit
    yield from _produced(session, request, record, reader, limit)
    if _thought_too_long(reader, record, limit) and not record.cancelled:
        assert request.thinking is not None
        if _end_thinking(session, request, record, request.thinking.closing):
            reader.end_thinking()
            yield from _produced(session, request, record, reader, None)


def _produced(
    session: Session, request: Request, record: Record, reader: _Reader, thought: int | None
) -> Generator[int, None, None]:
    """Ids with their time, until `thought` of them are reasoning; "length" unless the caller finds
    another reason."""
    with closing(cast("Generator[int, None, None]", session.decode(request.sampling))) as ids:
        while not record.cancelled and len(record.tokens) < request.max_tokens:
            if _thought_too_long(reader, record, thought):
                break
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


def _thought_too_long(reader: _Reader, record: Record, limit: int | None) -> bool:
    return limit is not None and reader.thinking and record.reasoning_tokens >= limit


def _end_thinking(
    session: Session, request: Request, record: Record, closing_ids: Sequence[int]
) -> bool:
    """Let the session hold the end of the reasoning, as if the model had written it. False, and the
    reply ends with "length", where that leaves no room for an answer."""
    count = len(closing_ids)
    if (
        len(record.tokens) + count >= request.max_tokens
        or len(session.tokens) + count >= session.max_context
    ):
        record.finish_reason = "length"
        return False
    started = time.perf_counter()
    session.prefill(closing_ids)
    record.decode_s += time.perf_counter() - started
    record.tokens += closing_ids
    return True


def _shared_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many first ids are the same."""
    for i, (a, b) in enumerate(zip(held, wanted, strict=False)):
        if a != b:
            return i
    return min(len(held), len(wanted))


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
