"""How many CPUs a container may use: the CPU time that cgroups allow, in CPUs.

Knows where Linux says so (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`), for the group of this
process and those above it. Finds nothing on other systems.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["quota"]


def quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time, such as 1.5; None where there is no limit. `root` holds proc and sys."""
    found = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Where the CPU settings of the groups of this process may be; inside a container the path may
    be the host's, and only the top of it is there."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        homes = [mounts / controllers, mounts / "cpu"] if controllers else [mounts]
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # the group lies outside of what this namespace shows
            inner = PurePosixPath()
        for home in homes:
            yield from (home / group for group in (inner, *inner.parents))


def _limit(folder: Path) -> float | None:
    both = _read(folder / "cpu.max").split()
    if not both:
        both = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        allowed, period = map(int, both)
    except ValueError:  # "max", or nothing
        return None
    return allowed / period if allowed > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, ValueError):
        return ""
