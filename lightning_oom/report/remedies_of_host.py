"""Remedies for memory that is not that of a device: host memory and shared memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning_oom.report import remedies_of_rows as of_rows
from lightning_oom.report import remedies_of_step as of_step
from lightning_oom.report.dearness import CHEAP, FREE, SLOWER, Found
from lightning_oom.report.record import Remedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.report.record import OOMReport

__all__ = ["for_host", "for_shared_memory"]

_ARRAY = re.compile(r"array with shape (\([\d, ]+\)) and data type (\w+)")
_PAGE_FILE = re.compile(r"WinError 1455|paging file")


def for_host(report: OOMReport) -> Iterator[Found]:
    """Let the process, or the workers beside it, take less of the host."""
    message = report.cause.message
    array = _ARRAY.search(message)
    if array is not None:
        yield (
            FREE,
            Remedy(
                action=f"Look at where an array of shape {array[1]} and type {array[2]} is made: read "
                "it in parts or map the file, or use a smaller type.",
                setting='numpy.load(path, mmap_mode="r")',
                cost="some work on the data set",
            ),
        )
    elif _PAGE_FILE.search(message):
        yield (
            FREE,
            Remedy(
                action="Enlarge the paging file of Windows: each process that imports torch reserves "
                "some GiB of it, and each DataLoader worker is one.",
                cost="space on the disk",
            ),
        )
    elif _trains_on_the_host(report):
        yield from of_rows.recover(report)
        yield from of_rows.fewer_rows(report)
        yield from of_step.checkpoint_activations(report)
    elif report.cause.kind == "host_allocator" and report.requested_bytes is not None:
        yield (
            FREE,
            Remedy(
                action="Look at the shapes where the traceback ends: one tensor of that size is often "
                "a mistake, or a data set that is meant to be read in parts.",
                cost="none",
            ),
        )
    yield from _for_workers(report)


def _trains_on_the_host(report: OOMReport) -> bool:
    if report.cause.kind not in ("host", "host_allocator"):
        return False
    return (report.device or "").startswith("cpu") and report.phase in ("forward", "backward")


def _for_workers(report: OOMReport) -> Iterator[Found]:
    yield (
        CHEAP,
        Remedy(
            action="Use fewer DataLoader workers, or let each hold fewer batches ready.",
            setting="DataLoader(num_workers=2, prefetch_factor=2)",
            cost="slower loading, where loading is what the GPU waits for",
        ),
    )
    yield (
        CHEAP,
        Remedy(
            action="Keep the data set in arrays or memory-mapped files, not in Python lists: each "
            "worker copies a list as it counts references to its items.",
            cost="some work on the data set",
        ),
    )
    if report.stage in (None, "predict"):
        yield (
            SLOWER,
            Remedy(
                action="Write predictions out as they come instead of collecting them.",
                setting="trainer.predict(..., return_predictions=False)",
                cost="a writer callback",
            ),
        )


def for_shared_memory(report: OOMReport) -> Iterator[Found]:
    """Give workers more room to hand batches over, or another way."""
    yield (
        FREE,
        Remedy(
            action="Give the container more shared memory.",
            setting="docker run --shm-size=8g (or --ipc=host)",
            cost="none",
        ),
    )
    yield (
        FREE,
        Remedy(
            action="Let workers hand over files instead of shared-memory segments.",
            setting='torch.multiprocessing.set_sharing_strategy("file_system")',
            cost="little",
        ),
    )
    yield from _for_workers(report)
