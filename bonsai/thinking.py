"""What a model thinks before it answers: the markers around it, and a stream of text taken apart.

Knows text only. Where reasoning ends does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Markers", "Splitter", "Thinking"]

BEFORE, INSIDE, AFTER, ANSWER = range(4)


@dataclass(frozen=True, slots=True)
class Markers:
    """What a model writes before and after its reasoning, such as <think> and </think>."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is known about reasoning before one reply begins.

    opened   the prompt ends inside of it, because the chat template writes the begin marker
    limit    tokens of reasoning after which it is ended for the model; None: the model ends it
    closing  the ids that end it then
    """

    markers: Markers
    opened: bool = False
    limit: int | None = None
    closing: tuple[int, ...] = ()


class Splitter:
    """Takes the reasoning at the start of a reply from the answer after it.

    There is reasoning where the prompt has opened it, and where the reply begins with the begin
    marker. It ends with the first end marker; everything after that is answer, markers included.
    White space around the reasoning and before the answer after it belongs to neither. Without
    markers everything is answer.
    """

    def __init__(self, markers: Markers | None, opened: bool = False) -> None:
        self._markers = Markers("", "") if markers is None else markers
        self._opened = opened and markers is not None
        self._state = ANSWER if markers is None else BEFORE
        self._held = ""  # what may be the beginning of a marker, and white space before it
        self._shown = False  # some reasoning has come out, so white space before more of it counts

    @property
    def thinking(self) -> bool:
        """Whether text that comes now would be reasoning."""
        return self._state == INSIDE or (self._state == BEFORE and self._opened)

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that may be shown after `text` arrived; the reasoning came first."""
        self._held += text
        reasoning = answer = ""
        if self._state == BEFORE:
            self._begin()
        if self._state == INSIDE:
            reasoning = self._inside()
        if self._state == AFTER:
            self._held = self._held.lstrip()
            self._state = ANSWER if self._held else AFTER
        if self._state == ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return (self._reasoning(held.rstrip()), "") if self.thinking else ("", held)

    def end(self) -> str:
        """Go on as if the end marker had come; the reasoning that was held back."""
        reasoning = self.flush()[0]
        self._state = AFTER
        return reasoning

    def _begin(self) -> None:
        start = self._held.lstrip()
        marker = self._markers.begin
        if start.startswith(
            marker
        ):  # also after a prompt that has opened it: some models repeat it
            self._held, self._state = start[len(marker) :], INSIDE
        elif not marker.startswith(start):
            self._state = INSIDE if self._opened else ANSWER

    def _inside(self) -> str:
        marker = self._markers.end
        text, found, rest = self._held.partition(marker)
        if found:
            self._held, self._state = rest, AFTER
            return self._reasoning(text.rstrip())
        partial = _overlap(text, marker)
        cut = len(text[: len(text) - partial].rstrip())
        self._held = text[cut:]
        return self._reasoning(text[:cut])

    def _reasoning(self, text: str) -> str:
        text = text if self._shown else text.lstrip()
        self._shown = self._shown or bool(text)
        return text


def _overlap(text: str, marker: str) -> int:
    """How many last characters of `text` begin `marker`, of which it holds no whole one."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
