"""Geometry of the two pictures of a report: what fills the device, and how it came to that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_oom.report.words import GONE_LABEL, KIND_LABELS
from lightning_oom.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_oom.report.record import OOMReport

__all__ = ["Bar", "Part", "Timeline", "draw_bar", "draw_timeline"]

_NUM_TICKS = 4
_NICE = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the bar.

    Attributes:
        name: Its kind; also the name of its colour.
        label: For people.
        num_bytes: Its amount.
        left: Where it begins, from 0 to 1.
        width: From 0 to 1.
    """

    name: str
    label: str
    num_bytes: int
    left: float
    width: float

    @property
    def text(self) -> str:
        """Return the label with its amount."""
        return f"{self.label} {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The device as one bar.

    Attributes:
        parts: From left to right.
        limit: Where the device ends, from 0 to 1; ``None`` for unknown.
        limit_text: What it can hold.
    """

    parts: tuple[Part, ...]
    limit: float | None
    limit_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory over steps; all points are ``(x, y)`` from 0 to 1, ``y`` upwards.

    Attributes:
        allocated: At the end of steps, with the moment of the error last.
        peak: The most in each step.
        reserved: Held by the allocator.
        limit: Height of the limit; ``None`` for unknown.
        request: Foot and head of the refused request, at the right edge; ``None`` for unknown.
        y_ticks: Height and label.
        x_ticks: Position and label.
    """

    allocated: tuple[tuple[float, float], ...]
    peak: tuple[tuple[float, float], ...]
    reserved: tuple[tuple[float, float], ...]
    limit: float | None
    request: tuple[float, float] | None
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]


def draw_bar(report: OOMReport) -> Bar | None:
    """Lay out what filled the device, with the refused request behind it.

    Args:
        report: The record.

    Returns:
        The bar; ``None`` when no amount is known.
    """
    amounts = _amounts(report)
    used = sum(amount for name, _, amount in amounts)
    limit = report.limit_bytes
    if not used:
        return None
    if limit is not None and used < limit:
        amounts.append(("free", "free", limit - used))
    request = report.requested_bytes or 0
    request_left = used
    total = max(limit or 0, used, used + request)
    parts, left = [], 0
    for name, label, amount in amounts:
        parts.append(_part(name, label, amount, left, total))
        left += amount
    if request:
        parts.append(_part("request", "refused request", request, request_left, total))
    return Bar(
        parts=tuple(parts),
        limit=None if limit is None else limit / total,
        limit_text="" if limit is None else f"limit {format_bytes(limit)}",
    )


def _part(name: str, label: str, amount: int, left: int, total: int) -> Part:
    return Part(name=name, label=label, num_bytes=amount, left=left / total, width=amount / total)


def _amounts(report: OOMReport) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    if report.kinds is not None:
        by_kind = report.kinds.as_dict()
        found += [(kind, label, by_kind[kind]) for kind, label in KIND_LABELS.items()]
        found.append(("gone", GONE_LABEL, report.gone_bytes))
    elif report.allocated_bytes:
        found.append(("other", "tensors", report.allocated_bytes))
    found.append(("cached", "cached, unused", report.unallocated_bytes or 0))
    found.append(("others", "other processes", report.other_processes_bytes or 0))
    return [entry for entry in found if entry[2] > 0]


def draw_timeline(report: OOMReport) -> Timeline | None:
    """Lay out memory over steps up to the error.

    Args:
        report: The record.

    Returns:
        The picture; ``None`` when there are fewer than two points.
    """
    points, now = report.timeline, report.allocated_bytes
    if not points or now is None:
        return None
    step = max(report.step or 0, points[-1].step + 1)
    first, span = points[0].step, max(step - points[0].step, 1)
    request = report.requested_bytes or 0
    levels = [p.peak_bytes or 0 for p in points] + [p.reserved_bytes or 0 for p in points]
    top = max(now + request, report.limit_bytes or 0, *levels, 1) * 1.06

    def at(where: int, level: int) -> tuple[float, float]:
        return (where - first) / span, level / top

    reserved = [(p.step, p.reserved_bytes) for p in points] + [(step, report.reserved_bytes)]
    return Timeline(
        allocated=(*(at(p.step, p.allocated_bytes) for p in points), at(step, now)),
        peak=tuple(at(p.step, p.peak_bytes) for p in points if p.peak_bytes is not None),
        reserved=tuple(at(where, level) for where, level in reserved if level is not None),
        limit=None if report.limit_bytes is None else report.limit_bytes / top,
        request=(now / top, (now + request) / top) if request else None,
        y_ticks=tuple((level / top, format_bytes(level)) for level in _nice_levels(top)),
        x_ticks=_x_ticks([first, (first + step) // 2, step], first, span),
    )


def _x_ticks(steps: Sequence[int], first: int, span: int) -> tuple[tuple[float, str], ...]:
    last = steps[-1]
    return tuple(
        ((step - first) / span, f"step {step}{' (OOM)' if step == last else ''}")
        for step in sorted(set(steps))
    )


def _nice_levels(top: float) -> list[int]:
    """Choose round levels below ``top``, round in the unit in which they are shown."""
    unit = next((u for u in (GIB, MIB, KIB) if top >= u), 1)
    rough = top / unit / _NUM_TICKS
    power = 10.0 ** (len(str(int(rough))) - 1) if rough >= 1 else 0.1
    gap = next(n * power for n in _NICE if n * power >= rough)
    return [int(gap * unit * i) for i in range(1, int(top / unit / gap) + 1)]
