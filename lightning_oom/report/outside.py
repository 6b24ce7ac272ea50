"""Memory of the device that is neither free nor PyTorch's in this process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning_oom.units import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

__all__ = [
    "CONTEXT_BYTES",
    "backend_of",
    "find_driver",
    "find_outside",
    "find_refusal",
    "outside_bytes",
    "refused_with_room",
]

_METAL = re.compile(r"other allocations: ([\d.]+ [KMGT]iB)")
_CAPPED = re.compile(r"\b[\d.]+ [KMGT]iB allowed;")
_INTEL = re.compile(r"level_zero|UR_RESULT|ZE_RESULT|PI_ERROR|SYCL|\bXPU\b")
_NOTABLE_FRACTION, _MUCH_FRACTION = 0.1, 0.3
CONTEXT_BYTES = GIB
"""More than CUDA itself takes in a process: 0.3 to 0.9 GiB, by GPU and driver."""


def backend_of(report: OOMReport) -> str:
    """Name whose device it is: ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, or the type of another."""
    message = report.cause.message
    if re.search(r"\bHIP\b|hipError|MIOPEN|rocBLAS", message, re.IGNORECASE):
        return "hip"
    named = report.device or report.cause.device
    if named is None and _INTEL.search(message):
        return "xpu"
    return (named or "cuda").partition(":")[0]


def outside_bytes(report: OOMReport) -> int | None:
    """Return what the device held that PyTorch did not, by the error's own text.

    Args:
        report: The record.

    Returns:
        The total less what is free and what PyTorch has reserved; at least, where the text does not
        say what is free. ``None`` for unknown, and where the total is a cap on this process.
    """
    cause, amounts = report.cause, report.amounts
    metal = _METAL.search(cause.message)
    if metal is not None:
        return parse_bytes(metal[1])
    known = cause.limit_bytes is not None and cause.allocated_bytes is not None
    if not known or amounts.reserved_bytes is None or _CAPPED.search(cause.message):
        return None
    free = cause.free_bytes if cause.free_bytes is not None else cause.requested_bytes
    if free is None or cause.limit_bytes is None:
        return None
    return max(cause.limit_bytes - free - amounts.reserved_bytes, 0)


def refused_with_room(report: OOMReport) -> bool:
    """Whether the error's own text says that there was ample room for what it refuses."""
    requested, room = report.requested_bytes, report.amounts.room_bytes
    if requested is None or room is None or report.cause.free_bytes is None:
        return False
    return report.cause.allocated_bytes is not None and room >= 2 * requested


def find_outside(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether memory outside of PyTorch is to blame, where nobody can tell whose it is."""
    cause = report.cause
    if cause.scope != "device" or report.processes or report.other_processes_bytes is not None:
        return None
    if "memory in use" in cause.message:  # who holds what is said there
        return None
    outside, limit = outside_bytes(report), cause.limit_bytes
    if not outside or not limit or outside < max(_NOTABLE_FRACTION * limit, CONTEXT_BYTES):
        return None
    at_least = "" if cause.free_bytes is not None or _METAL.search(cause.message) else "at least "
    held = f"{at_least}{format_bytes(outside)} of {format_bytes(limit)}"
    if _METAL.search(cause.message):
        lines = [f"{held} are Metal's for this process, outside of PyTorch's allocator"]
    else:
        lines = [
            f"{held} were neither free nor PyTorch's in this process",
            "CUDA itself takes 0.3 to 0.9 GiB in each process; the rest belongs to other processes "
            "(a notebook, another rank, the desktop)"
            if backend_of(report) in ("cuda", "hip")
            else "other processes hold it, or the driver gives less in one piece than the device has",
        ]
    missing = report.missing_bytes
    if cause.free_bytes is not None and missing is not None and missing > outside - CONTEXT_BYTES:
        return 0.4, lines
    if refused_with_room(report):
        return 0.45, lines
    if cause.free_bytes is not None:
        lines.append("without them the request would have fitted")
    return 0.7 + (0.1 if outside >= _MUCH_FRACTION * limit else 0.0), lines


def find_refusal(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether the driver refused what it had."""
    if report.cause.scope != "device" or not refused_with_room(report):
        return None
    requested, room = (
        format_bytes(n or 0) for n in (report.requested_bytes, report.amounts.room_bytes)
    )
    asked = f"{requested} were asked for, and {room} of {format_bytes(report.limit_bytes or 0)} were free"
    why = (
        "it may be a cap on the process or its container, too many mappings, or another process that "
        "held the memory for a moment"
    )
    return 0.75, [asked, why]


def find_driver(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether it was not PyTorch's allocator that asked in vain."""
    cause = report.cause
    if cause.scope != "device" or cause.kind not in ("driver", "library"):
        return None
    lines = [f"the error: {(cause.message or cause.error_type).splitlines()[0][:160]}"]
    if cause.kind == "library":
        lines.append("a library asked the driver for its handle or workspace")
    else:
        lines.append(
            "a kernel, a library, or the first use of the device by this process asked for it"
        )
    lines.append("what PyTorch has cached, or another process holds, is not there for it")
    return (0.6 if cause.confidence == "certain" else 0.45), lines
