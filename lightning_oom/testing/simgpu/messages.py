"""What the simulated GPU says when it is full: CUDA's own sentence, with its own name in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.units import KIB, format_bytes

if TYPE_CHECKING:
    from lightning_oom.memory.allocator import AllocationFailure

__all__ = ["format_oom_message"]


def format_oom_message(failure: AllocationFailure, index: int) -> str:
    """Return the text of the ``torch.OutOfMemoryError`` for a refused allocation.

    Args:
        failure: The allocator's figures.
        index: Index of the device.

    Example:
        >>> from lightning_oom.memory.allocator import AllocationFailure
        >>> failure = AllocationFailure(
        ...     requested_bytes=4 * 2**20,
        ...     segment_bytes=20 * 2**20,
        ...     limit_bytes=64 * 2**20,
        ...     allocated_bytes=50 * 2**20,
        ...     reserved_bytes=61 * 2**20,
        ... )
        >>> format_oom_message(failure, 0)[:101]
        'simgpu out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 3'
    """
    return (
        f"simgpu out of memory. Tried to allocate {_show(failure.segment_bytes)}. "
        f"GPU {index} has a total capacity of {_show(failure.limit_bytes)} "
        f"of which {_show(failure.free_bytes)} is free. "
        f"Of the allocated memory {_show(failure.allocated_bytes)} is allocated by PyTorch, "
        f"and {_show(failure.reserved_unallocated_bytes)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting expandable_segments=True "
        "to avoid fragmentation."
    )


def _show(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= KIB else f"{num_bytes} bytes"
