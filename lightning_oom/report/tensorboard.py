"""The report in TensorBoard: its text, and a picture of what filled the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_oom.report.charts import draw_bar, draw_timeline
from lightning_oom.report.text import render_text
from lightning_oom.report.words import headline

if TYPE_CHECKING:
    from lightning_oom.report.charts import Bar, Timeline
    from lightning_oom.report.record import OOMReport

__all__ = ["draw_figure", "write_tensorboard"]

_COLORS = {
    "parameters": "#4269d0",
    "buffers": "#8aa5e6",
    "gradients": "#9c6bc9",
    "optimizer": "#ff8ab7",
    "batch": "#6cc5b0",
    "activations": "#efb118",
    "other": "#9c8468",
    "gone": "#d9c7b8",
    "cached": "#c9cad1",
    "others": "#6f7079",
    "free": "#ffffff",
    "request": "#e15759",
}
_INK, _SOFT, _LINE, _ALARM, _PAPER = "#1c1d21", "#62646d", "#e2e2e6", "#c22f2f", "#ffffff"
_WIDTH, _LEFT, _RIGHT = 1100, 110, 30
_LEGEND_COLUMNS = 4


def write_tensorboard(writer: Any, report: OOMReport, *, step: int) -> None:
    """Write the text and the picture of a report.

    Args:
        writer: A ``SummaryWriter``.
        report: The record.
        step: The step to show it at.
    """
    text = render_text(report).replace("\n", "\n    ")
    writer.add_text("oom/report", f"    {text}", step)  # indented: Markdown leaves it as it is
    figure = draw_figure(report)
    if figure is not None:
        writer.add_image("oom/memory", figure, step, dataformats="HWC")


def draw_figure(report: OOMReport) -> np.ndarray[Any, Any] | None:
    """Draw what filled the device and how it came to that.

    Args:
        report: The record.

    Returns:
        An image of shape ``(height, width, 3)``; ``None`` when no amount is known or Pillow, which
        TensorBoard brings along, is missing.
    """
    bar, timeline = draw_bar(report), draw_timeline(report)
    if bar is None:
        return None
    try:
        from PIL import Image, ImageDraw  # noqa: PLC0415 - TensorBoard brings it, others need not
    except ImportError:
        return None
    height = 190 + (30 * -(-len(bar.parts) // _LEGEND_COLUMNS)) + (380 if timeline else 0)
    image = Image.new("RGB", (_WIDTH, height), _PAPER)
    pen = _Pen(ImageDraw.Draw(image))
    pen.text(30, 20, headline(report), size=22, color=_ALARM)
    y = _draw_bar(pen, bar, 80)
    if timeline is not None:
        _draw_timeline(pen, timeline, y + 30)
    return np.asarray(image)


class _Pen:
    """Draws with one font in several sizes."""

    def __init__(self, draw: Any) -> None:
        from PIL import ImageFont  # noqa: PLC0415 - see draw_figure

        self.draw = draw
        self._load = ImageFont.load_default

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 16,
        color: str = _SOFT,
        anchor: str = "la",
    ) -> None:
        self.draw.text((x, y), text, fill=color, font=self._load(size=size), anchor=anchor)


def _draw_bar(pen: _Pen, bar: Bar, top: int) -> int:
    width = _WIDTH - 60
    for part in bar.parts:
        left, right = 30 + part.left * width, 30 + (part.left + part.width) * width
        box = (left, top, max(right, left + 1), top + 50)
        if part.name == "request":
            pen.draw.rectangle(box, outline=_COLORS["request"], width=4)
            continue
        pen.draw.rectangle(box, fill=_COLORS[part.name], outline=_PAPER)
        if part.name == "free":
            pen.draw.rectangle(box, outline=_LINE)
    if bar.limit is not None:
        x = 30 + bar.limit * width
        pen.draw.line((x, top - 12, x, top + 62), fill=_ALARM, width=2)
        pen.text(x, top - 16, bar.limit_text, anchor="rd" if bar.limit > 0.2 else "ld")  # noqa: PLR2004 - room on the left
    for number, part in enumerate(bar.parts):
        x = 30 + (number % _LEGEND_COLUMNS) * (width / _LEGEND_COLUMNS)
        y = top + 78 + 30 * (number // _LEGEND_COLUMNS)
        pen.draw.rectangle((x, y, x + 14, y + 14), fill=_COLORS[part.name], outline=_SOFT)
        pen.text(x + 22, y - 2, part.text, color=_INK)
    return top + 78 + 30 * -(-len(bar.parts) // _LEGEND_COLUMNS)


def _draw_timeline(pen: _Pen, timeline: Timeline, top: int) -> None:
    width, height = _WIDTH - _LEFT - _RIGHT, 280

    def place(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
        return [(_LEFT + x * width, top + (1 - y) * height) for x, y in points]

    for y, label in timeline.y_ticks:
        ((left, level), (right, _)) = place(((0, y), (1, y)))
        pen.draw.line((left, level, right, level), fill=_LINE)
        pen.text(left - 10, level, label, anchor="rm")
    allocated = place(timeline.allocated)
    foot = top + height
    pen.draw.polygon(
        [(allocated[0][0], foot), *allocated, (allocated[-1][0], foot)], fill="#d5dff5"
    )
    pen.draw.line(allocated, fill=_COLORS["parameters"], width=3)
    for points, color in ((timeline.peak, "activations"), (timeline.reserved, "others")):
        if len(points) > 1:
            pen.draw.line(place(points), fill=_COLORS[color], width=2)
    if timeline.limit is not None:
        pen.draw.line(place(((0, timeline.limit), (1, timeline.limit))), fill=_ALARM, width=2)
    if timeline.request is not None:
        bounds = place(((1, timeline.request[0]), (1, timeline.request[1])))
        pen.draw.line(bounds, fill=_COLORS["request"], width=8)
    for number, (x, label) in enumerate(timeline.x_ticks):
        anchor = "la" if number == 0 else "ra" if number == len(timeline.x_ticks) - 1 else "ma"
        pen.text(_LEFT + x * width, foot + 10, label, anchor=anchor)
    pen.text(
        _LEFT,
        foot + 36,
        "blue: allocated after the step   yellow: peak in the step   grey: reserved   red: limit, request",
    )
