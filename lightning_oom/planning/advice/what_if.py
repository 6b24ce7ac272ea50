"""Count a trace again as if some of its storages were smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["peak_if_scaled"]


def peak_if_scaled(trace: MemoryTrace, factors: Mapping[int, float]) -> int:
    """Return the peak that a step would have if storages held a fraction of their bytes.

    Args:
        trace: Of the step.
        factors: Number of a storage -> fraction of its bytes, at least 0; others stay as they are.

    Example:
        >>> from lightning_oom.planning.trace import MemoryEvent, MemoryTrace
        >>> events = tuple(
        ...     MemoryEvent(number, num_bytes, "activation", "forward", 0, "", "", -1)
        ...     for number, num_bytes in [(0, 100), (1, 60), (1, -60), (2, 50)]
        ... )
        >>> trace = MemoryTrace(events=events, marks=(), rows=4, num_steps=1)
        >>> trace.peak_bytes, peak_if_scaled(trace, {1: 0.5})
        (160, 150)
    """
    live = peak = 0.0
    for event in trace.events:
        live += event.num_bytes * factors.get(event.storage, 1.0)
        peak = max(peak, live)
    return round(peak)
