"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from bonsai.errors import InvalidRequest
from bonsai.sizes import read_size, show_size


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("2GiB", 2 << 30), ("2 GiB", 2 << 30), (" 1.5gib ", 3 << 29), ("500MB", 500_000_000),
        ("1kb", 1000), ("64KiB", 65536), ("7b", 7), ("1TiB", 1 << 40), (123, 123), ("0.5B", 1),
    ],
)  # fmt: skip
def test_read(value, count):
    assert read_size(value, "memory_limit") == count


@pytest.mark.parametrize(
    "value",
    ["", "2", "2G", "GiB", "-2GiB", "0GiB", "2XiB", "1e3MB", "nanGB", "2GiB2", 0, -1, True, 2.5,
     None, [2], "9" * 40 + "GiB", "\u0662GiB"],
)  # fmt: skip
def test_nonsense_is_named(value):
    with pytest.raises(InvalidRequest, match=r"memory_limit is .*, expected an amount") as caught:
        read_size(value, "memory_limit")
    assert "2GiB" in caught.value.hint


def test_show():
    assert (show_size(3 << 30), show_size(3 << 19)) == ("3.00 GiB", "1.5 MiB")
