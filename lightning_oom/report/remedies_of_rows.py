"""Remedies that let fewer rows of a batch be in memory at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_oom.report.dearness import CHEAP, FREE, OTHER_RESULT, Found, Saving
from lightning_oom.report.needs import bytes_per_row, expect_shortfall, rows_that_fit
from lightning_oom.report.record import Remedy
from lightning_oom.report.splitting import (
    batchnorm_layers,
    fewest_failed_rows,
    split_refusal,
    what_differs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.report.record import OOMReport

__all__ = ["fewer_rows", "recover"]

_EVALUATION = ("validate", "test", "predict", "sanity_check")


def recover(report: OOMReport) -> Iterator[Found]:
    """Let the recovery split what does not fit, or say on what terms it would have."""
    if report.has_recovery:
        yield from _let_it_split(report)
        return
    setting = "Trainer(callbacks=[OOMRecovery()])"
    layers = batchnorm_layers(report)
    if layers:
        yield (
            CHEAP,
            Remedy(
                action="Add OOMRecovery: it repeats the batch in chunks of rows where that gives the "
                f"same result. It does not split a step with BatchNorm ({layers[0]}) unless told to.",
                setting=setting,
                cost="nothing for batches that fit; where it cannot help, it says why",
            ),
        )
        return
    yield (
        FREE,
        Remedy(
            action="Add OOMRecovery: a batch that does not fit is repeated in parts that do.",
            setting=setting,
            cost="nothing for batches that fit; the others are repeated in parts; same result",
            **_saving(report, rows_that_fit(report, accumulating=report.stage not in _EVALUATION)),
        ),
    )


def _let_it_split(report: OOMReport) -> Iterator[Found]:
    reason = split_refusal(report)
    if reason is None:
        return
    if "weight_fn" in reason:
        yield (
            FREE,
            Remedy(
                action="Let OOMRecovery split by what the loss is a mean of, tokens say: it refused "
                "because rows are the wrong weights.",
                setting="OOMRecovery(weight_fn=lambda part: part['labels'].ne(-100).sum())",
                cost="nothing for batches that fit; same result",
                **_saving(report, rows_that_fit(report, accumulating=True)),
            ),
        )
    elif (differs := what_differs(report)) is not None:
        yield (
            OTHER_RESULT,
            Remedy(
                action="Let OOMRecovery split all the same, if what differs does not matter: "
                f"{differs}.",
                setting='OOMRecovery(on_inseparable="split")',
                cost="not the same step, for the batches that are split",
            ),
        )


def fewer_rows(report: OOMReport) -> Iterator[Found]:
    """Take smaller batches, and more of them for each optimizer step."""
    failed = fewest_failed_rows(report)
    is_fit = report.stage not in _EVALUATION
    rows = rows_that_fit(report, accumulating=is_fit)
    if report.rows == 1 or failed == 1 or rows == 0:
        return
    differs = what_differs(report) if is_fit else None
    if rows is not None and failed is not None:
        rows = min(rows, failed - 1)
    dearness = CHEAP if differs is None else OTHER_RESULT
    cost = f"not the same step: {differs}" if differs else "somewhat slower"
    if rows is None or report.rows is None:
        action, setting = _by_half(report) if is_fit else ("Take a smaller batch.", None)
        yield dearness, Remedy(action=action, setting=setting, cost=cost)
        return
    parts, each = _balance(report.rows, rows)
    action = f"Take batches of {_rows(each)} instead of {report.rows}"
    setting = f"DataLoader(batch_size={each})"
    if is_fit:
        is_same = parts * each == report.rows and differs is None
        action += f" and accumulate gradients over {parts}"
        action += ": the same step" if is_same else f" ({parts * each} rows for each step)"
        setting += f", Trainer(accumulate_grad_batches={parts * (report.accumulate or 1)})"
    yield (
        dearness,
        Remedy(action=f"{action}.", setting=setting, cost=cost, **_saving(report, each)),
    )


def _by_half(report: OOMReport) -> tuple[str, str]:
    """Say it without numbers."""
    action = (
        "Take a smaller batch and accumulate gradients over more of them (GradientAccumulation "
    )
    action += "weights a shorter last window right)."
    return action, f"Trainer(accumulate_grad_batches={2 * (report.accumulate or 1)})"


def _balance(rows: int, fitting: int) -> tuple[int, int]:
    """Cut rows into equal parts of at most ``fitting``; into some more, where that comes out even."""
    fewest = math.ceil(rows / fitting)
    even = next((parts for parts in range(fewest, 2 * fewest) if rows % parts == 0), None)
    parts = even or fewest
    return parts, math.ceil(rows / parts)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _saving(report: OOMReport, rows: int | None) -> Saving:
    """Predict what fewer rows free, and whether that is enough.

    What is freed of this moment is bounded by what the batch and all that came of it held then.
    """
    per_row, kinds = bytes_per_row(report), report.kinds
    if not rows or per_row is None or kinds is None or not report.rows:
        return {}
    freed = int(per_row * (report.rows - rows))
    held = kinds.activations_bytes + kinds.batch_bytes + kinds.other_bytes + report.gone_bytes
    shortfall = expect_shortfall(report)
    return {
        "saving_bytes": min(freed, int(held * (1 - rows / report.rows))) or None,
        "suffices": None if shortfall is None else freed >= shortfall,
    }
