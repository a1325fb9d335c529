"""A backend without weights that says what it is told: for tests of everything above a `Session`.

Knows the Backend, Engine and Session protocols. Computes nothing and ignores sampling.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from bonsai.errors import BonsaiError, ContextOverflow, InvalidRequest
from bonsai.sampling import Sampling
from bonsai.thinking import Markers, Thinking

if TYPE_CHECKING:
    from bonsai.backends import MemoryLimit, Progress
    from bonsai.format import Checkpoint
    from bonsai.generate import Model

__all__ = ["ScriptedBackend", "ScriptedTokenizer", "model"]

Piece = str | bytes | BaseException
Thinks = Literal["prompt", "reply"]
END = 256
MARKERS = Markers("<think>", "</think>")


def model(
    backend: ScriptedBackend,
    *,
    max_context: int | None = None,
    sampling: Sampling | None = None,
    thinks: Thinks | None = None,
) -> Model:
    """A Model that needs no files: `backend` with a `ScriptedTokenizer`, which knows its pieces.

    `thinks` makes it one that thinks between <think> and </think>: "reply" where the replies of the
    script begin with <think> themselves, "prompt" where the template has written that already.
    """
    from bonsai.generate import Model

    tokenizer = ScriptedTokenizer(backend.replies, thinks)
    engine = backend.engine([tokenizer.script(r) for r in backend.replies], END, tokenizer.size)
    return Model(
        engine, cast(Any, tokenizer), name="scripted", max_context=max_context, sampling=sampling
    )


class ScriptedBackend:
    """Replies with the pieces of a script, each of them one token, and an end marker.

        backend = ScriptedBackend(["Hello", " world"])
        assert str(bonsai.testing.model(backend).generate("Hi")) == "Hello world"

    A piece is text, bytes (part of a character, say), or an exception, which is raised when that
    token is asked for. Several lists are the replies to several prompts; the last one is repeated.
    With `ends=False` there is no end marker and the pieces start over, for ever.

    `bonsai.load(path, backend=ScriptedBackend(...))` uses the tokenizer of a real checkpoint; a
    piece of text may then be several tokens, and bytes are refused.

    What happened: `prompts` (ids given to each prefill), `samplings` (one for each reply), `steps`
    (ids decoded) and `open_sessions`.
    """

    name = "scripted"

    def __init__(self, *replies: Sequence[Piece], ends: bool = True, context: int = 4096) -> None:
        if not replies or any(isinstance(r, (str, bytes)) for r in replies):
            raise InvalidRequest("ScriptedBackend takes lists of pieces, one list for each reply")
        self.replies = [list(r) for r in replies]
        for piece in (p for r in self.replies for p in r):
            if not isinstance(piece, (str, bytes, BaseException)) or piece in ("", b""):
                raise InvalidRequest(f"a piece is {piece!r}, expected text, bytes or an exception")
        if not ends and not all(self.replies):
            raise InvalidRequest("without an end marker every reply needs a piece")
        self.ends = ends
        self.context = context
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.steps = 0
        self.open_sessions = 0
        self.lock = threading.Lock()

    def status(self) -> str:
        return "a script"

    def load(
        self,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        threads: int | None = None,
        memory: MemoryLimit | None = None,
    ) -> ScriptedEngine:
        from bonsai.tokenizer import Tokenizer

        tokenizer = Tokenizer.open(checkpoint.path)
        scripts = [_encoded(reply, tokenizer) for reply in self.replies]
        end = min(tokenizer.eos) if self.ends else -1
        return self.engine(scripts, end, checkpoint.config["vocab"])

    def engine(self, scripts: list[list[Any]], end: int, vocab: int) -> ScriptedEngine:
        """Weights, so to speak: scripts of ids and exceptions, the end marker, and how many ids."""
        return ScriptedEngine(self, scripts, end, vocab)


class ScriptedEngine:
    """The Engine of a ScriptedBackend."""

    description = "scripted: no weights"
    bytes_per_token = 0

    def __init__(
        self, backend: ScriptedBackend, scripts: list[list[Any]], end: int, vocab: int
    ) -> None:
        self.backend = backend
        self.context = backend.context
        self.vocab = vocab
        self._scripts = scripts
        self._end = end
        self._next = 0

    def session(self, max_context: int, valid_ids: int) -> ScriptedSession:
        with self.backend.lock:
            self.backend.open_sessions += 1
        return ScriptedSession(self, max_context)

    def reply(self, *, take: bool) -> Iterator[Any]:
        """The ids of the next reply, without end; `take` moves on to the one after it."""
        with self.backend.lock:
            script = self._scripts[min(self._next, len(self._scripts) - 1)]
            self._next += take
        yield from script
        while True:
            yield from (self._end,) if self.backend.ends else script


class ScriptedSession:
    """The Session of a ScriptedBackend: keeps the ids, and reads its replies from the script."""

    def __init__(self, engine: ScriptedEngine, max_context: int) -> None:
        self.max_context = max_context
        self._engine = engine
        self._tokens: list[int] = []
        self._open = True

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        self._check_open()
        if len(self._tokens) + len(ids) > self.max_context:
            raise ContextOverflow(
                f"{len(self._tokens) + len(ids)} tokens, max_context is {self.max_context}"
            )
        self._engine.backend.prompts.append(list(ids))
        self._tokens += ids
        if progress is not None:
            progress("prefill", len(ids), len(ids))

    def logits(self) -> np.ndarray:
        """1 for the id that a reply would start with, 0 for the others."""
        self._check_open()
        scores = np.zeros(self._engine.vocab, np.float32)
        scores[next(self._engine.reply(take=False))] = 1.0
        return scores

    def score(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """After each id the logits of `logits`, whatever the id is."""
        self.prefill(ids)
        return (self.logits()[None] for _ in ids)

    def decode(self, sampling: Sampling) -> Iterator[int]:
        self._check_open()
        self._engine.backend.samplings.append(sampling)
        for piece in self._engine.reply(take=True):
            if len(self._tokens) >= self.max_context:
                return
            if isinstance(piece, BaseException):
                raise piece
            with self._engine.backend.lock:
                self._engine.backend.steps += 1
            self._tokens.append(piece)
            yield piece

    def rewind(self, length: int) -> int:
        self._check_open()
        del self._tokens[length:]
        return len(self._tokens)

    def snapshot(self) -> Any:
        self._check_open()
        return tuple(self._tokens)

    def restore(self, snapshot: Any) -> None:
        self._check_open()
        self._tokens = list(snapshot)

    def close(self) -> None:
        if self._open:
            with self._engine.backend.lock:
                self._engine.backend.open_sessions -= 1
        self._open = False

    def __enter__(self) -> ScriptedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise BonsaiError("the session is closed")


class ScriptedTokenizer:
    """256 bytes, an end marker, and the pieces of a script; the Tokenizer of `model`.

    Text is encoded as the longest pieces that it contains, and bytes where there are none. A chat
    is "role: content" lines, and "assistant: " where the reply begins. Templates of models that
    think (`thinks`) have the switch `enable_thinking`, and "effort: " before the first line where
    they get a reasoning_effort; what was thought in earlier turns is left out.
    """

    bos = None
    eos = frozenset({END})
    has_chat_template = True

    def __init__(self, replies: Sequence[Sequence[Piece]], thinks: Thinks | None = None) -> None:
        self.markers = None if thinks is None else MARKERS
        self.thinking_switch = None if thinks is None else "enable_thinking"
        self._thinks = thinks
        pieces = [_bytes(p) for r in replies for p in r if not isinstance(p, BaseException)]
        self._bytes = [bytes([b]) for b in range(256)] + [b""]
        self._bytes += [p for p in dict.fromkeys(pieces) if p]
        self._ids = {piece: i for i, piece in enumerate(self._bytes)}
        longest_first = sorted(self._bytes[END + 1 :], key=len, reverse=True)
        self._split = re.compile(b"|".join(map(re.escape, longest_first)) + b"|.", re.DOTALL)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def script(self, reply: Sequence[Piece]) -> list[Any]:
        """The pieces as ids; exceptions stay."""
        return [p if isinstance(p, BaseException) else self._ids[_bytes(p)] for p in reply]

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return [self._ids[piece] for piece in self._split.findall(text.encode()) if piece]

    def least(self, *texts: str) -> int:
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    def vocabulary(self) -> dict[str, int]:
        return {ascii(piece): i for i, piece in enumerate(self._bytes)}

    def stream_decoder(self, *, special: bool = False, markers: bool = False) -> ScriptedDecoder:
        return ScriptedDecoder(self._bytes)

    def thinking(self, prompt: Sequence[int], limit: int | None = None) -> Thinking | None:
        if self.markers is None:
            return None
        opened = self.decode(prompt[-16:]).endswith(MARKERS.begin + "\n")
        return Thinking(MARKERS, opened, limit, tuple(self.encode("\n</think>\n\n")))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        effort = self._effort(chat_template_kwargs or {})
        lines = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        text = effort + lines + "assistant: " * add_generation_prompt
        if self._thinks is None or not add_generation_prompt:
            return text
        if think is False:
            return text + "<think>\n\n</think>\n\n"
        return text + "<think>\n" * (self._thinks == "prompt")

    def _effort(self, given: Mapping[str, Any]) -> str:
        known = set() if self._thinks is None else {"reasoning_effort"}
        for name in given.keys() - known:
            raise InvalidRequest(f"the chat template has no variable {name!r:.80}")
        return f"effort: {given['reasoning_effort']}\n" if given else ""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        text = self.render(
            messages,
            think=think,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode(text)


class ScriptedDecoder:
    """Ids to text, as soon as a character is complete."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def _encoded(reply: Sequence[Piece], tokenizer: Any) -> list[Any]:
    """The script of a reply in a real tokenizer's ids."""
    script: list[Any] = []
    for piece in reply:
        if isinstance(piece, bytes):
            raise InvalidRequest(f"a real tokenizer cannot be made to say the bytes {piece!r}")
        script += [piece] if isinstance(piece, BaseException) else tokenizer.encode(piece)
    return script
