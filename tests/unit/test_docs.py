"""docs/cli.md is what docs/make_cli.py writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_command_line_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    make_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cli)
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert page == make_cli.render(), "make help-docs"
