"""What every rendering of a report says, in words and rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.report.place import users_line
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

__all__ = [
    "GONE_LABEL",
    "KIND_LABELS",
    "amounts_of",
    "batch_rows",
    "headline",
    "kind_rows",
    "module_rows",
    "one_line",
    "place_of",
    "tensor_rows",
]

KIND_LABELS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "batch": "batch",
    "activations": "activations",
    "other": "other",
}
"""Each kind of memory, in the order in which it is shown."""

GONE_LABEL = "freed as the error came up"
"""What the operator or the backward that failed held, and let go of before it could be counted."""

_STAGES = {
    "fit": "training",
    "train": "training",
    "validate": "validation",
    "validation": "validation",
    "sanity_check": "the sanity check",
    "test": "the test",
    "predict": "prediction",
}


def headline(report: OOMReport) -> str:
    """Return the title: what happened, where, and how it ended."""
    text = "Out of memory"
    if report.cause.scope == "host":
        text = "Out of host memory"
    elif report.cause.scope == "host_shm":
        text = "Out of shared memory"
    elif report.device is not None:
        text += f" on {report.device}"
        if report.device_name:
            text += f" ({report.device_name})"
    if report.requested_bytes is not None:
        text += f": asked for {format_bytes(report.requested_bytes)}"
        if report.limit_bytes is not None and report.cause.scope == "device":
            text += f" of {format_bytes(report.limit_bytes)}"
    return text + {"recovered": " - recovered", "skipped": " - batch skipped"}.get(
        report.outcome, ""
    )


def one_line(report: OOMReport) -> str:
    """Return the line for the console: what, where, why."""
    place = ", ".join(place_of(report)[:1])
    if report.module_path:
        place = f"{place}, in {report.module_path}" if place else f"in {report.module_path}"
    why = f" {report.diagnoses[0].title}" if report.diagnoses else ""
    return f"{headline(report)}{f' ({place})' if place else ''}.{why}"


def place_of(report: OOMReport) -> list[str]:
    """Return lines that say when and where it happened."""
    when = [
        text
        for text in (
            _STAGES.get(report.stage or "", report.stage),
            None if report.phase is None else f"phase {report.phase}",
            None if report.epoch is None else f"epoch {report.epoch}",
            None if report.batch_index is None else f"batch {report.batch_index}",
            None if report.step is None else f"optimizer step {report.step}",
            f"rank {report.rank}" if report.rank else None,
        )
        if text
    ]
    lines = [", ".join(when)] if when else []
    line = users_line(report.lines)
    where = " at ".join(text for text in (report.module_path, str(line) if line else None) if text)
    if where:
        lines.append(f"in {where}")
    return lines


def amounts_of(report: OOMReport) -> list[tuple[str, str]]:
    """Return the amounts that are known, by name."""
    amounts = {
        "requested": report.requested_bytes,
        "limit": report.limit_bytes,
        "allocated": report.allocated_bytes,
        "reserved": report.reserved_bytes,
        "reserved, unused": report.unallocated_bytes,
        "free on the device": report.free_bytes,
        "other processes": report.other_processes_bytes,
        "missing": report.missing_bytes or None,
    }
    return [(name, format_bytes(n)) for name, n in amounts.items() if n is not None]


def kind_rows(report: OOMReport) -> list[tuple[str, str, str]]:
    """Return kind, bytes and share of what was allocated."""
    if report.kinds is None:
        return []
    total = max(report.kinds.total_bytes + report.gone_bytes, 1)
    amounts = {**report.kinds.as_dict(), "gone": report.gone_bytes}
    return [
        (label, format_bytes(amounts[kind]), f"{amounts[kind] / total:.0%}")
        for kind, label in {**KIND_LABELS, "gone": GONE_LABEL}.items()
        if amounts[kind]
    ]


def batch_rows(report: OOMReport) -> list[tuple[str, str, str, str]]:
    """Return path, type, shape and bytes of each leaf of the batch."""
    return [
        (
            leaf.path,
            leaf.kind if leaf.dtype is None else f"{leaf.kind} {leaf.dtype}",
            ("" if leaf.shape is None else str(leaf.shape))
            + ("" if leaf.values is None else f" [{', '.join(leaf.values)}, ...]"),
            "" if leaf.num_bytes is None else format_bytes(leaf.num_bytes),
        )
        for leaf in report.batch
    ]


def tensor_rows(report: OOMReport) -> list[tuple[str, str, str, str, str]]:
    """Return bytes, shape, dtype, kind and owner of the largest tensors."""
    return [
        (
            format_bytes(tensor.num_bytes),
            "" if tensor.shape is None else str(tensor.shape),
            tensor.dtype or "",
            KIND_LABELS.get(tensor.kind, tensor.kind),
            tensor.owner + (f", made at {tensor.made_at}" if tensor.made_at else ""),
        )
        for tensor in report.tensors
    ]


def module_rows(report: OOMReport) -> list[tuple[str, str, str, str]]:
    """Return path, class, parameters and saved bytes of the modules that hold most."""
    ranked = sorted(
        report.modules, key=lambda m: (m.saved_bytes or 0, m.parameters_bytes), reverse=True
    )
    return [
        (
            module.path or "(model)",
            module.type_name,
            format_bytes(module.parameters_bytes),
            "" if module.saved_bytes is None else format_bytes(module.saved_bytes),
        )
        for module in ranked
    ]
