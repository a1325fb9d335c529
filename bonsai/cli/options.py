"""Every flag that more than one verb has, declared once, and the types of what people type.

Knows names, ranges and help texts. Turns the model flags into a `Load` and the sampling flags into
`Choices`; both import an array library only when they are called.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bonsai.cli.console import Console, Report, is_terminal

if TYPE_CHECKING:
    from bonsai.generate import Model
    from bonsai.sampling import Sampling

__all__ = [
    "TEXT",
    "Choices",
    "Load",
    "as_json",
    "console",
    "json_flag",
    "model_options",
    "read_standard_input",
    "sampling_options",
    "standard_input_is_terminal",
    "standard_input_lines",
    "usage",
    "verbosity",
]

Verb = TypeVar("Verb", bound=Callable[..., Any])


class Text(click.ParamType):
    """An argument that is real text: no NUL, nothing that was not UTF-8 on the command line."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value)
        if "\0" in text:
            self.fail("contains a NUL character", param, ctx)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self.fail("is not valid UTF-8 text", param, ctx)
        return text


class BackendName(click.ParamType):
    """The name of a backend in the package, or "auto"."""

    name = "backend"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        from bonsai.backends import MODES, NAMES

        if value not in ("auto", *NAMES, *MODES):
            self.fail(f"{value!r} is not one of auto, {', '.join(NAMES + MODES)}", param, ctx)
        return str(value)


class Memory(click.ParamType):
    """An amount of memory with a unit, in bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        from bonsai.errors import InvalidRequest
        from bonsai.sizes import read_size

        try:
            return read_size(value, "the size")
        except InvalidRequest:
            self.fail(f"{value!r} is not a number with a unit, such as 2GiB or 500MB", param, ctx)


class Finite(click.FloatRange):
    """A number within a range; "nan" and "inf" are in none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


WAIT_S = 1.0  # after this long a person wonders what the program waits for
TEXT = Text()
POSITIVE = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Load:
    """The model flags; call it to load the model. The first thing that imports an array library."""

    name: str
    backend: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    revision: str | None = None
    memory_limit: int | None = None

    def __call__(self, progress: Report | None = None) -> Model:
        from bonsai import generate

        return generate.load(
            self.name,
            backend=self.backend,
            max_context=self.max_context,
            threads=self.threads,
            revision=self.revision,
            memory_limit=self.memory_limit,
            progress=progress,
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """The sampling flags that were given; the others stay as the model's makers recommend."""

    given: dict[str, Any]

    def over(self, recommended: Sampling) -> Sampling:
        """The recommended settings with the given ones in their place."""
        from dataclasses import replace

        chosen = replace(recommended, **self.given)
        idle = [name for name in ("top_p", "top_k", "min_p") if name in self.given]
        if chosen.temperature == 0 and idle:
            flags = ", ".join("--" + name.replace("_", "-") for name in idle)
            console().note(f"the temperature is 0, so {flags} changes nothing; see --temp")
        return chosen


def usage(message: str, hint: str) -> click.UsageError:
    """A usage error with its own hint."""
    error = click.UsageError(message, click.get_current_context(silent=True))
    error.hint = hint  # type: ignore[attr-defined]
    return error


def console() -> Console:
    """The console of this run."""
    return click.get_current_context().ensure_object(Console)


def as_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON as every --json prints it: readable, not escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)


def standard_input_is_terminal() -> bool:
    """Whether reading stdin would wait for a person (a missing stdin is read as empty)."""
    return is_terminal(sys.stdin)


def read_standard_input() -> str:
    """All of stdin as UTF-8 text, without a byte order mark and without its last newline."""
    if sys.stdin is None:
        return ""
    waiting = threading.Timer(WAIT_S, console().note, ["waiting for the end of standard input"])
    waiting.daemon = True
    waiting.start()
    try:
        text = _text(sys.stdin.buffer.read())
    finally:
        waiting.cancel()
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def standard_input_lines() -> Iterator[str]:
    """stdin line by line, each as soon as it is there."""
    if sys.stdin is not None:
        for line in sys.stdin.buffer:
            yield _text(line)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise usage(
            f"standard input is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})",
            "convert it first, for example with: iconv -t UTF-8",
        ) from error


def verbosity(verb: Verb) -> Verb:
    """-q and -v, which only set the level of this run's console."""

    def level(value: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        def set_level(ctx: click.Context, _: click.Parameter, given: bool) -> None:
            if given:
                ctx.ensure_object(Console).level = value

        return set_level

    verb = click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=level(1),
        help="More on stderr: timings even when it is no terminal, tracebacks.",
    )(verb)  # fmt: skip
    return click.option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=level(-1),
        help="Nothing on stderr but errors.",
    )(verb)  # fmt: skip


json_flag = click.option("--json", "json_", is_flag=True, help="One JSON object on stdout.")


def model_options(verb: Verb) -> Verb:
    """-m and where to run; the verb gets them as `load`."""

    @functools.wraps(verb)
    def with_load(
        *args: Any, model: str | None, backend: str, max_context: int | None,
        threads: int | None, revision: str | None, memory_limit: int | None, **rest: Any,
    ) -> Any:  # fmt: skip
        if not model:
            raise usage(
                "no model given",
                "-m NAME_OR_PATH, or set BONSAI_MODEL; `bonsai models ls` lists what is here",
            )
        load = Load(model, backend, max_context, threads, revision, memory_limit)
        return verb(*args, load=load, **rest)

    for decorator in reversed((
        click.option("-m", "--model", type=TEXT, metavar="MODEL", envvar="BONSAI_MODEL",
                     help="A name or a directory. Default: $BONSAI_MODEL."),
        click.option("--backend", type=BackendName(), metavar="BACKEND", envvar="BONSAI_BACKEND",
                     default="auto",
                     help="auto, mlx, cpu or reference; mlx-exact and cpu-exact have float32 "
                     "activations. Default: $BONSAI_BACKEND, or auto."),
        click.option("--max-context", type=POSITIVE, metavar="N",
                     help="Tokens that prompt and reply may have together. Default: what the "
                     "model was made for, at most 8192."),
        click.option("--threads", type=POSITIVE, metavar="N",
                     help="CPU threads. Default: the CPUs that this process may use."),
        click.option("--memory-limit", type=Memory(), metavar="SIZE",
                     help="Memory that the process may have, such as 2GiB; layers that do not fit "
                     "are read from the disk as they are needed."),
        click.option("--revision", type=TEXT, metavar="REV",
                     help="Branch, tag or commit of a model that was pulled."),
    )):  # fmt: skip
        with_load = decorator(with_load)
    return with_load  # type: ignore[return-value]


SAMPLING_FLAGS: tuple[tuple[str, Any, str, str], ...] = (
    ("temp", Finite(min=0), "X", "Temperature; 0 always takes the best token."),
    ("top-p", Finite(0, 1), "X", "Keep the fewest tokens with this much probability."),
    ("top-k", click.IntRange(min=0), "N", "Keep the N best tokens; 0 is off."),
    ("min-p", Finite(0, 1), "X", "Keep tokens this probable relative to the best one."),
    ("seed", click.IntRange(0, 2**64 - 1), "N", "The same seed gives the same reply."),
    ("repetition-penalty", Finite(0.01, 100), "X",
     "Above 1 makes tokens already seen less likely."),
)  # fmt: skip


def sampling_options(verb: Verb) -> Verb:
    """How tokens are chosen (the verb gets `choices`), `max_tokens`, `stop` and `think`."""

    @functools.wraps(verb)
    def with_choices(*args: Any, **values: Any) -> Any:
        given = {}
        for flag, *_ in SAMPLING_FLAGS:
            name = flag.replace("-", "_")
            value = values.pop(name)
            if value is not None:
                given["temperature" if name == "temp" else name] = value
        return verb(*args, choices=Choices(given), **values)

    decorators = [
        click.option("-n", "--max-tokens", type=POSITIVE, metavar="N",
                     help="The longest reply. Default: until the model or the context ends."),
        *(click.option(f"--{flag}", type=kind, metavar=metavar, help=text)
          for flag, kind, metavar, text in SAMPLING_FLAGS),
        click.option("--stop", type=TEXT, multiple=True, metavar="TEXT",
                     help="End the reply before this text; may be given more than once."),
        click.option("--think/--no-think", default=None,
                     help="The thinking switch of the model's chat template."),
    ]  # fmt: skip
    for decorator in reversed(decorators):
        with_choices = decorator(with_choices)
    return with_choices  # type: ignore[return-value]
