"""Remedies for a step that needs too much, with what each frees as far as the report can tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_oom.report.needs import expect_activations, rows_that_fit, standing_bytes
from lightning_oom.report.record import Remedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.report.record import OOMReport

__all__ = [
    "checkpoint_activations",
    "fewer_rows",
    "keep_no_graph",
    "lower_precision",
    "recover",
    "smaller_state",
]

_FREE, _CHEAP, _SLOWER, _WORK = range(4)
_EVALUATION = ("validate", "test", "predict", "sanity_check")
_LARGE_STATE_FRACTION = 0.4


def _saved_by_fewer_rows(report: OOMReport, rows: int | None) -> int | None:
    activations = expect_activations(report)
    if rows is None or activations is None or report.kinds is None or not report.rows:
        return None
    return int((activations + report.kinds.batch_bytes) * (1 - rows / report.rows))


def recover(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Let the recovery split what does not fit."""
    if report.has_recovery:
        return
    rows = rows_that_fit(report)
    yield (
        _FREE,
        Remedy(
            action="Add OOMRecovery: a batch that does not fit is repeated in parts that do.",
            setting="Trainer(callbacks=[OOMRecovery()])",
            saving_bytes=_saved_by_fewer_rows(report, rows),
            cost="nothing for batches that fit; the others are repeated in parts; same result",
        ),
    )


def fewer_rows(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Take smaller batches, and more of them for each optimizer step."""
    rows = rows_that_fit(report)
    if rows is None:
        if report.rows is None or report.rows > 1:
            yield (
                _CHEAP,
                Remedy(
                    action="Take a smaller batch and accumulate gradients over more of them.",
                    setting="Trainer(accumulate_grad_batches=2)",
                    cost="somewhat slower; BatchNorm sees fewer rows at once",
                ),
            )
        return
    times = math.ceil((report.rows or rows) / rows) * (report.accumulate or 1)
    is_fit = report.stage not in _EVALUATION
    accumulate = f", Trainer(accumulate_grad_batches={times})" if is_fit else ""
    yield (
        _CHEAP,
        Remedy(
            action=f"Take batches of {rows} rows instead of {report.rows}"
            + (f" and accumulate {times} of them: the same step." if is_fit else "."),
            setting=f"DataLoader(batch_size={rows}){accumulate}",
            saving_bytes=_saved_by_fewer_rows(report, rows),
            cost="every step is somewhat slower; BatchNorm sees fewer rows at once",
        ),
    )


def keep_no_graph(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Do not record what no backward will need."""
    if report.stage not in _EVALUATION or not report.uses_graph:
        return
    activations = report.kinds.activations_bytes if report.kinds is not None else None
    yield (
        _FREE,
        Remedy(
            action="Autograd was recording in a stage without a backward: evaluate without it.",
            setting="Trainer(inference_mode=True)",
            saving_bytes=activations,
            cost="none",
        ),
    )


def lower_precision(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Compute in 16 bits."""
    if report.precision is not None and not report.precision.startswith(("32", "64")):
        return
    if any(leaf.dtype in ("bfloat16", "float16") for leaf in report.tensors):
        return
    activations = expect_activations(report)
    yield (
        _CHEAP,
        Remedy(
            action="Compute in bfloat16 where that is enough: activations take half.",
            setting='Trainer(precision="bf16-mixed")',
            saving_bytes=activations // 2 if activations else None,
            cost="other rounding; faster on most GPUs",
        ),
    )


def checkpoint_activations(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Recompute activations instead of keeping them."""
    if report.stage in _EVALUATION:
        return
    kept = expect_activations(report)
    blocks = [m for m in report.modules if m.saved_bytes and not m.is_leaf and m.path]
    largest = max(blocks, key=lambda m: (m.saved_bytes or 0, m.path.count(".")), default=None)
    saving, most = None, ""
    if largest is not None and kept:
        saving = max(kept - (largest.saved_bytes or 0), 0) or None
        most = f" {largest.path} keeps most."
    yield (
        _SLOWER,
        Remedy(
            action=f"Checkpoint the model's blocks: keep their inputs and compute the rest again.{most}",
            setting="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            saving_bytes=saving,
            cost="one more forward for each step: about a third slower",
        ),
    )


def smaller_state(report: OOMReport) -> Iterator[tuple[int, Remedy]]:
    """Let optimizer and parameters take less."""
    kinds = report.kinds
    in_update = report.phase == "optimizer"
    if kinds is None and not in_update:
        return
    parameters = kinds.parameters_bytes if kinds is not None else None
    for optimizer in report.optimizers:
        if in_update and optimizer.foreach is not False:
            yield (
                _FREE,
                Remedy(
                    action=f"Let {optimizer.type_name} update one parameter at a time.",
                    setting=f"{optimizer.type_name}(..., foreach=False)",
                    saving_bytes=parameters,
                    cost="slower updates; the same result",
                ),
            )
        if (optimizer.expected_bytes or 0) > (parameters or 0) > 0:
            yield (
                _WORK,
                Remedy(
                    action=f"Use an optimizer with less state than {optimizer.type_name}: 8-bit "
                    "states, Adafactor, or SGD.",
                    setting="bitsandbytes.optim.AdamW8bit(...)",
                    saving_bytes=int(0.75 * (optimizer.expected_bytes or 0)),
                    cost="training may take another course",
                ),
            )
    large = standing_bytes(report) >= _LARGE_STATE_FRACTION * (report.limit_bytes or math.inf)
    if large or in_update:
        yield (
            _WORK,
            Remedy(
                action="Shard parameters, gradients and optimizer state over several GPUs.",
                setting='Trainer(strategy="fsdp", devices=2)',
                saving_bytes=standing_bytes(report) // 2 or None,
                cost="communication in each step",
            ),
        )
