"""The filters, functions and methods that a template may use, each measured before it works.

jinja's own are wrapped where their result cannot be much larger than their input, and replaced here
where it can. What no chat template needs and is hard to bound (`lipsum`, `urlize`, ...) is absent.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from bonsai.tokenizer.meter import METER, Meter, TemplateLimit, steps

__all__ = ["check_operator", "checked_call", "filter_table", "function_table"]

LONGEST_NUMBER = 8192  # bits; arithmetic on longer ones takes noticeable time
WIDEST = 1000  # columns that padding and indentation may ask for
MOST_PARTS = 1 << 18  # that `batch` and `slice` may make

LINEAR = frozenset(
    """abs attr capitalize count d default dictsort e escape first float forceescape groupby items
    last length list lower map max min reject rejectattr reverse safe select selectattr sort string
    title trim truncate unique upper urlencode wordcount""".split()
)
ITERATING = frozenset(
    """batch groupby join list map max min reject rejectattr select selectattr slice sort
    unique""".split()
)
WHITESPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
_SIZED = (str, list, tuple)
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize casefold center count endswith expandtabs find format index isalnum isalpha
        isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
        join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
        rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
        zfill""".split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
    int: frozenset(["bit_length"]),
    float: frozenset(["is_integer"]),
}


def filter_table() -> dict[str, Callable[..., Any]]:
    """All filters by name. The names with spaces are internal: no template can spell them."""
    table = {name: _metered(name, FILTERS[name]) for name in LINEAR}
    table |= {name: _metered(name, own) for name, own in OWN.items()}
    table["steps of a loop"] = lambda value, weight: steps(value, weight, METER.get())
    table["literal"] = lambda value: METER.get().weighed(value)
    table["concatenation"] = lambda values: METER.get().made(_joined("", values))
    table["part"] = lambda value, start, stop, step: METER.get().made(value[start:stop:step])
    return table


def function_table() -> dict[str, Any]:
    """What a template finds besides its variables."""
    return {
        "range": safe_range,  # of at most 100,000
        "dict": lambda *args, **kwargs: METER.get().weighed(dict(*args, **kwargs)),
        "namespace": QuietNamespace,
        "cycler": jinja2.utils.Cycler,
        "joiner": jinja2.utils.Joiner,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }


class QuietNamespace(Namespace):
    """A namespace whose text does not show what it holds, which may be another one, and so on."""

    def __repr__(self) -> str:
        return "<namespace>"


def check_operator(operator: str, left: Any, right: Any, meter: Meter) -> None:
    """Before `left operator right` is computed."""
    if operator == "%" and isinstance(left, str):
        _check_percent(left, right, meter)
    elif isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**":
            bits = max(bits, (abs(left) - 1).bit_length() * abs(right))
        elif operator == "*":
            bits = left.bit_length() + right.bit_length()
        _check_number(bits)
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, _SIZED) and isinstance(count, int):
                meter.room(len(sequence) * max(count, 0))
    elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
        meter.room(len(left) + len(right))


def checked_call(
    called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meter: Meter
) -> tuple[Any, ...]:
    """The arguments to call `called` with. Methods that are not in METHODS are refused, those of
    strings are measured."""
    method = getattr(called, "__wrapped__", called)  # jinja wraps str.format
    owner = getattr(method, "__self__", None)
    builtin = isinstance(method, types.BuiltinMethodType) and not isinstance(
        owner, types.ModuleType
    )
    kind = next((k for k in type(owner).__mro__ if k in METHODS), None)
    if kind is None and not builtin:
        return args  # a macro, a function of ours, or a method that jinja has written in Python
    name = method.__name__
    if kind is None or name not in METHODS[kind]:
        raise SecurityError(f"the method {name} of {type(owner).__name__} is not allowed")
    if isinstance(owner, str):
        if name == "join" and len(args) == 1:
            args = ([_text(value) for value in steps(args[0], 1, meter)],)
        _check_string_method(owner, name, (*args, *kwargs.values()), meter)
    return args


def _check_string_method(text: str, name: str, values: tuple[Any, ...], meter: Meter) -> None:
    numbers = [v for v in values if isinstance(v, int)]
    strings = [v for v in values if isinstance(v, str)]
    meter.step(len(text) // 64)
    if name in ("center", "ljust", "rjust", "zfill"):
        for width in numbers:
            _bounded(width, f"the width of {name}")
    elif name == "expandtabs":
        meter.room(len(text) + text.count("\t") * max(map(abs, numbers), default=8))
    elif name == "replace" and len(strings) == 2:
        meter.room(_replaced_size(text, *strings))
    elif name == "join":
        meter.room(sum(len(v) + len(text) for v in values[0]) if values else 0)
    elif name in ("split", "rsplit", "splitlines"):
        meter.count(text.count(strings[0]) if strings and strings[0] else _parts(text, meter))
    elif name == "format":
        _check_format(text, values, meter)


def _parts(text: str, meter: Meter) -> int:
    """At least the number of words, and of lines."""
    return len(text) if len(text) <= meter.elements else sum(map(text.count, WHITESPACE)) + 1


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) * len(new) if len(new) > len(old) else 0)


def _check_percent(text: str, values: Any, meter: Meter) -> None:
    """Before `text % values`."""
    specs = re.findall(r"%(?:\([^)%]*\))?([^a-zA-Z%]*)", text)
    if any("*" in spec for spec in specs):
        raise TemplateLimit("a width is taken from the arguments")
    values = values.values() if isinstance(values, dict) else values
    _check_fields(text, specs, values, meter)


def _check_format(text: str, values: Any, meter: Meter) -> None:
    """Before `text.format(*values)`."""
    fields = re.findall(r"\{[^{}:]*(?::([^{}]*)(\{)?)?", text)
    if any(nested for _, nested in fields):
        raise TemplateLimit("a width is taken from the arguments")
    _check_fields(text, [spec for spec, _ in fields], values, meter)


def _check_fields(text: str, specs: list[str], values: Any, meter: Meter) -> None:
    for spec in specs:
        for number in re.findall(r"\d{1,9}", spec):
            _bounded(int(number), "the width of a field")
    several = isinstance(values, (tuple, list, ValuesView))
    parts = values if several else (values,)
    longest = max((len(_text(part)) for part in parts), default=0)
    meter.room(len(text) + len(specs) * (WIDEST + longest))


def _check_number(bits: int) -> None:
    if bits > LONGEST_NUMBER:
        raise TemplateLimit("it computes with numbers that are too long")


# ---- filters --------------------------------------------------------------------------------


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function` with its inputs counted as steps and its result charged."""

    @wraps(function)  # keeps what jinja looks for: whether to pass the environment first
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.step()
        for value in (*args, *kwargs.values()):
            if isinstance(value, str) and name not in ITERATING:
                meter.step(len(value) // 64)
            elif isinstance(value, (str, list, tuple, dict, range)):
                meter.count(len(value))
        args = tuple(steps(a, 1, meter) if isinstance(a, types.GeneratorType) else a for a in args)
        return meter.made(function(*args, **kwargs))

    return metered


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _bounded(value: Any, what: str, limit: int = WIDEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is not a number")
    if abs(value) > limit:
        raise TemplateLimit(f"{what} is {str(value)[:40]}, at most {limit} is allowed")
    return value


def _joined(separator: str, values: Iterable[Any]) -> str:
    meter = METER.get()
    texts = [_text(value) for value in steps(values, 1, meter)]
    meter.room(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _joined(_text(d), value)


@jinja2.pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    total = start
    for value in steps(iterable, 1, METER.get()):
        if not isinstance(value, (int, float)):  # the sum of n lists would copy n * n / 2 elements
            raise TypeError(f"sum of {type(value).__name__}, expected numbers")
        total += value
    return total


def _center(value: Any, width: int = 80) -> str:
    return _text(value).center(_bounded(width, "the width of center"))


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(s)
    columns = _bounded(len(width) if isinstance(width, str) else width, "the indentation")
    METER.get().room(len(text) + (len(text.splitlines()) + 1) * columns)
    return do_indent(text, width, first, blank)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    s, old, new = _text(s), _text(old), _text(new)
    METER.get().room(_replaced_size(s, old, new))
    return s.replace(old, new, -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text = _text(value)
    _check_percent(text, kwargs or args, METER.get())
    return text % (kwargs or args)


def _batch(value: Any, linecount: int, fill_with: Any = None) -> list[Any]:
    _bounded(linecount, "the length of a batch", MOST_PARTS)
    return METER.get().weighed(list(FILTERS["batch"](value, linecount, fill_with)))


@jinja2.pass_eval_context
def _slice(context: Any, value: Any, slices: int, fill_with: Any = None) -> list[Any]:
    _bounded(slices, "the number of slices", MOST_PARTS)
    sliced = FILTERS["slice"](context, value, slices, fill_with)
    return METER.get().weighed(list(sliced))


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    number = FILTERS["int"](value, default, base)
    _check_number(number.bit_length() if isinstance(number, int) else 0)
    return number


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    return FILTERS["round"](value, _bounded(precision, "the precision", 100), method)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None:
        _bounded(len(indent) if isinstance(indent, str) else indent, "the indentation", 16)
    if separators is not None and sum(map(len, separators)) > 16:
        raise TemplateLimit("the separators of tojson are too long")
    text = json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Private-use characters stay: user text is marked with them (`messages`).
    return _ESCAPE.sub(_private, text) if ensure_ascii else text


_ESCAPE = re.compile(r"\\(?:u([ef][0-9a-f]{3})|.)")


def _private(escape: re.Match[str]) -> str:
    code = int(escape[1], 16) if escape[1] else 0
    return chr(code) if 0xE000 <= code <= 0xF8FF else escape[0]


OWN: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "tojson": _tojson,
}


# ---- functions ------------------------------------------------------------------------------


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(_text(message))


def _strftime_now(format: str) -> str:
    # The C library pads "%1000000000d" to as many characters, so only plain fields are passed on.
    if len(format) > 256 or re.search(r"%-?[^a-zA-Z%-]", format):
        raise TemplateLimit("the date format is too long, or has a width")
    return datetime.now().strftime(format)
