"""Write docs/ops.md from the docstrings of the ops contract.

    python docs/make_ops.py

Reads the source only, so it needs no library. A test fails when docs/ops.md is stale.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "bonsai" / "backends" / "ops.py"
HEAD = """\
<!-- Written by docs/make_ops.py from bonsai/backends/ops.py. Do not edit. -->

# The ops contract

{}

[`reference/ops.py`](../bonsai/backends/reference/ops.py) has the meaning of each in NumPy.
"""


def render(source: str) -> str:
    """The document for the source of the contract."""
    tree = ast.parse(source)
    parts = [HEAD.format(_doc(tree))]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            parts.append(f"## {node.name}\n\n{_doc(node)}\n")
            parts.extend(_methods(node))
    return "\n".join(parts)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            yield f"### {item.name}\n"
            yield f"```python\n{_signature(item)}\n```\n"
            yield f"```text\n{_doc(item)}\n```\n"


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){returned}"


def _doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    text = ast.get_docstring(node)
    if text is None:
        raise SystemExit(f"{SOURCE.name}: {getattr(node, 'name', 'the module')} has no docstring")
    return inspect.cleandoc(text)


def main() -> None:
    text = render(SOURCE.read_text(encoding="utf-8"))
    (DOCS / "ops.md").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
