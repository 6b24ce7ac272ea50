"""Memory over the whole run in a fixed number of points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.report.record import TimelinePoint

if TYPE_CHECKING:
    from lightning_oom.memory.reading import MemoryReading

__all__ = ["TimelineKeeper"]


class TimelineKeeper:
    """Keeps evenly spaced points; when there are too many, every second one goes.

    Args:
        capacity: Most points that are kept, at least 4.

    Attributes:
        stride: Steps between two points.

    Example:
        >>> from lightning_oom.memory import MemoryReading
        >>> keeper = TimelineKeeper(capacity=4)
        >>> for step in range(12):
        ...     if keeper.wants(step):
        ...         keeper.add(step, MemoryReading(device="cuda:0", allocated_bytes=step))
        >>> [point.step for point in keeper.points]
        [0, 4, 8]
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 4:  # noqa: PLR2004 - fewer are no line
            raise ValueError(f"capacity is at least 4, got {capacity!r}")
        self.capacity = capacity
        self.stride = 1
        self._points: list[TimelinePoint] = []

    @property
    def points(self) -> tuple[TimelinePoint, ...]:
        """Return the points, oldest first."""
        return tuple(self._points)

    def wants(self, step: int) -> bool:
        """Say whether a point at this step would be kept."""
        return not self._points or step - self._points[-1].step >= self.stride

    def add(self, step: int, reading: MemoryReading) -> None:
        """Keep one point; nothing where the reading does not know what is allocated."""
        if reading.allocated_bytes is None:
            return
        if len(self._points) == self.capacity:
            self._points = self._points[::2]
            self.stride *= 2
            if not self.wants(step):
                return
        self._points.append(
            TimelinePoint(
                step=step,
                allocated_bytes=reading.allocated_bytes,
                peak_bytes=reading.peak_allocated_bytes,
                reserved_bytes=reading.reserved_bytes,
            )
        )
