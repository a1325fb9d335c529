"""The tags that enclose reasoning: found among the added tokens and in the chat template.

Knows how such tags look. Does not know ids, or what the model makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bonsai.thinking import Markers

__all__ = ["find_markers"]

# <think>, [THINK], <|thinking|>, <seed:think>; the end has a slash before the name.
_BEGIN = re.compile(r"(<\|?|\[)([\w:]*think[\w:]*)(\|?>|\])", re.IGNORECASE)


def find_markers(tokens: Iterable[str], template: str) -> Markers | None:
    """The pair of tags that the model uses; None for a model whose files have none.

    Added tokens that the template writes come first, then tags that only the template has (they
    are ordinary text to the model), then added tokens that it leaves to the model.
    """
    added = set(tokens)
    by_tokens = list(_pairs(sorted(added), added))
    by_template = list(_pairs((m[0] for m in _BEGIN.finditer(template)), template))
    both = [pair for pair in by_tokens if pair.begin in template or pair.end in template]
    return next(iter([*both, *by_template, *by_tokens]), None)


def _pairs(candidates: Iterable[str], known: set[str] | str) -> Iterator[Markers]:
    """Those of `candidates` that are begin tags and whose end is in `known`."""
    for text in candidates:
        match = _BEGIN.fullmatch(text)
        if match is not None and (end := f"{match[1]}/{match[2]}{match[3]}") in known:
            yield Markers(text, end)
