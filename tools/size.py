"""The ten largest files and functions; fails above the limits that keep the code readable.

Limits: 40 lines aimed at and 60 refused for a function, 400 lines for a file, 600 for a test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LIMIT, FILE_LIMIT, TEST_LIMIT = 60, 400, 600
FOLDERS = ("bonsai", "convert", "tests", "tools", "bench")


def main() -> int:
    files, functions = [], []
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        files.append((text.count("\n"), name))
        functions += [(lines, f"{name}:{label}") for lines, label in _functions(ast.parse(text))]
    for title, rows in (("files", files), ("functions", functions)):
        print(f"largest {title}")
        for lines, name in sorted(rows, reverse=True)[:10]:
            print(f"  {lines:5} {name}")
    too_long = [name for lines, name in files if lines > _limit(name)]
    too_long += [name for lines, name in functions if lines > FUNCTION_LIMIT]
    for name in too_long:
        print(f"too long: {name}", file=sys.stderr)
    return 1 if too_long else 0


def _functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, node.name


def _limit(name: str) -> int:
    return TEST_LIMIT if name.startswith("tests/") else FILE_LIMIT


if __name__ == "__main__":
    sys.exit(main())
