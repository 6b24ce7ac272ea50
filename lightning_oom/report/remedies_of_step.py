"""Remedies that keep the batch whole, with what each frees as far as the report can tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_oom.report.dearness import (
    FREE,
    OTHER_RESULT,
    OTHER_ROUNDING,
    SLOWER,
    WORK,
    Found,
    Saving,
)
from lightning_oom.report.needs import expect_activations, expect_shortfall, standing_bytes
from lightning_oom.report.record import Remedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.report.record import OOMReport

__all__ = [
    "checkpoint_activations",
    "drop_gradients_early",
    "keep_no_graph",
    "lower_precision",
    "offload_activations",
    "smaller_model",
    "smaller_state",
]

_EVALUATION = ("validate", "test", "predict", "sanity_check")
_LARGE_STATE_FRACTION = 0.4
_NOTABLE_STATE_FRACTION = 0.15
_MOSTLY = 0.6
_PHASES_WITH_ACTIVATIONS = (None, "forward", "backward", "metrics")


def _keeps_activations(report: OOMReport) -> bool:
    """Whether the stage has a backward, and it ran out of memory where activations are held."""
    return report.stage not in _EVALUATION and report.phase in _PHASES_WITH_ACTIVATIONS


def _saving(report: OOMReport, fraction: float, *, less: int = 0) -> Saving:
    """Predict what a fraction of the activations is, and whether it is enough for the whole step.

    What is freed of this moment is never more than the activations that were there.
    """
    kinds, expected = report.kinds, expect_activations(report)
    if kinds is None or expected is None:
        return {}
    freed = max(int(expected * fraction) - less, 0)
    held = max(int(kinds.activations_bytes * fraction) - less, 0)
    shortfall = expect_shortfall(report)
    return {
        "saving_bytes": min(freed, held) or None,
        "suffices": None if shortfall is None or not freed else freed >= shortfall,
    }


def keep_no_graph(report: OOMReport) -> Iterator[Found]:
    """Do not record what no backward will need."""
    if report.stage not in _EVALUATION or not report.uses_graph:
        return
    activations = report.kinds.activations_bytes if report.kinds is not None else None
    yield (
        FREE,
        Remedy(
            action="Autograd was recording in a stage without a backward: NoGradEnforcer evaluates "
            "without it and names what turned it on.",
            setting="Trainer(callbacks=[NoGradEnforcer()])",
            saving_bytes=activations or None,
            cost="none",
        ),
    )


def drop_gradients_early(report: OOMReport) -> Iterator[Found]:
    """Let the gradients of the last step go before the forward of this one."""
    gradients = report.kinds.gradients_bytes if report.kinds is not None else 0
    in_forward = report.phase == "forward" and report.stage not in _EVALUATION
    if not gradients or not in_forward or report.has_recovery or (report.accumulate or 1) > 1:
        return
    yield (
        FREE,
        Remedy(
            action="Drop the gradients of the last step before the forward of the next one, not "
            "after it.",
            setting="Trainer(callbacks=[EarlyZeroGrad()])",
            saving_bytes=gradients,
            cost="none; the same result to the bit",
        ),
    )


def lower_precision(report: OOMReport) -> Iterator[Found]:
    """Compute in 16 bits."""
    if report.precision is not None and not report.precision.startswith(("32", "64")):
        return
    if report.phase not in _PHASES_WITH_ACTIVATIONS:
        return
    if any(leaf.dtype in ("bfloat16", "float16") for leaf in report.tensors):
        return
    halved = "activations take half" if _keeps_activations(report) else "what passes takes half"
    yield (
        OTHER_ROUNDING,
        Remedy(
            action=f"Compute in bfloat16 where that is enough: {halved}. AMPSwitcher does it only "
            "once memory runs out.",
            setting='Trainer(precision="bf16-mixed"), or '
            "Trainer(callbacks=[OOMRecovery(), AMPSwitcher()])",
            cost="other rounding; faster on most GPUs",
            **(_saving(report, 0.5) if _keeps_activations(report) else {}),
        ),
    )


def checkpoint_activations(report: OOMReport) -> Iterator[Found]:
    """Recompute activations instead of keeping them."""
    if not _keeps_activations(report):
        return
    kept = report.kinds.activations_bytes if report.kinds is not None else 0
    blocks = [
        m
        for m in report.modules
        if m.saved_bytes and not m.is_leaf and m.path and m.saved_bytes < _MOSTLY * kept
    ]
    largest = max(blocks, key=lambda m: (m.saved_bytes or 0, m.path.count(".")), default=None)
    saving: Saving = {}
    most = ""
    if largest is not None:
        saving = _saving(report, 1.0, less=largest.saved_bytes or 0)
        most = f" {largest.path} keeps most."
    yield (
        SLOWER,
        Remedy(
            action="Checkpoint the model's blocks: keep their inputs and compute the rest again."
            f"{most}",
            setting="Trainer(callbacks=[ActivationCheckpointing()])",
            cost="one more forward for each step: about a third slower; same result",
            **saving,
        ),
    )


def offload_activations(report: OOMReport) -> Iterator[Found]:
    """Keep activations in host memory until the backward asks for them."""
    if not _keeps_activations(report) or (report.device or "").startswith(("cpu", "mps")):
        return
    yield (
        SLOWER,
        Remedy(
            action="Keep activations in host memory until the backward needs them.",
            setting="Trainer(callbacks=[CPUOffload(activations=True)])",
            cost="copies to the host and back in each step; same result",
            **_saving(report, 1.0),
        ),
    )


def smaller_state(report: OOMReport) -> Iterator[Found]:
    """Let optimizer and parameters take less."""
    in_update = report.phase == "optimizer"
    if report.stage in _EVALUATION or (report.kinds is None and not in_update):
        return
    parameters = report.kinds.parameters_bytes if report.kinds is not None else None
    notable = _NOTABLE_STATE_FRACTION * (report.limit_bytes or math.inf)
    for optimizer in report.optimizers:
        expected = optimizer.expected_bytes or 0
        if in_update and optimizer.foreach is not False:
            yield (
                FREE,
                Remedy(
                    action=f"Let {optimizer.type_name} update one parameter at a time.",
                    setting=f"{optimizer.type_name}(..., foreach=False)",
                    saving_bytes=parameters or None,
                    suffices=_is_enough(report, parameters),
                    cost="slower updates; the same result",
                ),
            )
        if expected > (parameters or 0) > 0 and (in_update or expected >= notable):
            yield (
                OTHER_RESULT,
                Remedy(
                    action=f"Use an optimizer with less state than {optimizer.type_name}: 8-bit "
                    "states, Adafactor, or SGD.",
                    setting="bitsandbytes.optim.AdamW8bit(...)",
                    saving_bytes=int(0.75 * optimizer.state_bytes) or None,
                    suffices=_is_enough(report, int(0.75 * expected)),
                    cost="training may take another course",
                ),
            )
    large = standing_bytes(report) >= _LARGE_STATE_FRACTION * (report.limit_bytes or math.inf)
    if large or in_update:
        yield _shard(report)


def smaller_model(report: OOMReport) -> Iterator[Found]:
    """What is left where the model itself does not fit: no batch was there yet."""
    yield (
        OTHER_ROUNDING,
        Remedy(
            action="Keep the parameters in 16 bits: they take half.",
            setting='Trainer(precision="bf16-true")',
            cost="other rounding, also in the update",
        ),
    )
    yield _shard(report)


def _shard(report: OOMReport) -> Found:
    half = standing_bytes(report) // 2
    return (
        WORK,
        Remedy(
            action="Shard parameters, gradients and optimizer state over several GPUs.",
            setting='Trainer(strategy="fsdp", devices=2)',
            saving_bytes=half or None,
            suffices=_is_enough(report, half or None),
            cost="more GPUs, and communication in each step",
        ),
    )


def _is_enough(report: OOMReport, freed: int | None) -> bool | None:
    shortfall = expect_shortfall(report)
    return None if not freed or shortfall is None else freed >= shortfall
