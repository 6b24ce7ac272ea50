"""Whose memory is it, and in how many pieces: the causes that amounts speak for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning_oom.report.outside import refused_with_room
from lightning_oom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

__all__ = ["dominant_kind", "find_fragmentation", "find_others", "find_too_big", "held_by_others"]

_OTHERS_FRACTION, _MANY_OTHERS_FRACTION = 0.1, 0.3
_PIECES_FRACTION, _MANY_PIECES_FRACTION = 0.1, 0.25
_OWN_USE = re.compile(r"this process has ([\d.]+ [KMGT]iB) memory in use")
_OTHER_USE = re.compile(r"Process (\d+) has ([\d.]+ [KMGT]iB) memory in use")
_KIND_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "batch": "the batch",
    "activations": "activations kept for the backward",
    "other": "other tensors and temporaries",
}


def find_others(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether other processes are to blame, and by what."""
    others, limit = held_by_others(report), report.limit_bytes
    if report.cause.scope != "device" or not others or not limit:
        return None
    total = max(limit, others + (report.reserved_bytes or 0))
    if others < _OTHERS_FRACTION * total:
        return None
    lines = [f"other processes hold {format_bytes(others)} of {format_bytes(total)}"]
    lines += [
        f"process {process.pid} ({process.name or 'unknown'}): {format_bytes(process.used_bytes)}"
        for process in report.processes or ()
        if process.pid != report.own_pid and process.used_bytes
    ]
    if not report.processes:
        named = _OTHER_USE.findall(report.cause.message)
        lines += [f"process {pid}: {amount}" for pid, amount in named]
        unseen = others - sum(parse_bytes(amount) for _, amount in named)
        if unseen >= _OTHERS_FRACTION * total and named:
            lines.append(
                f"{format_bytes(unseen)} of it by processes that this one cannot see (of another "
                "container or user)"
            )
    missing = report.missing_bytes
    would_fit = missing is not None and missing <= others
    if would_fit:
        lines.append("without them the request would have fitted")
    weight = 0.8 if would_fit else 0.4
    return weight + (0.08 if others >= _MANY_OTHERS_FRACTION * total else 0.0), lines[:8]


def held_by_others(report: OOMReport) -> int | None:
    """Return what other processes hold, from the driver or from the text of the error."""
    if report.other_processes_bytes is not None:
        return report.other_processes_bytes
    text = report.cause.message
    named = sum(parse_bytes(amount) for _, amount in _OTHER_USE.findall(text))
    own = _OWN_USE.search(text)
    if own is None or report.cause.limit_bytes is None or report.cause.free_bytes is None:
        return named or None
    rest = report.cause.limit_bytes - report.cause.free_bytes - parse_bytes(own[1])
    return max(rest, named, 0)


def find_fragmentation(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say whether the memory was there in pieces, and by what."""
    unallocated, reserved = report.unallocated_bytes, report.reserved_bytes
    if report.cause.scope != "device" or not unallocated or not reserved:
        return None
    fraction = unallocated / reserved
    requested, free = report.requested_bytes, report.free_bytes
    if requested is None or fraction < _PIECES_FRACTION or requested > unallocated + (free or 0):
        return None
    if refused_with_room(report):  # the pieces are not what was in the way
        return None
    held = f"{format_bytes(unallocated)} ({fraction:.0%} of what the allocator holds)"
    lines = [
        f"{held} were cached and unused, yet {format_bytes(requested)} in one piece were not to be had"
    ]
    if report.reading is not None and report.reading.alloc_retries:
        lines.append(
            f"the allocator had emptied its cache to go on {_times(report.reading.alloc_retries)}"
        )
    return (0.86 if fraction >= _MANY_PIECES_FRACTION else 0.6), lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def find_too_big(report: OOMReport) -> tuple[float, list[str]] | None:
    """Say what fills the device."""
    if report.cause.scope != "device" or report.cause.kind == "collective":
        return None
    lines = []
    requested, missing = report.requested_bytes, report.missing_bytes
    if requested is not None:
        free = (
            f" with {format_bytes(report.free_bytes)} free" if report.free_bytes is not None else ""
        )
        limit = f" of {format_bytes(report.limit_bytes)}" if report.limit_bytes else ""
        lines.append(f"{format_bytes(requested)} were asked for{free}{limit}")
    if missing:
        lines.append(f"{format_bytes(missing)} were missing, however the rest is arranged")
    kind = dominant_kind(report)
    if kind is not None and report.kinds is not None:
        amount = report.kinds.as_dict()[kind]
        share = amount / max(report.kinds.total_bytes + report.gone_bytes, 1)
        lines.append(
            f"{share:.0%} of what was allocated: {_KIND_NAMES[kind]} ({format_bytes(amount)})"
        )
    lines = lines or [f"the error: {report.cause.message.splitlines()[0][:160]}"]
    if refused_with_room(report):
        return 0.3, lines
    return (0.7 if missing else 0.5 if requested is not None else 0.4), lines


def dominant_kind(report: OOMReport) -> str | None:
    """Return the kind that holds most."""
    if report.kinds is None or not report.kinds.total_bytes:
        return None
    amounts = report.kinds.as_dict()
    return max(amounts, key=lambda kind: amounts[kind])
