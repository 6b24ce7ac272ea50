"""What memory holds at one moment, in bytes, and ``None`` where a backend cannot tell."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One reading of the memory of one device, as this process sees it.

    A quantity that the backend cannot give is ``None``, never 0; so is everything derived from it.

    Attributes:
        device: The device that was read, with its index, as in ``"cuda:0"`` or ``"cpu"``.
        allocated_bytes: Held by live tensors. On the CPU: the resident set of the process.
        peak_allocated_bytes: The most held at once since :func:`reset_peak`.
        reserved_bytes: Taken from the device by the caching allocator, in use or cached.
        peak_reserved_bytes: The most reserved at once since :func:`reset_peak`.
        limit_bytes: What the device can hold for this process: a cap on the process if there is
            one, and never more than what the process has and the driver could still give.
        free_bytes: What the driver says is free on the device, whoever could take it.
        alloc_retries: How often the allocator had to give its cache back to serve a request, since
            the process began. Each is a near miss.

    Example:
        >>> reading = MemoryReading(
        ...     device="cuda:0", allocated_bytes=300, peak_allocated_bytes=600,
        ...     reserved_bytes=400, peak_reserved_bytes=700, limit_bytes=1000,
        ...     free_bytes=600, alloc_retries=0,
        ... )
        >>> reading.used_fraction, reading.headroom_bytes, reading.fragmentation_fraction
        (0.6, 400, 0.25)
    """

    device: str
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None
    alloc_retries: int | None = None

    @property
    def used_fraction(self) -> float | None:
        """Peak over limit, from 0 to 1; what is allocated now where the backend has no peak."""
        used_bytes = self.peak_allocated_bytes
        if used_bytes is None:
            used_bytes = self.allocated_bytes
        if used_bytes is None or not self.limit_bytes:
            return None
        return used_bytes / self.limit_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Limit minus peak: how much more the steps since :func:`reset_peak` could have held."""
        if self.limit_bytes is None or self.peak_allocated_bytes is None:
            return None
        return self.limit_bytes - self.peak_allocated_bytes

    @property
    def fragmentation_fraction(self) -> float | None:
        """The part of what is reserved that no tensor uses, from 0 to 1."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        if not self.reserved_bytes:
            return 0.0
        return (self.reserved_bytes - self.allocated_bytes) / self.reserved_bytes
