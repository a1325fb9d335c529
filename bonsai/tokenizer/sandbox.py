"""A jinja environment for templates that nobody vouches for: no access, bounded time and memory.

Chat templates come with model files. jinja's own sandbox keeps them away from Python's internals;
it bounds neither time nor memory. Here every turn of a loop, call and filter is counted, and what
can be large is measured before it is made. This needs no signals, threads or processes, so it is
the same on every system. Does not know messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from bonsai.tokenizer.filters import check_operator, checked_call, filter_table, function_table
from bonsai.tokenizer.meter import METER, steps

__all__ = ["MeteredEnvironment"]


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template. `METER` must be set while it compiles or renders.

    What templates of Hugging Face models expect is here: a `tojson` without HTML escapes,
    `raise_exception`, `strftime_now`, `break` and `continue`, `generation` blocks, and lines that
    hold only a tag leave no trace.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            optimized=False,  # nothing of the template runs while it is compiled
            finalize=_finalize,
        )
        self.filters = filter_table()
        self.globals = function_table()
        self._loop_weight = 1
        self._macro_weights: dict[str, int] = {}

    def instrumented(self, tree: nodes.Template) -> nodes.Template:
        """The syntax tree with a meter at each loop, literal, slice and `~`."""
        self._loop_weight = max((_weight(loop) for loop in tree.find_all(nodes.For)), default=1)
        for macro in tree.find_all(nodes.Macro):
            known = self._macro_weights.get(macro.name, 0)
            self._macro_weights[macro.name] = max(known, _weight(macro))
        return _Instrument(self).visit(tree)

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """jinja joins the output of macros and blocks with this."""
        meter = METER.get()
        pieces = list(pieces)
        meter.room(sum(map(len, pieces)))
        return meter.made("".join(pieces))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """jinja calls everything that a template calls with this."""
        meter = METER.get()
        meter.step(self._macro_weights.get(called.name, 1) if isinstance(called, Macro) else 1)
        if isinstance(called, LoopContext) and args:  # a recursive loop
            args = (steps(args[0], self._loop_weight, meter), *args[1:])
        args = checked_call(called, args, kwargs, meter)
        with meter.nested():
            return meter.made(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        meter.step()
        check_operator(operator, left, right, meter)
        return meter.weighed(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """What a forbidden attribute is: undefined, but reaching for internals is an error."""
        if attribute.startswith("_"):
            raise SecurityError(f"the template reaches for {attribute!r}, which is not allowed")
        return super().unsafe_undefined(obj, attribute)


class GenerationBlock(Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its contents count."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Instrument(NodeTransformer):
    """Puts internal filters where jinja would do unbounded work by itself."""

    def __init__(self, environment: MeteredEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = self._filter("steps of a loop", node.iter, nodes.Const(weight))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("concatenation", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        return self._filter("part", node.node, *(part or nodes.Const(None) for part in parts))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("literal", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("literal", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("literal", node) if node.ctx == "load" else node

    def _filter(self, name: str, node: nodes.Node, *args: nodes.Node) -> nodes.Node:
        made = nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
        return made.set_environment(self._environment)


def _weight(node: nodes.Node) -> int:
    """How many nodes lie under `node`: what one turn of a loop may cost."""
    return 1 + sum(1 for _ in node.find_all(nodes.Node))


@jinja2.pass_context  # what takes a context is never called while compiling
def _finalize(context: Any, value: Any) -> str:
    """The text of an output expression."""
    meter = METER.get()
    text = value if isinstance(value, str) else meter.made(str(value))
    meter.emit(len(text))
    return text
