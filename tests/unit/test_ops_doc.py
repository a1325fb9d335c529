"""docs/ops.md is what docs/make_ops.py writes, and shows what the reference has."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

from bonsai.backends.ops import Ops
from bonsai.backends.reference.ops import ReferenceOps

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_ops_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("make_ops", DOCS / "make_ops.py")
    make_ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_ops)
    expected = make_ops.render(make_ops.SOURCE.read_text(encoding="utf-8"))
    page = (DOCS / "ops.md").read_text(encoding="utf-8")
    assert page == expected, "python docs/make_ops.py"


def test_the_reference_has_every_op_with_the_same_parameters() -> None:
    contract = {name: f for name, f in vars(Ops).items() if not name.startswith("_")}
    assert len(contract) >= 8
    for name, function in contract.items():
        wanted = list(inspect.signature(function).parameters)
        assert list(inspect.signature(getattr(ReferenceOps, name)).parameters) == wanted
