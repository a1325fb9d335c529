"""Fixtures that several folders share. This file also puts `tests/` on the import path."""

from __future__ import annotations

import pytest

RUNNERS = ("reference", "cpu", "cpu-exact", "mlx")


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest):
    """The ops of each backend in turn (`runners.Runner`); skipped where one is absent."""
    import runners  # here, so that tests which need no backend import none

    return runners.get(request.param)
