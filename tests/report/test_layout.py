"""TensorBoard opens with a category "Memory", beside whatever layout the user has."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ListLogger
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_oom.memory import MemoryReading
from lightning_oom.memory.kinds import MemoryByKind
from lightning_oom.memory.step_memory import StepMemory
from lightning_oom.report.layout import MEMORY_LAYOUT, write_memory_layout
from lightning_oom.report.timeline_figure import draw_memory_timeline, write_memory_timeline

USERS = {"Mine": {"loss": ["Multiline", ["loss/.*"]], "band": ["Margin", ["a", "b", "c"]]}}


def layouts(logger: TensorBoardLogger, folder: Any) -> list[dict[str, list[str]]]:
    """Category -> titles of its charts, of each layout written so far."""
    logger.experiment.flush()
    found = []
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "custom_scalars__config__":
                    layout = Layout.FromString(value.tensor.string_val[0])
                    found.append({c.title: [x.title for x in c.chart] for c in layout.category})
    return found


def test_the_layout_is_written_once(tmp_path) -> None:
    """Twice asked, one layout, with the limit in the chart of what is allocated."""
    logger = TensorBoardLogger(tmp_path)
    write_memory_layout(logger)
    write_memory_layout(logger)
    assert layouts(logger, tmp_path) == [{"Memory": list(MEMORY_LAYOUT["Memory"])}]
    first = next(iter(MEMORY_LAYOUT["Memory"].values()))
    assert any("limit_gib" in tag for tag in first[1])


def test_a_layout_of_the_user_stays(tmp_path) -> None:
    """Whether it was written before or comes after; the last layout counts."""
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_custom_scalars(USERS)
    write_memory_layout(logger)
    assert layouts(logger, tmp_path)[-1] == {
        "Mine": ["loss", "band"],
        "Memory": list(MEMORY_LAYOUT["Memory"]),
    }
    logger.experiment.add_custom_scalars({"Later": {"x": ["Multiline", ["x"]]}})
    assert list(layouts(logger, tmp_path)[-1]) == ["Later", "Memory"]


def test_the_undo_lets_later_layouts_pass(tmp_path) -> None:
    """The writer's own method is back."""
    logger = TensorBoardLogger(tmp_path)
    undo = write_memory_layout(logger)
    undo()
    undo()
    assert "add_custom_scalars" not in vars(logger.experiment)
    logger.experiment.add_custom_scalars(USERS)
    assert list(layouts(logger, tmp_path)[-1]) == ["Mine"]


def test_other_loggers_are_left_alone(tmp_path) -> None:
    """No experiment is opened for a layout."""

    class Untouchable(ListLogger):
        @property
        def experiment(self) -> Any:
            raise AssertionError

    write_memory_layout(Untouchable())()
    assert not write_memory_timeline(Untouchable(), readings(3))


def test_a_writer_that_fails_is_no_error(tmp_path) -> None:
    """A layout is not worth a run."""
    logger = TensorBoardLogger(tmp_path)

    def fail(layout: Any) -> None:
        raise OSError("disk full")

    logger.experiment.add_custom_scalars = fail
    write_memory_layout(logger)()
    assert logger.experiment.add_custom_scalars is fail


def readings(number: int, *, kinds: bool = True) -> list[StepMemory]:
    """Readings of a run whose activations grow."""
    rows = []
    for step in range(1, number + 1):
        memory = MemoryReading(
            device="simgpu:0",
            allocated_bytes=2**28,
            peak_allocated_bytes=2**28 + step * 2**22,
            reserved_bytes=2**29,
            limit_bytes=2**30,
        )
        by_kind = MemoryByKind(
            parameters_bytes=2**27,
            buffers_bytes=0,
            gradients_bytes=2**26,
            optimizer_bytes=2**26,
            activations_bytes=step * 2**22,
            batch_bytes=2**20,
            other_bytes=0,
        )
        rows.append(
            StepMemory(
                step=step,
                stage="train",
                memory=memory,
                kinds_by_phase={"forward": by_kind} if kinds else {},
            )
        )
    return rows


def test_the_timeline_is_an_image_of_the_run(tmp_path) -> None:
    """Lines and a stack by kind, without pyplot."""
    pytest.importorskip("matplotlib")
    import sys

    logger = TensorBoardLogger(tmp_path)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    figure = draw_memory_timeline(readings(20), oom_steps=[3, 3, 9])
    assert had_pyplot == ("matplotlib.pyplot" in sys.modules)
    lines, kinds = figure.axes
    labels = lines.get_legend_handles_labels()[1]
    assert labels == [
        "peak since the last reading",
        "allocated",
        "reserved",
        "limit",
        "out of memory",
    ]
    assert kinds.get_legend_handles_labels()[1] == [
        "parameters",
        "gradients",
        "optimizer",
        "batch",
        "activations",
    ]
    assert write_memory_timeline(logger, readings(20), oom_steps=[3])
    logger.experiment.flush()
    tags = [
        value.tag
        for path in tmp_path.rglob("events.out.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert "memory/timeline" in tags


def test_a_run_without_kinds_has_one_chart() -> None:
    """And what the backend cannot tell is not drawn."""
    pytest.importorskip("matplotlib")
    (axes,) = draw_memory_timeline(
        [
            StepMemory(
                step=step,
                stage="test",
                memory=MemoryReading(device="mps:0", allocated_bytes=2**28),
            )
            for step in range(3)
        ]
    ).axes
    assert axes.get_legend_handles_labels()[1] == ["allocated"]
    assert axes.get_xlabel() == "batch"


def test_no_readings_no_picture(tmp_path) -> None:
    """Nothing is written."""
    assert not write_memory_timeline(TensorBoardLogger(tmp_path), [])
