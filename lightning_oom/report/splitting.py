"""What fewer rows at once would change, as far as a report can tell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_oom.report.record import OOMReport

__all__ = ["batchnorm_layers", "fewest_failed_rows", "split_refusal", "what_differs"]

_EVALUATION = ("validate", "test", "predict", "sanity_check")
_BATCHNORM = re.compile(r"BatchNorm|batch normalisation", re.IGNORECASE)
_OTHER_LOSS = re.compile(
    r"rows depend on each other|mean over something else|sum over rows|gradient of a part"
)
_SPLIT_ROWS = re.compile(r"micro-batches of (\d+) rows?")
_ONE_ROW = re.compile(r"^a single row does not fit|^the batch has one row")


def split_refusal(report: OOMReport) -> str | None:
    """Return why the recovery did not split the batch; ``None`` where it did or was not asked."""
    reasons = [line.partition(": ")[2] for line in report.declined if line.startswith("split: ")]
    if not reasons or fewest_failed_rows(report) is not None or _ONE_ROW.search(reasons[0]):
        return None
    return reasons[0]


def fewest_failed_rows(report: OOMReport) -> int | None:
    """Return the fewest rows that the recovery ran together in vain; ``None`` for no split."""
    rows = [int(match[1]) for a in report.attempts if (match := _SPLIT_ROWS.search(a.what))]
    one_failed = any(
        line.startswith("split: ") and _ONE_ROW.search(line.partition(": ")[2])
        for line in report.declined
    )
    return 1 if one_failed else min(rows, default=None)


def batchnorm_layers(report: OOMReport) -> list[str]:
    """Name the batch normalisation layers of the model; none outside of training."""
    if report.stage in _EVALUATION:
        return []
    return [m.path for m in report.modules if "BatchNorm" in m.type_name and m.is_leaf]


def what_differs(report: OOMReport) -> str | None:
    """Say what smaller batches would compute otherwise; ``None`` where nothing speaks for it."""
    reason = split_refusal(report) or ""
    layers = batchnorm_layers(report)
    if layers or _BATCHNORM.search(reason):
        named = f" ({', '.join(layers[:2])}{', ...' if len(layers) > 2 else ''})" if layers else ""  # noqa: PLR2004 - two fit
        return f"BatchNorm{named} takes its statistics over fewer rows"
    if _OTHER_LOSS.search(reason):
        return "the loss of the parts is another one than that of the whole batch"
    return None
