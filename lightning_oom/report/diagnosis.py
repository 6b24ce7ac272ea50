"""Why memory ran out: one table of causes, each with what in a report speaks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_oom.report import leaking, outside, pressure
from lightning_oom.report.record import Diagnosis, OOMReport
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CAUSES", "CauseRule", "Evidence", "diagnose"]

Evidence = tuple[float, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRule:
    """One row of the table.

    Attributes:
        name: Of the cause.
        title: It in one sentence.
        find: Looks at a report; returns a weight from 0 to 1 and what speaks for the cause, or
            ``None`` when nothing does.
    """

    name: str
    title: str
    find: Callable[[OOMReport], Evidence | None]


def diagnose(report: OOMReport) -> tuple[Diagnosis, ...]:
    """Name the causes that a report speaks for, the likeliest first.

    Args:
        report: The record.

    Returns:
        At least one. Causes of the same weight come in the order of :data:`CAUSES`.

    Example:
        >>> from lightning_oom import classify_oom
        >>> [found.cause for found in diagnose(OOMReport(cause=classify_oom(MemoryError())))]
        ['host_memory']
    """
    found = []
    for rule in CAUSES:
        evidence = rule.find(report)
        if evidence is not None:
            weight, lines = evidence
            found.append(
                Diagnosis(
                    cause=rule.name,
                    title=rule.title,
                    evidence=tuple(lines),
                    weight=round(weight, 2),
                )
            )
    return tuple(sorted(found, key=lambda diagnosis: -diagnosis.weight))


def _shared_memory(report: OOMReport) -> Evidence | None:
    if report.cause.scope != "host_shm":
        return None
    return 1.0, [_first_line(report), "DataLoader workers hand batches over through shared memory"]


def _host_memory(report: OOMReport) -> Evidence | None:
    if report.cause.scope != "host":
        return None
    lines = [_first_line(report)]
    if report.cause.kind == "worker":
        lines.append("it was another process: a DataLoader worker or a spawned rank")
    if report.requested_bytes is not None:
        lines.append(f"{format_bytes(report.requested_bytes)} of host memory were asked for")
    return 1.0, lines


def _collective(report: OOMReport) -> Evidence | None:
    if report.cause.kind != "collective":
        return None
    return 1.0, [_first_line(report), "the error comes from an operation between processes"]


def _checkpoint_restore(report: OOMReport) -> Evidence | None:
    if report.phase != "restore" or report.cause.scope != "device":
        return None
    restoring = [
        line for line in report.lines if "load" in line.function or "restore" in line.function
    ]
    lines = ["the traceback ends where a checkpoint is read"]
    if restoring:
        lines.append(f"in {restoring[-1]}")
    lines.append("weights on the device and those from the file were there at the same time")
    return 0.95, lines


def _request_exceeds_device(report: OOMReport) -> Evidence | None:
    requested, limit = report.requested_bytes, report.limit_bytes
    if report.cause.scope != "device" or requested is None or limit is None or requested <= limit:
        return None
    return 0.98, [
        f"one tensor of {format_bytes(requested)} was asked for",
        f"the whole device has {format_bytes(limit)}: nothing that is freed would make it fit",
    ]


def _other_processes(report: OOMReport) -> Evidence | None:
    return pressure.find_others(report)


def _optimizer_state(report: OOMReport) -> Evidence | None:
    if report.phase != "optimizer" or report.cause.scope != "device":
        return None
    lines = ["memory ran out in the optimizer's update"]
    weight = 0.7
    for optimizer in report.optimizers:
        expected = optimizer.expected_bytes
        if expected and optimizer.state_bytes < 0.95 * expected:
            weight = 0.9
            lines.append(
                f"{optimizer.type_name} makes its state in the first update: "
                f"{format_bytes(expected)}, of which {format_bytes(optimizer.state_bytes)} were there"
            )
        elif optimizer.foreach is not False:
            lines.append(
                f"{optimizer.type_name} updates all parameters in one call, which takes temporaries "
                "of their size"
            )
    if report.step == 0:
        weight = 0.9
        lines.append("it was the first optimizer step of the run")
    return weight, lines


def _disguised(report: OOMReport) -> Evidence | None:
    if report.cause.confidence == "certain" or report.cause.scope != "device":
        return None
    return 0.5, [
        _first_line(report),
        "the error does not say that memory ran out; a full device often turns into it",
    ]


def _first_line(report: OOMReport) -> str:
    text = report.cause.message or report.cause.error_type
    return f"the error: {text.splitlines()[0][:160]}"


CAUSES: tuple[CauseRule, ...] = (
    CauseRule(
        name="shared_memory",
        title="The shared memory of the host is full, not that of the GPU.",
        find=_shared_memory,
    ),
    CauseRule(
        name="host_memory",
        title="The host ran out of memory, not the GPU.",
        find=_host_memory,
    ),
    CauseRule(
        name="collective",
        title="An operation between processes failed; it only looks like out of memory.",
        find=_collective,
    ),
    CauseRule(
        name="request_exceeds_device",
        title="One single tensor is larger than the whole device.",
        find=_request_exceeds_device,
    ),
    CauseRule(
        name="checkpoint_restore",
        title="A checkpoint was loaded onto a device that has no room for a second copy.",
        find=_checkpoint_restore,
    ),
    CauseRule(
        name="leak",
        title="Memory grows from step to step: something keeps what it should drop.",
        find=leaking.find_leak,
    ),
    CauseRule(
        name="optimizer_state",
        title="The optimizer's state or its temporaries do not fit beside the model.",
        find=_optimizer_state,
    ),
    CauseRule(
        name="other_processes",
        title="Other processes hold memory of this device.",
        find=_other_processes,
    ),
    CauseRule(
        name="outside_torch",
        title="Much of the device is held outside of PyTorch: other processes, or CUDA itself.",
        find=outside.find_outside,
    ),
    CauseRule(
        name="driver_full",
        title="The device was full when something beside PyTorch's allocator asked for memory.",
        find=outside.find_driver,
    ),
    CauseRule(
        name="refused_with_room",
        title="The driver refused a request although it says that there is room for it.",
        find=outside.find_refusal,
    ),
    CauseRule(
        name="fragmentation",
        title="Enough memory is there, but in pieces: the allocator is fragmented.",
        find=pressure.find_fragmentation,
    ),
    CauseRule(
        name="too_big",
        title="The step needs more than the device has.",
        find=pressure.find_too_big,
    ),
    CauseRule(
        name="disguised",
        title="Probably out of memory, in the disguise of another error.",
        find=_disguised,
    ),
)
"""The causes. A rule that looks at where the error came from stands before one that looks at
amounts."""
