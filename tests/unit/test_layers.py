"""The arrows of the package go down only, and each foreign library has one home.

Read from the syntax tree, so that an import inside a function counts too; only those under
`if TYPE_CHECKING` do not, since they are never executed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (  # lowest first; a part may import itself and what stands below it
    {"errors", "callable_module", "cache", "locks"},
    {"sizes", "arguments"},
    {"config", "ternary", "sampling", "stops", "thinking"},
    {"affine"},
    {"matrix"},
    {"format"},
    {"backends.ops"},
    {"models"},
    {"backends"},
    {"tokenizer", "hub"},
    {"download"},
    {"reply"},
    {"chat"},
    {"generate"},
    {"testing", "bench", "fidelity"},
    {"convert", "integrations"},
    {"cli", "server"},
    {"__init__", "__main__"},
)
FORBIDDEN = {  # beside the layers: what a part must not know although it lies below it
    "__init__": {part for layer in LAYERS[:-1] for part in layer},
    "format": {"sampling", "stops", "thinking"},
    "models": {"sampling", "stops", "thinking"},
    "backends": {"stops", "thinking"},
    "tokenizer": {"models", "backends", "backends.ops", "matrix", "sampling"},
    "hub": {"models", "backends", "backends.ops"},
    "download": {"models", "backends", "backends.ops", "tokenizer"},
    "reply": {"models", "format", "hub", "download"},
    "chat": {"models", "format", "hub", "download"},
    "generate": {"models"},
    "testing": {"models"},
    "convert": {"backends", "backends.ops", "reply", "chat", "generate", "testing"},
}
OWNERS = {  # foreign library -> the parts that may import it; NumPy is everybody's
    "click": {"cli"},
    "rich": {"cli"},
    "tokenizers": {"tokenizer"},
    "jinja2": {"tokenizer"},
    "huggingface_hub": {"download"},
    "mlx": {"backends.mlx", "integrations"},
    "torch": {"backends.cuda"},
    "starlette": {"server"},
    "uvicorn": {"server"},
}
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `bonsai`."""
    found = {}
    for folder, prefix in ((ROOT / "bonsai", ""), (ROOT / "convert", "convert.")):
        for path in folder.rglob("*.py"):
            name = prefix + ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()
BACKENDS = {path.parent.name for path in (ROOT / "bonsai" / "backends").glob("*/__init__.py")}


def part_of(module: str) -> str:
    """The entry of LAYERS that a module below `bonsai` belongs to."""
    return "backends.ops" if module == "backends.ops" else module.split(".")[0]


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports; `from a import b` gives a.b where that is a module."""
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("bonsai.")
                yield f"bonsai.{inner}" if inner in MODULES else str(node.module)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from executed(child)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_only(module: str) -> None:
    part = part_of(module)
    assert part in RANK, f"{module}: give it a place in LAYERS"
    for name in imported(MODULES[module]):
        if name == "bonsai" or not name.startswith("bonsai."):
            continue
        target = name.removeprefix("bonsai.")
        other = part_of(target)
        if target.startswith("backends."):  # one backend does not know another
            homes = {a.split(".")[1] for a in (module, target) if "." in a} & BACKENDS
            assert len(homes) < 2, f"{module} imports {name}"
        if other != part:
            assert RANK[other] < RANK[part], f"{module} imports {name}, which lies above it"
            assert other not in FORBIDDEN.get(part, ()), f"{module} must not know {name}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_foreign_libraries_have_one_home(module: str) -> None:
    for name in imported(MODULES[module]):
        library = name.split(".")[0]
        if library in sys.stdlib_module_names or library in ("bonsai", "numpy"):
            continue
        homes = OWNERS.get(library, set())
        assert any(f"{module}.".startswith(f"{home}.") for home in homes), (
            f"{module} uses {library}"
        )


def test_the_package_itself_imports_no_library() -> None:
    code = "import sys, bonsai; print([m for m in sys.modules if m in %r])"
    heavy = ["numpy", "tokenizers", "jinja2", "rich", *OWNERS]
    command = [sys.executable, "-c", code % (heavy,)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_layers_test_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nfrom bonsai import affine\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from bonsai.models import qwen3, load\n",
        encoding="utf-8",
    )
    found = list(imported(path))
    assert found == ["typing", "bonsai.affine", "bonsai.models.qwen3", "bonsai.models"]
