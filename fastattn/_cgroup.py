"""The CPU time that Linux grants this process: the quota of its control groups."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU time per second that the process may use, in cores; None if it is unlimited.

    Both versions of control groups are read. A group's limit also holds for the groups below it, so
    the smallest limit of a group and those above it applies.
    """
    try:
        hierarchies = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    smallest = math.inf
    for hierarchy in hierarchies:
        _, controllers, group = hierarchy.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container, the path may be the host's, while the mount shows only the container's
        # group.
        path = PurePosixPath(group.lstrip("/"))
        for mount in (controllers, "cpu") if controllers else (".", "unified"):
            for folder in (path, *path.parents):
                smallest = min(smallest, _limit(root / "sys/fs/cgroup" / mount / folder))
    return None if smallest == math.inf else smallest


def _limit(group: Path) -> float:
    """The limit of one group, in cores; infinite without a limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()  # version 1
            period = (group / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
