"""Does memory grow from step to step?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_oom.report.record import OOMReport, TimelinePoint

__all__ = ["find_leak", "growth_per_step"]

_WARM_UP_POINTS = 2  # optimizer state appears in the first step
_FEWEST_POINTS = 5
_STEADY_FRACTION = 0.8
_NOTABLE_FRACTION = 0.1
_SURE, _LIKELY, _SHARE = 0.92, 0.85, 0.5


def find_leak(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether the report speaks for a leak, and by what."""
    if report.cause.scope != "device":
        return None
    lines = []
    for thing in report.growing[:5]:
        graph = " with its graph" if thing.holds_graph else ""
        lines.append(
            f"{thing.path} holds {format_bytes(thing.num_bytes)}{graph} and grows by "
            f"{format_bytes(int(thing.bytes_per_step))} a step"
        )
    grown = sum(thing.num_bytes for thing in report.growing)
    points = report.timeline[_WARM_UP_POINTS:]
    growth = growth_per_step(points)
    if growth is not None:
        rise = points[-1].allocated_bytes - points[0].allocated_bytes
        grown = max(grown, rise)
        lines.insert(
            0,
            f"what tensors hold after a step rose from {format_bytes(points[0].allocated_bytes)} "
            f"(step {points[0].step}) to {format_bytes(points[-1].allocated_bytes)} "
            f"(step {points[-1].step}): {format_bytes(int(growth))} a step",
        )
    if not lines or grown < _NOTABLE_FRACTION * (report.limit_bytes or 0):
        return None
    if report.growing and growth is not None:
        return _SURE, lines
    mostly = grown >= _SHARE * (report.allocated_bytes or grown)
    return _SURE if mostly else _LIKELY, lines


def growth_per_step(points: Sequence[TimelinePoint]) -> float | None:
    """Return bytes that are added each step, ``None`` where memory does not grow steadily.

    Args:
        points: Memory at the end of steps, oldest first.

    Example:
        >>> from lightning_oom.report.record import TimelinePoint
        >>> growth_per_step([TimelinePoint(step=s, allocated_bytes=100 + 8 * s) for s in range(6)])
        8.0
    """
    if len(points) < _FEWEST_POINTS or points[-1].step <= points[0].step:
        return None
    changes = [
        later.allocated_bytes - earlier.allocated_bytes for earlier, later in pairwise(points)
    ]
    rising = sum(change > 0 for change in changes)
    total = points[-1].allocated_bytes - points[0].allocated_bytes
    if total <= 0 or rising < _STEADY_FRACTION * len(changes):
        return None
    if max(changes) > total / 2:  # one jump is no growth
        return None
    return total / (points[-1].step - points[0].step)
