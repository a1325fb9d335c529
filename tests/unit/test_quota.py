"""CPU time of containers, read from the files that Linux shows in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bonsai.backends import cpu
from bonsai.backends.cpu.quota import quota

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"
V1_LINES = "12:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n0::/\n"

CASES = {
    "nothing": ({}, None),
    "v2": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
    "v2 without a limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
    "v2 of a group above": (
        {
            "proc/self/cgroup": "0::/a.slice/b.service/c\n",
            f"{V2}/a.slice/cpu.max": "200000 100000",
            f"{V2}/a.slice/b.service/cpu.max": "300000 100000",
            f"{V2}/a.slice/b.service/c/cpu.max": "max 100000",
            f"{V2}/other/cpu.max": "1000 100000",
        },
        2.0,
    ),
    "v2, a path of the host": (
        {"proc/self/cgroup": "0::/docker/x\n", f"{V2}/cpu.max": "50000 100000"}, 0.5
    ),
    "v2, a path outside": (
        {"proc/self/cgroup": "0::/../../x\n", f"{V2}/cpu.max": "50000 100000"}, 0.5
    ),
    "v1": (
        {
            "proc/self/cgroup": V1_LINES,
            f"{V1}/docker/x/cpu.cfs_quota_us": "250000\n",
            f"{V1}/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/x/cpu.cfs_quota_us": "1",
            "sys/fs/cgroup/memory/docker/x/cpu.cfs_period_us": "1",
        },
        2.5,
    ),
    "v1 in a container": (
        {
            "proc/self/cgroup": V1_LINES,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        1.5,
    ),
    "v1 without a limit": (
        {
            "proc/self/cgroup": V1_LINES,
            f"{V1}/cpu.cfs_quota_us": "-1",
            f"{V1}/cpu.cfs_period_us": "100000",
        },
        None,
    ),
    "nonsense": ({"proc/self/cgroup": "x\n::\n0::/\n", f"{V2}/cpu.max": "0 0 0"}, None),
    "no period": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "100 0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_a_container(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("limit", "threads"), [(None, 8), (1.5, 2), (0.2, 1), (2.0, 2), (3.01, 4), (64.0, 8)]
)
def test_threads_are_the_cpus_or_the_limit_rounded_up(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, threads: int
) -> None:
    monkeypatch.setattr(cpu, "quota", lambda: limit)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu.usable_cpus() == threads
