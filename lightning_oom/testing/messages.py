"""The words that torch uses for an out-of-memory error, with the numbers of a test."""

from __future__ import annotations

from lightning_oom.units import KIB, format_bytes

__all__ = ["cuda_oom_message"]


def cuda_oom_message(
    *,
    requested_bytes: int,
    limit_bytes: int | None = None,
    live_bytes: int | None = None,
    device_index: int = 0,
    remark: str,
) -> str:
    """Write the text of CUDA's out-of-memory error, so that handlers that read it can be tested.

    Args:
        requested_bytes: What was asked for.
        limit_bytes: What the device can hold. ``None`` leaves the sentences with totals away.
        live_bytes: What tensors held when it was asked for; needed with ``limit_bytes``.
        device_index: The number of the device to name.
        remark: Where the error comes from. It ends the text, so that nobody buys a bigger GPU.

    Example:
        >>> print(cuda_oom_message(requested_bytes=2**20, remark="on purpose"))
        CUDA out of memory. Tried to allocate 1.00 MiB. (on purpose)
    """
    parts = [f"CUDA out of memory. Tried to allocate {_cuda_size(requested_bytes)}."]
    if limit_bytes is not None and live_bytes is not None:
        free_bytes = max(limit_bytes - live_bytes, 0)
        parts.append(
            f"GPU {device_index} has a total capacity of {_cuda_size(limit_bytes)} of which "
            f"{_cuda_size(free_bytes)} is free. Of the allocated memory {_cuda_size(live_bytes)} is "
            "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
        )
    return f"{' '.join(parts)} ({remark})"


def _cuda_size(num_bytes: int) -> str:
    """Write bytes as ``c10::CachingAllocator::format_size`` does."""
    if num_bytes <= KIB:
        return f"{num_bytes} bytes"
    return format_bytes(num_bytes)
