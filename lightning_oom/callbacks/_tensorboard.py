"""What a trainer's TensorBoard loggers get once per run: a layout at its start, a picture at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.report.layout import write_memory_layout
from lightning_oom.report.timeline_figure import write_memory_timeline
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning.pytorch import Trainer

    from lightning_oom.memory.step_memory import StepMemory

__all__ = ["draw_run", "lay_out_charts"]


def lay_out_charts(trainer: Trainer) -> Undo:
    """Write the memory layout to each TensorBoard logger; return the undo."""
    undos = UndoStack()
    for logger in trainer.loggers:
        undos.push(write_memory_layout(logger))
    return Undo(undos)


def draw_run(
    trainer: Trainer, readings: Sequence[StepMemory], *, oom_steps: Iterable[int] = ()
) -> None:
    """Write the picture of a run to each TensorBoard logger, with the steps that ran out of memory."""
    for logger in trainer.loggers:
        write_memory_timeline(logger, readings, oom_steps=oom_steps)
