"""Ops are also tested on the cpu path that every machine has."""

from __future__ import annotations

import pytest

RUNNERS = ("reference", "cpu", "cpu-exact", "cpu-portable", "cpu-exact-portable", "mlx")


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest):
    """The ops of each backend in turn (`runners.Runner`); skipped where one is absent."""
    import runners  # here, so that collecting imports no backend

    return runners.get(request.param)
