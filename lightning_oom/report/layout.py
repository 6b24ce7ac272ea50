"""TensorBoard's Custom Scalars tab, ready-made: one category "Memory" with the charts that matter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_oom.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MEMORY_LAYOUT", "summary_writer_of", "write_memory_layout"]

MEMORY_LAYOUT: Mapping[str, Mapping[str, list[Any]]] = {
    "Memory": {
        "Device: allocated, reserved, limit (GiB)": [
            "Multiline",
            [
                r"memory/peak_allocated_gib$",
                r"memory/allocated_gib$",
                r"memory/reserved_gib$",
                r"memory/limit_gib$",
            ],
        ],
        "What holds it, by kind (GiB)": ["Multiline", [r"memory/by_kind/.*_gib$"]],
        "Peak by phase (GiB)": ["Multiline", [r"memory/by_phase/.*_gib$"]],
        "Out of memory: batches recovered, attempts": [
            "Multiline",
            [r"oom/recovered$", r"oom/attempts$"],
        ],
        "Out of memory: rows that ran together": ["Multiline", [r"oom/rows_per_micro_batch$"]],
        "Used and fragmented (fraction)": [
            "Multiline",
            [r"memory/used_fraction$", r"memory/fragmentation_fraction$"],
        ],
        "Host, other processes (GiB)": [
            "Multiline",
            [
                r"memory/host_rss_gib$",
                r"memory/other_processes_gib$",
                r"memory/this_process_outside_torch_gib$",
            ],
        ],
    }
}
"""Category -> chart -> its type and the tags in it, regular expressions (a logger may prefix tags)."""

_TAG = "custom_scalars__config__"
_MAX_READ_BYTES = 8 * 2**20
_WRITERS = ("torch.utils.tensorboard", "tensorboardX")


def write_memory_layout(logger: Any) -> Undo:
    """Let TensorBoard show memory in its Custom Scalars tab without being told to.

    TensorBoard takes one layout from a run, the last that was written. A layout of the user's own
    that is there already is written again with ours; one that comes later through the same writer
    gets ours added. A second call for the same logger does nothing.

    Args:
        logger: A TensorBoard logger; nothing is done for others, nor on ranks that do not log.

    Returns:
        Lets later layouts pass unchanged. What has been written stays.

    Note:
        Never raises: a layout is not worth a run. The events that the run has written so far are read
        once, up to 8 MiB.

    Example:
        >>> class Logger:
        ...     experiment = None
        >>> undo = write_memory_layout(Logger())
        >>> undo()
    """
    try:
        writer = summary_writer_of(logger)
        if writer is None or isinstance(vars(writer).get("add_custom_scalars"), _MergedLayout):
            return Undo(lambda: None)
        merged = _MergedLayout(writer.add_custom_scalars)
        merged(_read_layout(writer))
        writer.add_custom_scalars = merged
    except Exception:
        return Undo(lambda: None)

    def undo() -> None:
        if vars(writer).get("add_custom_scalars") is merged:
            del writer.add_custom_scalars

    return Undo(undo)


def summary_writer_of(logger: Any) -> Any:
    """Return the ``SummaryWriter`` of a TensorBoard logger, ``None`` of anything else."""
    if not any("TensorBoard" in cls.__name__ for cls in type(logger).__mro__):
        return None
    writer = logger.experiment
    is_one = any(cls.__module__.startswith(_WRITERS) for cls in type(writer).__mro__)
    return writer if is_one else None


class _MergedLayout:
    """Stands for a writer's ``add_custom_scalars`` and adds the memory layout to what it is given."""

    def __init__(self, write: Any) -> None:
        self._write = write

    def __call__(self, layout: Mapping[str, Any]) -> None:
        self._write({**layout, **{name: dict(charts) for name, charts in MEMORY_LAYOUT.items()}})


def _read_layout(writer: Any) -> dict[str, Any]:
    """Return the layout that the run has so far; empty without one."""
    writer.flush()
    layout: dict[str, Any] = {}
    for path in sorted(Path(writer.get_logdir()).glob("events.out.tfevents.*")):
        if path.stat().st_size <= _MAX_READ_BYTES and _TAG.encode() in path.read_bytes():
            layout = _last_layout(path) or layout
    return layout


def _last_layout(path: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_file_loader import (  # noqa: PLC0415 - it comes with the logger
        EventFileLoader,
    )
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # noqa: PLC0415 - likewise

    found: dict[str, Any] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.tag == _TAG:
                layout = Layout.FromString(value.tensor.string_val[0])
                found = {category.title: _charts_of(category) for category in layout.category}
    return found


def _charts_of(category: Any) -> dict[str, list[Any]]:
    charts: dict[str, list[Any]] = {}
    for chart in category.chart:
        if chart.HasField("margin"):
            (series, *_) = chart.margin.series
            charts[chart.title] = ["Margin", [series.value, series.lower, series.upper]]
        else:
            charts[chart.title] = ["Multiline", list(chart.multiline.tag)]
    return charts
