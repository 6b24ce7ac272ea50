"""The report for a console: plain text, or in colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

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
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from lightning_oom.report.record import OOMReport, Remedy

__all__ = ["render_rich", "render_text"]

_NUM_MODULES = _NUM_LEAVES = 12


def render_text(report: OOMReport, *, width: int = 100, color: bool = False) -> str:
    """Write the report as text.

    Args:
        report: The record.
        width: Columns, at least 60.
        color: Add the escape codes of a terminal.

    Example:
        >>> from lightning_oom import classify_oom
        >>> from lightning_oom.report.record import OOMReport
        >>> print(render_text(OOMReport(cause=classify_oom(MemoryError()))).splitlines()[0])
        Out of host memory
    """
    console = Console(
        width=max(width, 60),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(render_rich(report))
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def render_rich(report: OOMReport) -> Group:
    """Return the report as something that rich can print.

    Args:
        report: The record.
    """
    parts: list[RenderableType] = [Text(headline(report), style="bold red")]
    parts += [Text(line) for line in place_of(report)]
    parts += _section("Why", _why(report))
    parts += _section("What to do", _remedies(report.remedies))
    parts += _section("Memory", [_columns(amounts_of(report), numbers=(1,))])
    parts += _table("What it held", ("kind", "bytes", "share"), kind_rows(report), numbers=(1, 2))
    parts += _table(
        "Batch",
        ("leaf", "type", "shape", "bytes"),
        batch_rows(report)[:_NUM_LEAVES],
        numbers=(3,),
        more=len(batch_rows(report)) - _NUM_LEAVES,
    )
    parts += _table(
        "Largest tensors",
        ("bytes", "shape", "dtype", "kind", "held by"),
        tensor_rows(report)[:_NUM_LEAVES],
        numbers=(0,),
        more=len(tensor_rows(report)) - _NUM_LEAVES,
    )
    parts += _table(
        "Modules",
        ("module", "type", "parameters", "kept for backward"),
        module_rows(report)[:_NUM_MODULES],
        numbers=(2, 3),
        more=len(module_rows(report)) - _NUM_MODULES,
    )
    parts += _section("Processes on the device", _processes(report))
    parts += _section("What the recovery tried", _attempts(report))
    parts += _section("The error", [Text(report.cause.message or report.cause.error_type)])
    return Group(*parts)


def _section(title: str, body: Iterable[RenderableType]) -> list[RenderableType]:
    shown = [Padding(part, (0, 0, 0, 2)) for part in body]
    return [Text(""), Text(title, style="bold"), *shown] if shown else []


def _table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int],
    more: int = 0,
) -> list[RenderableType]:
    if not rows:
        return []
    body: list[RenderableType] = [_columns(rows, head=head, numbers=numbers)]
    if more > 0:
        body.append(Text(f"... and {more} more"))
    return _section(title, body)


def _columns(
    rows: Sequence[Sequence[str]], *, numbers: Sequence[int], head: Sequence[str] = ()
) -> Table:
    table = Table(box=None, show_header=bool(head), pad_edge=False, header_style="dim")
    for position in range(len(rows[0]) if rows else 0):
        is_number = position in numbers
        table.add_column(
            head[position] if head else "",
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _why(report: OOMReport) -> Iterator[RenderableType]:
    for number, diagnosis in enumerate(report.diagnoses):
        yield Text(
            ("" if number == 0 else "or: ") + diagnosis.title, style="" if number else "bold"
        )
        for line in diagnosis.evidence:
            yield Padding(Text(f"- {line}"), (0, 0, 0, 2))


def _remedies(remedies: Sequence[Remedy]) -> Iterator[RenderableType]:
    for number, remedy in enumerate(remedies, 1):
        yield Text(f"{number}. {remedy.action}")
        if remedy.setting:
            yield Padding(Text(remedy.setting, style="cyan"), (0, 0, 0, 3))
        frees = ""
        if remedy.saving_bytes:
            frees = f"frees about {format_bytes(remedy.saving_bytes)}"
            frees += {True: " (enough)", False: " (not enough alone)", None: ""}[remedy.suffices]
            frees += "; "
        yield Padding(Text(f"{frees}cost: {remedy.cost}", style="dim"), (0, 0, 0, 3))


def _processes(report: OOMReport) -> Iterator[RenderableType]:
    for process in report.processes or ():
        used = "unknown" if process.used_bytes is None else format_bytes(process.used_bytes)
        own = "  (this one)" if process.pid == report.own_pid else ""
        yield Text(f"{process.pid}  {process.name or '?'}  {used}{own}")


def _attempts(report: OOMReport) -> Iterator[RenderableType]:
    for attempt in report.attempts:
        asked = (
            f", asked for {format_bytes(attempt.requested_bytes)}"
            if attempt.requested_bytes
            else ""
        )
        took = "" if attempt.seconds is None else f" ({attempt.seconds:.2f} s)"
        yield Text(f"{attempt.what}: failed in {attempt.phase}{asked}{took}")
    for line in report.declined:
        yield Text(line)
