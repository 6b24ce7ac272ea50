"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lightning_oom.report.charts import draw_bar, draw_timeline
from lightning_oom.report.words import (
    amounts_of,
    batch_rows,
    headline,
    kind_rows,
    module_rows,
    place_of,
    tensor_rows,
)
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from jinja2 import Template

    from lightning_oom.report.record import OOMReport

__all__ = ["render_html"]

_WIDTH, _HEIGHT = 860, 240


def render_html(report: OOMReport) -> str:
    """Write the report as a page; every text in it is escaped.

    Args:
        report: The record.

    Note:
        Cost: some 5 ms, and 100 ms for the first page of a process.

    Example:
        >>> from lightning_oom import classify_oom
        >>> from lightning_oom.report.record import OOMReport
        >>> page = render_html(OOMReport(cause=classify_oom(MemoryError("<script>"))))
        >>> "&lt;script&gt;" in page, "<script>" in page
        (True, False)
    """
    return _template().render(
        report=report,
        title=headline(report),
        place=place_of(report),
        bar=draw_bar(report),
        timeline=draw_timeline(report),
        amounts=amounts_of(report),
        tables=_tables(report),
        bytes=format_bytes,
        polyline=_polyline,
        width=_WIDTH,
        height=_HEIGHT,
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - 50 ms

    environment = Environment(
        loader=PackageLoader("lightning_oom", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _polyline(points: tuple[tuple[float, float], ...], *, closed: bool = False) -> str:
    """Turn points from 0 to 1 into those of an SVG line, down to the axis when it is an area."""
    placed = [(x * _WIDTH, (1 - y) * _HEIGHT) for x, y in points]
    if closed and placed:
        placed = [(placed[0][0], _HEIGHT), *placed, (placed[-1][0], _HEIGHT)]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)


def _tables(report: OOMReport) -> list[dict[str, Any]]:
    """Return title, head, rows, and the columns that are numbers."""
    tables = [
        ("What it held", ("kind", "bytes", "share"), kind_rows(report), (1, 2)),
        ("Batch", ("leaf", "type", "shape", "bytes"), batch_rows(report), (3,)),
        (
            "Largest tensors",
            ("bytes", "shape", "dtype", "kind", "held by"),
            tensor_rows(report),
            (0,),
        ),
        (
            "Modules",
            ("module", "type", "parameters", "kept for backward"),
            module_rows(report),
            (2, 3),
        ),
        ("Processes on the device", ("pid", "program", "bytes"), _process_rows(report), (0, 2)),
        (
            "What the recovery tried",
            ("attempt", "failed in", "asked for", "seconds"),
            _attempt_rows(report),
            (2, 3),
        ),
    ]
    return [
        {"title": title, "head": head, "rows": rows, "numbers": numbers}
        for title, head, rows, numbers in tables
        if rows
    ]


def _process_rows(report: OOMReport) -> list[tuple[str, str, str]]:
    return [
        (
            str(process.pid) + (" (this one)" if process.pid == report.own_pid else ""),
            process.name or "",
            "" if process.used_bytes is None else format_bytes(process.used_bytes),
        )
        for process in report.processes or ()
    ]


def _attempt_rows(report: OOMReport) -> list[tuple[str, str, str, str]]:
    return [
        (
            attempt.what,
            attempt.phase,
            "" if attempt.requested_bytes is None else format_bytes(attempt.requested_bytes),
            "" if attempt.seconds is None else f"{attempt.seconds:.2f}",
        )
        for attempt in report.attempts
    ]
