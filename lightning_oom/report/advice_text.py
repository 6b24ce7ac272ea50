"""Advice as text for a console."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from lightning_oom.planning.advice import Advice, AdviceList

__all__ = ["render_advice"]


def render_advice(advice: AdviceList, *, width: int = 100, most: int = 10) -> str:
    """Return a headline and one entry per piece of advice, best first.

    Args:
        advice: What :func:`lightning_oom.planning.advice.advise` has found.
        width: Columns, at least 60.
        most: Entries shown, at least 1.

    Example:
        >>> from lightning_oom.planning.advice import AdviceList
        >>> print(render_advice(AdviceList(peak_bytes=2**30, peak_phase="forward", entries=())))
        A step needs 1.00 GiB at its peak (forward), allocator and CUDA context aside. No change that was
        tried saves 1 % of it.
    """
    console = Console(width=max(width, 60), file=io.StringIO(), color_system=None, highlight=False)
    peak = format_bytes(advice.peak_bytes)
    where = f" ({advice.peak_phase})" if advice.peak_phase else ""
    head = f"A step needs {peak} at its peak{where}, allocator and CUDA context aside."
    if advice.substitutions:
        times = "once" if advice.substitutions == 1 else f"{advice.substitutions} times"
        head += f" An upper bound: values were not known {times}."
    if not advice.entries:
        console.print(f"{head} No change that was tried saves 1 % of it.")
        return _text(console)
    console.print(head)
    for entry in advice.entries[: max(1, most)]:
        share = entry.saved_bytes / advice.peak_bytes
        saved = format_bytes(entry.saved_bytes)
        console.print(f"\n{saved:>10} {share:>4.0%}  {escape(_title(entry))}")
        for line in _details(entry):
            console.print(Padding(escape(line), (0, 0, 0, 17)))
    left_out = len(advice.entries) - most
    if left_out > 0:
        console.print(f"\nand {left_out} more")
    return _text(console)


def _title(entry: Advice) -> str:
    return f"{entry.title} ({entry.effect})"


def _details(entry: Advice) -> list[str]:
    lines = [f"where: {entry.place}"] if entry.place else []
    lines.append(f"how:   {entry.how}")
    return [*lines, f"cost:  {entry.cost}"] if entry.cost else lines


def _text(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO, as made above
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
