"""The chat template of a model: messages to the text that the model continues.

Knows where templates lie in a model folder and what they expect to find. Does not know ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jinja2
from jinja2 import meta, nodes

from bonsai.errors import FormatError, InvalidRequest
from bonsai.tokenizer.meter import METER, SECONDS, Meter, TemplateLimit
from bonsai.tokenizer.sandbox import MeteredEnvironment

__all__ = ["ChatTemplate", "read_templates"]

LONGEST = 1 << 20  # characters; the longest templates in use have about 30,000
HINT = "the chat template came with the model; --raw does without it"


def read_templates(declared: Any, where: str) -> dict[str, str]:
    """Templates by name from `chat_template` of a tokenizer_config.json.

    It is one template, which gets the name "default", or a list of {"name", "template"}.
    """
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    templates = {}
    for entry in declared if isinstance(declared, list) else [declared]:
        name, source = (entry.get(k) if isinstance(entry, dict) else None for k in NAMED)
        if not isinstance(name, str) or not isinstance(source, str):
            raise FormatError(
                f"{where}: chat_template is neither text nor a list of {{name, template}}"
            )
        templates[name] = source
    return templates


NAMED = ("name", "template")


class ChatTemplate:
    """One template, compiled in a sandbox that bounds its time and memory.

    `where` names the file in errors, `variables` are the names that it expects to be given. Raises
    FormatError when it is not a template; `render` raises InvalidRequest, naming the line, for
    everything that goes wrong with particular messages.
    """

    def __init__(self, source: str, where: str, *, seconds: float = SECONDS) -> None:
        self.source = source
        self.where = where
        self._seconds = seconds
        if len(source) > LONGEST:
            raise FormatError(
                f"{where}: {len(source):,} characters, at most {LONGEST:,} are accepted"
            )
        self._environment = MeteredEnvironment()
        token = METER.set(Meter())
        try:
            tree = self._environment.parse(source)
            self._names = frozenset(node.name for node in tree.find_all(nodes.Name))
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            tree = self._environment.instrumented(tree)
            code = self._environment.compile(tree, None, where)
            self._template = jinja2.Template.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(f"{where}, line {error.lineno}: {error.message}", hint=HINT) from None
        except (
            ValueError,
            SyntaxError,
            RecursionError,
            MemoryError,
            jinja2.TemplateError,
        ) as error:
            raise FormatError(
                f"{where}: not a usable template: {_said(error)}", hint=HINT
            ) from None
        finally:
            METER.reset(token)

    def mentions(self, name: str) -> bool:
        """Whether the template uses a variable of that name."""
        return name in self._names

    def render(self, variables: Mapping[str, Any], size: int) -> str:
        """The text for `variables`, which hold plain data of `size` characters."""
        token = METER.set(Meter(size, self._seconds))
        try:
            context = self._template.new_context(dict(variables))
            return self._environment.concat(self._template.root_render_func(context))
        except Exception as error:  # whatever a template does wrong ends this request, and only it
            raise self._failure(error) from None
        finally:
            METER.reset(token)

    def _failure(self, error: Exception) -> InvalidRequest:
        line = self._line(error.__traceback__)
        where = f"{self.where}, line {line}" if line else self.where
        if isinstance(error, TemplateLimit):
            return InvalidRequest(f"{where}: the template was stopped: {error}", hint=HINT)
        return InvalidRequest(f"{where}: {_said(error)}", hint=HINT)

    def _line(self, trace: TracebackType | None) -> int | None:
        """The line of the template in the innermost of its frames."""
        line = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.where:
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return line


def _said(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = str(error)[:300] or type(error).__name__
    known = isinstance(error, (jinja2.TemplateError, TemplateLimit))
    return text if known else f"{text} ({type(error).__name__})"
