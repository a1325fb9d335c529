"""Regular expressions of a tokenizer that can take exponential time on a short text.

The `tokenizers` library gives up on such a text with a message of its own on stderr, which nobody
can hold back. So the usual forms are refused when the file is read: a repetition that repeats
nothing but a repetition, (a+)+, and one whose choices begin alike, (a|aa)+. Knows just enough of
Oniguruma's syntax for that. Not complete: what else fails on a text is an error of that request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["exploding"]

_GROUP = re.compile(r"\?(?:<?[=!]|[:>~]|[A-Za-z-]*:|<\w+>|'\w+')")
_FLAGS = re.compile(r"\(\?(?:[A-Za-z-]*|#[^)]*)\)")
_ESCAPE = re.compile(r"\\(?:[pPxo]\{[^}]*\}|[kg](?:<[^>]*>|'[^']*')|.)", re.DOTALL)
_REPEAT = re.compile(r"(\*|\+|\?|\{\d*,?\d*\})([?+]?)")


@dataclass(slots=True)
class _Part:
    """One atom with its repetition. `stretches` and `alike` say of the choices in a group whether
    one of them only stretches, and whether two begin with the same part."""

    text: str
    optional: bool = False  # may match nothing
    stretches: bool = False  # matches texts of many lengths by a repetition alone
    alike: bool = False


def _only_stretches(branch: list[_Part]) -> bool:
    """One part stretches, and the others may be nothing."""
    for i, part in enumerate(branch):
        if part.stretches and all(other.optional for other in branch[:i] + branch[i + 1 :]):
            return True
    return False


def exploding(pattern: str) -> str | None:
    """A part of a valid `pattern` that may take exponential time, or None."""
    open_groups: list[tuple[int, str, list[list[_Part]]]] = []
    branches: list[list[_Part]] = [[]]
    at = 0
    while at < len(pattern):
        start = at
        if flags := _FLAGS.match(pattern, at):
            at = flags.end()
            continue
        if pattern[at] == "(":
            kind = _GROUP.match(pattern, at + 1)
            at = kind.end() if kind else at + 1
            open_groups.append((start, kind[0] if kind else "", branches))
            branches = [[]]
            continue
        if pattern[at] == "|":
            branches.append([])
            at += 1
            continue
        if pattern[at] == ")" and open_groups:
            start, opened, outer = open_groups.pop()
            part = _closed(opened, branches)
            branches, at = outer, at + 1
        else:
            at = _end_of_atom(pattern, at)
            part = _Part(pattern[start:at], optional=pattern[start] in "^$")
        end, endless = _repeat(part, pattern, at)
        if endless and (part.stretches or part.alike):
            return pattern[start:end]
        part.stretches |= endless
        at = end
        part.text = pattern[start:at]
        branches[-1].append(part)
    return None


def _closed(opened: str, branches: list[list[_Part]]) -> _Part:
    if opened in ("?=", "?!", "?<=", "?<!"):
        return _Part("", optional=True)
    optional = any(all(part.optional for part in branch) for branch in branches)
    if opened == "?>":  # gives nothing back
        return _Part("", optional)
    firsts = [branch[0].text for branch in branches if branch]
    alike = len(set(firsts)) < len(firsts)
    return _Part("", optional, any(map(_only_stretches, branches)), alike)


def _end_of_atom(pattern: str, at: int) -> int:
    if escape := _ESCAPE.match(pattern, at):
        return escape.end()
    if pattern[at] != "[":
        return at + 1
    depth, at = 0, at
    while at < len(pattern):
        if escape := _ESCAPE.match(pattern, at):
            at = escape.end()
            continue
        depth += (pattern[at] == "[") - (pattern[at] == "]")
        at += 1
        if not depth:
            break
    return at


def _repeat(part: _Part, pattern: str, at: int) -> tuple[int, bool]:
    """Apply the quantifiers that follow: where they end, and whether one has no limit and gives
    back what it took."""
    endless = False
    while found := _REPEAT.match(pattern, at):
        count, mode = found.groups()
        if count == "{}" or count == "{,}":
            break
        least = count[1:-1].partition(",")[0] if count[0] == "{" else ""
        part.optional |= count in "*?" or (count[0] == "{" and not int(least or 0))
        endless |= (count in "*+" or count.endswith(",}")) and mode != "+"
        at = found.end()
    return at, endless
