"""What the whole step would have needed, extended from what it had reached."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_oom.units import MIB

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

__all__ = [
    "bytes_per_row",
    "expect_activations",
    "expect_shortfall",
    "rows_that_fit",
    "standing_bytes",
]

_MARGIN = 0.9
_TYPICAL_IN_SEGMENT = {2 * MIB: MIB // 2, 20 * MIB: 5 * MIB}
"""Segment that the allocator asks for, and the middle of the sizes that it does so for."""
_EVALUATION = ("validate", "test", "predict", "sanity_check")
_PHASES_OF_ROWS = (None, "forward", "backward", "transfer", "metrics")


def standing_bytes(report: OOMReport) -> int:
    """Return what does not depend on the batch: parameters, buffers, gradients, optimizer state."""
    kinds = report.kinds
    if kinds is None:
        return 0
    return (
        kinds.parameters_bytes + kinds.buffers_bytes + kinds.gradients_bytes + kinds.optimizer_bytes
    )


def expect_activations(report: OOMReport) -> int | None:
    """Predict what autograd would have kept at the end of the forward; ``None`` for unknown.

    A forward that got through a part of the modules is extended in proportion to them.
    """
    kinds, progress = report.kinds, _progress(report)
    if kinds is None or progress is None:
        return None
    reached = kinds.activations_bytes
    if progress < 1:
        reached += kinds.other_bytes + _refused_bytes(report)
    return int(reached / progress)


def expect_shortfall(report: OOMReport) -> int | None:
    """Predict by how much the whole step would have exceeded the device; ``None`` for unknown.

    At least what was missing for the request that was refused.
    """
    limit, missing = _own_limit(report), report.missing_bytes
    needed = _needed_for_batch(report)
    if needed is None or limit is None:
        return missing
    return max(standing_bytes(report) + needed - limit, missing or 0)


def bytes_per_row(report: OOMReport) -> float | None:
    """Predict what each row of the batch takes at the peak of the step; ``None`` for unknown.

    The peak, less what does not depend on the rows, over the rows.
    """
    needed = _needed_for_batch(report)
    if needed is None or not report.rows or report.phase not in _PHASES_OF_ROWS:
        return None
    return needed / report.rows


def rows_that_fit(report: OOMReport, *, accumulating: bool = False) -> int | None:
    """Predict how many rows of this batch fit together.

    Assumes that what is neither parameter, buffer, gradient nor optimizer state grows in proportion
    to the rows, and that optimizer state which the first update makes is there.

    Args:
        report: The record.
        accumulating: Gradients of earlier batches are there as well.

    Returns:
        Fewer than the batch has, 0 where not even one row would fit; ``None`` where the report does
        not know enough, and where the numbers say that all rows should have fitted.
    """
    limit, rows, per_row = _own_limit(report), report.rows, bytes_per_row(report)
    if limit is None or per_row is None or rows is None or rows <= 1:
        return None
    fitting = max(limit - _standing_later(report, accumulating), 0) / per_row
    with_margin = max(math.floor(_MARGIN * fitting), min(math.floor(fitting), 1))
    return with_margin if with_margin < rows else None


def _standing_later(report: OOMReport, accumulating: bool) -> int:
    """Return what does not depend on the batch, once the first update has made its state."""
    kinds = report.kinds
    if kinds is None or report.stage in _EVALUATION:
        return standing_bytes(report)
    expected = sum(optimizer.expected_bytes or 0 for optimizer in report.optimizers)
    more = max(expected - kinds.optimizer_bytes, 0)
    if accumulating:
        more += max(kinds.parameters_bytes - kinds.gradients_bytes, 0)
    return standing_bytes(report) + more


def _needed_for_batch(report: OOMReport) -> int | None:
    """Return what the batch would take on the device with all that comes of it."""
    kinds, activations = report.kinds, expect_activations(report)
    if kinds is None or activations is None or report.cause.scope != "device":
        return None
    if (report.device or "cpu").startswith("cpu") and report.cause.allocated_bytes is None:
        return None  # what is counted there is the resident set of the whole process
    seen = kinds.total_bytes + report.gone_bytes + _refused_bytes(report) - standing_bytes(report)
    return max(activations + kinds.batch_bytes, seen, 1)


def _progress(report: OOMReport) -> float | None:
    """Return which part of the modules a training forward had got through, above 0 and up to 1."""
    if report.phase != "forward" or not report.uses_graph:
        return 1.0
    with_parameters = [m for m in report.modules if m.is_leaf and m.parameters_bytes]
    done = sum(bool(m.saved_bytes) for m in with_parameters)
    if not with_parameters or (not done and any(m.saved_bytes is None for m in with_parameters)):
        return None
    return min((done + 1) / len(with_parameters), 1.0)  # one more was running


def _refused_bytes(report: OOMReport) -> int:
    """Return the size of the tensor that was refused; for small ones the error names the segment."""
    requested = report.requested_bytes or 0
    return _TYPICAL_IN_SEGMENT.get(requested, requested)


def _own_limit(report: OOMReport) -> int | None:
    """Return what this process can have of the device now."""
    amounts, reading = report.amounts, report.reading
    if amounts.room_bytes is not None and amounts.allocated_bytes is not None:
        held = amounts.reserved_bytes
        return amounts.room_bytes + (amounts.allocated_bytes if held is None else held)
    if reading is not None and reading.limit_bytes is not None:
        return reading.limit_bytes
    return report.limit_bytes
