"""The amounts of one out-of-memory error, all of the moment at which it was raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_oom.memory.reading import MemoryReading
    from lightning_oom.recovery.classify import OOMCause

__all__ = ["Amounts", "read_amounts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Bytes, ``None`` for unknown.

    Attributes:
        limit_bytes: What the whole device has, or what the process is allowed of it.
        allocated_bytes: Held by tensors.
        unallocated_bytes: Held by the caching allocator and by no tensor.
        reserved_bytes: Held by the caching allocator in all.
        free_bytes: What the driver could still give.
        room_bytes: What this process could still get: of what is free, as much as it is allowed.
    """

    limit_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    room_bytes: int | None = None


def read_amounts(cause: OOMCause, reading: MemoryReading | None, device: str | None) -> Amounts:
    """Take the amounts from the error's own text, or else from the counters, never from both.

    An error that comes out of a backward has freed what the operators held before anyone can read a
    counter, while its text was written before. A difference between the two says nothing.

    Args:
        cause: What the error says.
        reading: The counters, read while the error was handled.
        device: Where the model runs; ``None`` takes the one that the error names.

    Note:
        The text has two decimals, so amounts are exact to 0.5 %. The CPU has no caching allocator:
        nothing is reserved there, whatever the text says.

    Example:
        >>> from lightning_oom import classify_oom
        >>> from lightning_oom.memory import MemoryReading
        >>> cause = classify_oom(RuntimeError(
        ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 "
        ...     "GiB of which 1.00 GiB is free. Of the allocated memory 22.00 GiB is allocated by "
        ...     "PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        ... ))
        >>> after = MemoryReading(device="cuda:0", allocated_bytes=2**30, reserved_bytes=22 * 2**30)
        >>> read_amounts(cause, after, "cuda:0").unallocated_bytes
        0
    """
    allocated: int | None
    reserved: int | None
    limit = cause.limit_bytes
    if limit is None and reading is not None:
        limit = reading.limit_bytes
    if cause.allocated_bytes is not None:
        allocated, unallocated = cause.allocated_bytes, cause.reserved_unallocated_bytes
        free = cause.free_bytes
        reserved = None if unallocated is None else cause.allocated_bytes + unallocated
    elif reading is not None:
        allocated, reserved = reading.allocated_bytes, reading.reserved_bytes
        free = reading.free_bytes if cause.free_bytes is None else cause.free_bytes
        unallocated = (
            None if reserved is None or allocated is None else max(reserved - allocated, 0)
        )
    else:
        allocated = reserved = None
        unallocated, free = cause.reserved_unallocated_bytes, cause.free_bytes
    if (device or cause.device or "").startswith("cpu"):
        reserved = unallocated = None
    held = allocated if reserved is None else reserved
    room = free
    if free is not None and limit is not None and held is not None:
        room = max(min(free, limit - held), 0)
    return Amounts(
        limit_bytes=limit,
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        reserved_bytes=reserved,
        free_bytes=free,
        room_bytes=room,
    )
