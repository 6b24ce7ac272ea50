"""The memory of the host: what this process has of it, and what it may have."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lightning_oom.memory.peak_ledger import Peaks
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.memory.registry import DeviceReader

if TYPE_CHECKING:
    import torch

__all__ = ["CPUReader", "ControlGroup", "find_control_groups"]


class CPUReader(DeviceReader):
    """Reads the resident set of the process against physical memory or a container's limit.

    The host has no allocator that torch could ask, so there is no peak and nothing reserved.
    """

    def read(self, device: torch.device) -> MemoryReading:
        """Return the resident set, the limit and what is available."""
        memory = psutil.virtual_memory()
        limits, free = [int(memory.total)], [int(memory.available)]
        for group in _own_control_groups():
            limit_bytes = group.read_limit()
            if limit_bytes is not None and limit_bytes < memory.total:
                limits.append(limit_bytes)
                free.append(max(limit_bytes - group.read_used(), 0))
        return MemoryReading(
            device="cpu",
            allocated_bytes=int(psutil.Process().memory_info().rss),
            limit_bytes=min(limits),
            free_bytes=min(free),
        )

    def read_peaks(self, device: torch.device) -> Peaks:
        """Return nothing: the host has no peak."""
        return Peaks()


class ControlGroup:
    """A Linux control group that may limit the memory of this process.

    Args:
        folder: Its folder below ``/sys/fs/cgroup``, of version 2 or of the memory controller of
            version 1.
    """

    def __init__(self, folder: Path) -> None:
        second = (folder / "memory.max").exists()
        self._limit = folder / ("memory.max" if second else "memory.limit_in_bytes")
        self._used = folder / ("memory.current" if second else "memory.usage_in_bytes")
        self._stat = folder / "memory.stat"
        self._cache_key = "inactive_file" if second else "total_inactive_file"

    def read_limit(self) -> int | None:
        """Return the limit in bytes, ``None`` where there is none."""
        return _read_number(self._limit)

    def read_used(self) -> int:
        """Return what its processes use, without the file cache that the kernel would drop."""
        used_bytes = _read_number(self._used) or 0
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return used_bytes
        stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return max(used_bytes - int(stat.get(self._cache_key, 0)), 0)


def find_control_groups(membership: str, root: Path) -> tuple[ControlGroup, ...]:
    """Find the control groups of a process, from its own up to the root.

    Args:
        membership: The text of ``/proc/self/cgroup``.
        root: Where the file system is mounted, ``/sys/fs/cgroup``.

    Returns:
        Those that say something of memory. In a container the own path may not exist below the
        mount; what the container sees as its root then stands for it.
    """
    folders: list[Path] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        own = base / path.strip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(base)]
    names = ("memory.max", "memory.limit_in_bytes")
    return tuple(
        ControlGroup(folder)
        for folder in dict.fromkeys(folders)
        if any((folder / name).exists() for name in names)
    )


@lru_cache(maxsize=1)
def _own_control_groups() -> tuple[ControlGroup, ...]:
    try:
        membership = Path("/proc/self/cgroup").read_text(encoding="ascii")
    except (OSError, ValueError):  # not Linux
        return ()
    return find_control_groups(membership, Path("/sys/fs/cgroup"))


def _read_number(path: Path) -> int | None:
    """Read a file that holds one number; ``None`` if it says ``max`` or cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
