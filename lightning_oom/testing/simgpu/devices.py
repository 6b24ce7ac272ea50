"""The simulated devices of this process: one caching-allocator model each, and which is current."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from lightning_oom.memory.allocator import AllocationFailure, Block, CachingAllocator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

__all__ = ["DEVICE_TYPE", "SimDevice", "configure_devices", "current_index", "find_device"]

DEVICE_TYPE = "simgpu"


class SimDevice:
    """One simulated GPU: its allocator, safe across threads and across garbage collection.

    A block can come back at any moment, also from a finalizer that the collector runs while this very
    device is inside its allocator. Such blocks wait in a queue until the allocator is free.
    """

    def __init__(self, index: int, allocator: CachingAllocator) -> None:
        self.index = index
        self._allocator = allocator
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator, after every block that came back was taken back."""
        self._drain()
        return self._allocator

    def reserve(self, num_bytes: int) -> Block | AllocationFailure | None:
        """Take a block for a storage; ``None`` for a storage of no bytes."""
        if num_bytes == 0:
            return None
        with self._lock:
            if self._returned:
                self._take_back()
            return self._allocator.try_allocate(num_bytes)

    def give_back(self, block: Block) -> None:
        """Return a block, now or as soon as the allocator is free."""
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def release_cached(self) -> int:
        """Give wholly free segments back; return how many bytes."""
        with self._lock:
            self._take_back()
            return self._allocator.release_cached()

    def lock(self) -> AbstractContextManager[bool]:
        """Hold every other thread off the allocator, for a reading of several counters."""
        return self._lock

    def set_limits(self, *, limit_bytes: int | None, expandable_segments: bool) -> None:
        """Change what the device can hold.

        Live blocks stay where they are, so the kind of segments changes only while there are none.
        """
        allocator = self.allocator
        if allocator.expandable_segments != expandable_segments or not allocator.allocated_bytes:
            if allocator.allocated_bytes:
                raise RuntimeError(
                    f"{DEVICE_TYPE}:{self.index} still holds {allocator.allocated_bytes} bytes: "
                    "expandable_segments can only change while the device is empty"
                )
            self._allocator = CachingAllocator(limit_bytes, expandable_segments=expandable_segments)
        else:
            allocator.limit_bytes = limit_bytes

    def _drain(self) -> None:
        if self._returned:
            with self._lock:
                self._take_back()

    def _take_back(self) -> None:
        returned, free = self._returned, self._allocator.free
        while returned:
            free(returned.popleft())


_DEVICES: list[SimDevice] = []
_CURRENT = threading.local()


def configure_devices(
    num_devices: int, *, limit_bytes: int | None, expandable_segments: bool
) -> list[SimDevice]:
    """Make the first ``num_devices`` devices exist, empty their caches and set their limits."""
    while len(_DEVICES) < num_devices:
        _DEVICES.append(SimDevice(len(_DEVICES), CachingAllocator()))
    chosen = _DEVICES[:num_devices]
    for device in chosen:
        device.release_cached()
        device.set_limits(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
        device.allocator.reset_peak()
    return chosen


def all_devices() -> Iterator[SimDevice]:
    """Walk over the devices that exist."""
    return iter(_DEVICES)


def num_devices() -> int:
    """Count the devices that exist."""
    return len(_DEVICES)


def current_index() -> int:
    """Return the index of the device that ``"simgpu"`` without an index means in this thread."""
    return getattr(_CURRENT, "index", 0)


def set_current_index(index: int) -> None:
    """Choose the device that ``"simgpu"`` without an index means in this thread."""
    find_device(index)
    _CURRENT.index = index


def find_device(device: torch.device | int | None = None) -> SimDevice:
    """Return a device by index or ``torch.device``; without an index, the current one.

    Raises:
        RuntimeError: There is no such device.
    """
    index = device if device is None or isinstance(device, int) else device.index
    if index is None:
        index = current_index()
    if not 0 <= index < len(_DEVICES):
        raise RuntimeError(
            f"invalid device ordinal: {DEVICE_TYPE}:{index} does not exist, "
            f"there are {len(_DEVICES)} simulated devices"
        )
    return _DEVICES[index]
