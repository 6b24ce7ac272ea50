"""What this process and its neighbours hold: on the host, and on the GPU outside torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from lightning_oom.memory.devices import one_device, read_memory
from lightning_oom.memory.nvml import NVMLDevice, ProcessMemory

if TYPE_CHECKING:
    import torch

__all__ = ["ProcessProbe", "ProcessSample", "read_host_rss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """What a look beyond torch's allocator saw.

    Attributes:
        host_rss_bytes: Resident sets of this process and all its descendants.
        host_limit_bytes: What the host can hold for this process: physical memory, or the limit of
            its container.
        host_free_bytes: What is available of it.
        processes: Every process on the device; ``None`` where the driver does not tell.
        own_bytes: What this process holds on the device as the driver sees it; ``None`` where it is
            not listed, as in a container that numbers its processes anew.
        reserved_bytes: What torch's allocator of this process had reserved at the same moment.
    """

    host_rss_bytes: int | None = None
    host_limit_bytes: int | None = None
    host_free_bytes: int | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    own_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def other_processes_bytes(self) -> int | None:
        """What all other processes hold on the device; ``None`` if that of one is not known."""
        if self.processes is None or (self.own_bytes is None and self.reserved_bytes):
            return (
                None  # this process is on the device and not recognised: it would count as another
            )
        amounts = [process.used_bytes for process in self.processes]
        if any(amount is None for amount in amounts):
            return None
        return sum(amount or 0 for amount in amounts) - (self.own_bytes or 0)

    @property
    def outside_torch_bytes(self) -> int | None:
        """What this process holds beside torch's allocator: CUDA context, libraries, NCCL."""
        if self.own_bytes is None or self.reserved_bytes is None:
            return None
        return max(self.own_bytes - self.reserved_bytes, 0)


class ProcessProbe:
    """Takes a :class:`ProcessSample` each time it is called; for a background thread.

    Args:
        device: Where training runs.

    Note:
        Cost of a call: some milliseconds, most of it the search for descendants. The NVML session
        stays open until :meth:`close`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = one_device(device)
        self._nvml = NVMLDevice.open(self.device)

    def __call__(self) -> ProcessSample:
        """Look now."""
        host = read_memory("cpu")
        processes = None if self._nvml is None else self._nvml.read_processes()
        reading = None if processes is None else read_memory(self.device)
        return ProcessSample(
            host_rss_bytes=read_host_rss(),
            host_limit_bytes=host.limit_bytes,
            host_free_bytes=host.free_bytes,
            processes=processes,
            own_bytes=_own_bytes(processes or ()),
            reserved_bytes=None if reading is None else reading.reserved_bytes,
        )

    def close(self) -> None:
        """End the NVML session."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None


def read_host_rss() -> int:
    """Return the resident sets of this process and its descendants, such as data workers.

    Returns:
        Bytes. Pages that a worker shares with the process that forked it count once for each.

    Example:
        >>> read_host_rss() > 0
        True
    """
    own = psutil.Process()
    return sum(_rss_of(process) for process in (own, *own.children(recursive=True)))


def _rss_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


def _own_bytes(processes: tuple[ProcessMemory, ...]) -> int | None:
    own = os.getpid()
    return next((process.used_bytes for process in processes if process.pid == own), None)
