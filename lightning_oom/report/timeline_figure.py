"""A picture of the memory of a whole run, for the end of it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_oom.report.layout import summary_writer_of
from lightning_oom.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_oom.memory.step_memory import StepMemory

__all__ = ["draw_memory_timeline", "write_memory_timeline"]

_KIND_COLORS = {
    "parameters": "#4269d0",
    "buffers": "#8aa5e6",
    "gradients": "#9c6bc9",
    "optimizer": "#ff8ab7",
    "batch": "#6cc5b0",
    "activations": "#efb118",
    "other": "#9c8468",
}
_LINES = (
    ("peak_allocated_bytes", "peak since the last reading", "#efb118"),
    ("allocated_bytes", "allocated", "#4269d0"),
    ("reserved_bytes", "reserved", "#6f7079"),
    ("limit_bytes", "limit", "#c22f2f"),
)


def write_memory_timeline(
    logger: Any, readings: Sequence[StepMemory], *, oom_steps: Iterable[int] = ()
) -> bool:
    """Add the picture of a run to a TensorBoard logger, as ``memory/timeline``.

    Args:
        logger: Any logger; only TensorBoard's get it.
        readings: Of the run, oldest first.
        oom_steps: Steps at which memory ran out.

    Returns:
        Whether it was written: not without readings, nor without matplotlib. Never raises.
    """
    try:
        writer = summary_writer_of(logger)
        if writer is None or not readings or importlib.util.find_spec("matplotlib") is None:
            return False
        figure = draw_memory_timeline(readings, oom_steps=oom_steps)
        writer.add_image("memory/timeline", _pixels(figure), readings[-1].step, dataformats="HWC")
    except Exception:
        return False
    return True


def draw_memory_timeline(readings: Sequence[StepMemory], *, oom_steps: Iterable[int] = ()) -> Any:
    """Draw what the device held over the steps of a run and, where it was counted, what held it.

    Args:
        readings: Oldest first; at least one.
        oom_steps: Steps at which memory ran out, drawn as vertical lines.

    Returns:
        A ``matplotlib.figure.Figure``. ``pyplot`` and its global state are left alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and wanted at the end of a run only

    with_kinds = [reading for reading in readings if reading.by_kind is not None]
    rows = 2 if len(with_kinds) > 1 else 1
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    _draw_lines(axes[0], readings, sorted(set(oom_steps)))
    if rows > 1:
        _draw_kinds(axes[1], with_kinds)
    axes[-1].set_xlabel("step" if readings[0].stage == "train" else "batch")
    return figure


def _pixels(figure: Any) -> Any:
    """Render without pyplot, which ``add_figure`` would import; return an array (rows, columns, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - heavy, and for the end of a run

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _draw_lines(axes: Any, readings: Sequence[StepMemory], oom_steps: list[int]) -> None:
    for name, label, color in _LINES:
        points = [
            (reading.step, value / GIB)
            for reading in readings
            if (value := getattr(reading.memory, name)) is not None
        ]
        if points:
            style = "--" if name == "limit_bytes" else "-"
            axes.plot(*zip(*points, strict=True), style, label=label, color=color, linewidth=1.6)
    for number, step in enumerate(oom_steps):
        marker = "out of memory" if number == 0 else None
        axes.axvline(step, color="#e15759", linewidth=1, alpha=0.6, label=marker)
    axes.set_title(f"Memory of {readings[-1].memory.device}")
    _finish(axes)


def _draw_kinds(axes: Any, readings: Sequence[StepMemory]) -> None:
    steps = [reading.step for reading in readings]
    kinds = [reading.by_kind.as_dict() for reading in readings if reading.by_kind is not None]
    names = [name for name in _KIND_COLORS if any(held[name] for held in kinds)]
    axes.stackplot(
        steps,
        [[held[name] / GIB for held in kinds] for name in names],
        labels=names,
        colors=[_KIND_COLORS[name] for name in names],
        linewidth=0,
    )
    axes.set_title("What holds it, at the fullest moment of the step")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="#e2e2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
