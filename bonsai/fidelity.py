"""How well a model predicts a text, and how far two models are apart on it.

Knows tokens, windows and statistics; all of them in float64. Does not know files or backends.
docs/fidelity.md says what is scored and what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bonsai.errors import FormatError, InvalidRequest

if TYPE_CHECKING:
    from bonsai.backends import Session
    from bonsai.generate import Model

__all__ = ["WINDOW", "Comparison", "Perplexity", "Window", "compare", "perplexity", "windows"]

WINDOW = 1024
"""Tokens that a model sees at once; enough that longer windows change little in most texts."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of `tokens` scored tokens; `loss` is the mean of -ln p in nats, `loss_error` its uncertainty.

    The uncertainty is the standard error of the mean, with tokens taken as independent. It is that
    of the text as a sample of all texts; it is no measure of numerical accuracy.
    """

    tokens: int
    loss: float
    loss_error: float
    window: int
    stride: int

    @property
    def value(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def error(self) -> float:
        """The standard error of `value`, to first order."""
        return self.value * self.loss_error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Model B against model A at the same positions of a text.

    kl        KL(A || B) = sum of p_A (ln p_A - ln p_B) over the vocabulary, in nats, per position
    same_top  the fraction of positions where both have the same most probable token
    top_rms   the root of the mean squared difference of the probability of A's most probable token
    a, b      the perplexity of each

    loss_difference is the mean loss of B minus that of A. Its uncertainty is smaller than theirs,
    since both read the same tokens.
    """

    kl: np.ndarray = field(repr=False)
    same_top: float
    top_rms: float
    a: Perplexity
    b: Perplexity
    loss_difference: float
    loss_difference_error: float

    @property
    def ratio(self) -> float:
        """The perplexity of B over that of A."""
        return _exp(self.loss_difference)

    @property
    def ratio_error(self) -> float:
        """The standard error of `ratio`, to first order."""
        return self.ratio * self.loss_difference_error

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def mean_error(self) -> float:
        """The standard error of `mean`, with positions taken as independent."""
        return _standard_error(self.kl)

    @property
    def median(self) -> float:
        return float(np.median(self.kl))

    @property
    def percentile_99(self) -> float:
        return float(np.quantile(self.kl, 0.99))

    @property
    def max(self) -> float:
        return float(self.kl.max())


@dataclass(frozen=True, slots=True)
class Window:
    """The model reads `ids`, and the last `scored` of them are predicted from those before."""

    ids: tuple[int, ...]
    scored: int


def windows(ids: Sequence[int], prefix: Sequence[int], window: int, stride: int) -> list[Window]:
    """Windows of at most `window` tokens in which each of `ids` is scored once.

    Each begins with `prefix` (the bos token of models that have one). The first scores all of its
    tokens, but the very first where there is no prefix to predict it from; each later one its last
    `stride` or, at the end of the text, fewer. These have at least window - stride tokens before
    them. Raises InvalidRequest when nothing can be scored.
    """
    if not len(prefix) < window or not 1 <= stride <= window - max(1, len(prefix)):
        raise InvalidRequest(
            f"a stride of {stride} in windows of {window} tokens is not possible",
            hint="the stride is at least 1 and less than the window",
        )
    width = window - len(prefix)
    made: list[Window] = []
    done = 0
    while done < len(ids):
        end = min(len(ids), done + stride if made else width)
        body = (*prefix, *ids[max(0, end - width) : end])
        scored = min(end - done, len(body) - 1)
        if scored:
            made.append(Window(body, scored))
        done = end
    if not made:
        raise InvalidRequest(
            f"a text of {len(ids)} tokens: there is nothing to predict",
            hint="give a longer text; some thousand tokens make a useful number",
        )
    return made


def perplexity(
    model: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """How well `model` predicts `text`, by strided windows.

    window    tokens that the model sees at once; by default 1024, or its context if that is less
    stride    by how much a window is moved on; by default half a window
    limit     score only the first tokens of the text
    progress  called as progress("score", tokens done, tokens)

    Raises InvalidRequest, ContextOverflow or NumericError.
    """
    plan = _plan((model,), text, window, stride, limit)
    losses = np.empty(plan.total)
    with model.session() as session:
        for i, (log_p, target) in enumerate(_predictions(session, plan)):
            losses[i] = -log_p[target]
            _report(progress, i + 1, plan.total)
    return plan.perplexity(losses)


def compare(
    a: Model,
    b: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """How far `b` is from `a` on `text`; arguments and errors are those of `perplexity`.

    `a` makes the tokens. Raises InvalidRequest where the vocabularies differ.
    """
    _check_vocabularies(a, b)
    plan = _plan((a, b), text, window, stride, limit)
    found = np.empty((5, plan.total))  # loss of A, loss of B, KL, same top, difference at the top
    with ExitStack() as stack:
        rows = [_predictions(stack.enter_context(m.session()), plan) for m in (a, b)]
        for i, ((log_a, target), (log_b, _)) in enumerate(zip(*rows, strict=True)):
            found[:, i] = (-log_a[target], -log_b[target], *_distance(log_a, log_b))
            _report(progress, i + 1, plan.total)
    difference = found[1] - found[0]
    return Comparison(
        kl=found[2],
        same_top=float(found[3].mean()),
        top_rms=float(np.sqrt((found[4] ** 2).mean())),
        a=plan.perplexity(found[0]),
        b=plan.perplexity(found[1]),
        loss_difference=float(difference.mean()),
        loss_difference_error=_standard_error(difference),
    )


def _distance(log_a: np.ndarray, log_b: np.ndarray) -> tuple[float, bool, float]:
    """(KL(A || B), whether the top tokens agree, p_B - p_A of the top token of A)."""
    p_a, top = np.exp(log_a), int(log_a.argmax())
    # The sum of positive and negative terms can end a rounding error below 0, which KL never is.
    kl = max(0.0, float(p_a @ (log_a - log_b)))
    return kl, top == int(log_b.argmax()), float(np.exp(log_b[top]) - p_a[top])


@dataclass(frozen=True, slots=True)
class _Plan:
    windows: list[Window]
    window: int
    stride: int
    valid: int  # ids below this are tokens, and what probabilities are over

    @property
    def total(self) -> int:
        return sum(part.scored for part in self.windows)

    def perplexity(self, losses: np.ndarray) -> Perplexity:
        mean = float(losses.mean())
        return Perplexity(len(losses), mean, _standard_error(losses), self.window, self.stride)


def _plan(
    models: Sequence[Model], text: str, window: int | None, stride: int | None, limit: int | None
) -> _Plan:
    most = min(model.max_context for model in models)
    window = min(WINDOW, most) if window is None else window
    if window > most:
        raise InvalidRequest(
            f"the window is {window:,} tokens, max_context is {most:,}",
            hint=f"a smaller window, or --max-context {window} (in Python: max_context={window})",
        )
    stride = max(1, window // 2) if stride is None else stride
    tokenizer = models[0].tokenizer
    ids, prefix = tokenizer.encode(text)[:limit], tokenizer.encode("", add_bos=True)
    for model in models:
        if max((*ids, *prefix), default=0) >= model.engine.vocab:
            raise FormatError(
                f"the text has token id {max(*ids, *prefix)}, {model.name} has ids below "
                f"{model.engine.vocab}",
                hint="tokenizer and weights come from different models; convert it again",
            )
    valid = min(tokenizer.size, *(model.engine.vocab for model in models))
    return _Plan(windows(ids, prefix, window, stride), window, stride, valid)


def _predictions(session: Session, plan: _Plan) -> Iterator[tuple[np.ndarray, int]]:
    """(ln p of every id that the tokenizer has, the id that came), for each scored token."""
    for part in plan.windows:
        first = len(part.ids) - part.scored  # of the tokens to predict; the row before predicts it
        session.rewind(0)
        session.prefill(part.ids[: first - 1])
        rows = (row for block in session.score(part.ids[first - 1 : -1]) for row in block)
        for row, target in zip(rows, part.ids[first:], strict=True):
            yield log_softmax(row[: plan.valid]), target


def log_softmax(row: np.ndarray) -> np.ndarray:
    """ln p of logits [n], in float64."""
    shifted = row.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


def _check_vocabularies(a: Model, b: Model) -> None:
    """Refuse two models unless every id is the same token in both."""
    if a.tokenizer is b.tokenizer:
        return
    first, second = ({i: t for t, i in m.tokenizer.vocabulary().items()} for m in (a, b))
    different = sorted(i for i in first.keys() | second.keys() if first.get(i) != second.get(i))
    if different:
        i = different[0]
        raise InvalidRequest(
            f"{a.name} and {b.name} have different vocabularies: {len(different)} ids differ, "
            f"the first is {i}: {first.get(i)!a:.40} and {second.get(i)!a:.40}",
            hint="only models with the same tokens can be compared, position by position",
        )


def _exp(value: float) -> float:
    """Infinite where it overflows."""
    return math.exp(value) if value < 709 else math.inf


def _standard_error(values: np.ndarray) -> float:
    """Of the mean; not a number where there is only one value."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress("score", done, total)
