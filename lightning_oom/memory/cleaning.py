"""Give cached memory back, and when that is worth its time."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_oom.memory.devices import one_device, read_memory, release_cached

if TYPE_CHECKING:
    import torch

    from lightning_oom.memory.reading import MemoryReading

__all__ = ["CachePressure", "Cleaning", "clean_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaning:
    """What one cleaning did.

    Attributes:
        reason: Why it was done.
        seconds: What it took, waiting for the device included.
        freed_bytes: What went back to the device; ``None`` where the backend does not tell.
        num_objects: Unreachable objects that the garbage collector found.
    """

    reason: str
    seconds: float
    freed_bytes: int | None
    num_objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePressure:
    """When a cache is worth emptying.

    Args:
        used_fraction: Part of the limit that is reserved, from 0 to 1; ``None`` for any.
        fragmentation_fraction: Part of what is reserved that no tensor uses, from 0 to 1; ``None``
            for any.

    Example:
        >>> from lightning_oom.memory import MemoryReading
        >>> reading = MemoryReading(
        ...     device="cuda:0", allocated_bytes=50, reserved_bytes=95, limit_bytes=100
        ... )
        >>> CachePressure(used_fraction=0.9, fragmentation_fraction=0.3).is_felt(reading)
        True
        >>> CachePressure(used_fraction=0.9, fragmentation_fraction=0.5).is_felt(reading)
        False
    """

    used_fraction: float | None = 0.9
    fragmentation_fraction: float | None = 0.3

    def is_felt(self, reading: MemoryReading) -> bool:
        """Say whether the device is that full, and that much of it is only cached.

        Args:
            reading: Of the device. A quantity that it does not know counts as no pressure.
        """
        reserved_bytes, limit_bytes = reading.reserved_bytes, reading.limit_bytes
        used = None if reserved_bytes is None or not limit_bytes else reserved_bytes / limit_bytes
        return all(
            wanted is None or (value is not None and value >= wanted)
            for value, wanted in (
                (used, self.used_fraction),
                (reading.fragmentation_fraction, self.fragmentation_fraction),
            )
        )


def clean_cache(device: torch.device | str, *, reason: str = "asked") -> Cleaning | None:
    """Collect garbage, then give what the allocator has cached back to the device.

    In this order: tensors in unreachable cycles are in use until they are collected.

    Args:
        device: The device.
        reason: Noted in the result.

    Returns:
        What was done; ``None`` on the CPU, where there is no cache and nothing is done.

    Note:
        Waits for the device, and allocations that follow are slower: a few milliseconds each where
        the cache would have served them.

    Example:
        >>> clean_cache("cpu") is None
        True
    """
    device = one_device(device)
    if device.type == "cpu" or read_memory(device).reserved_bytes is None:
        return None
    start = time.perf_counter()
    num_objects = gc.collect()
    freed_bytes = release_cached(device)
    return Cleaning(
        reason=reason,
        seconds=time.perf_counter() - start,
        freed_bytes=freed_bytes,
        num_objects=num_objects,
    )
