"""What a plan, and the checkpointing of a fit, come to in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_oom.planning.checkpoint_plan import CheckpointPlan
    from lightning_oom.reduction.checkpointing import CheckpointMeter

__all__ = ["checkpoint_report", "plan_problem"]

_SHOWN = 3
_STANDING = ("parameter", "buffer", "batch", "gradient", "optimizer")


def plan_problem(plan: CheckpointPlan) -> str | None:
    """Say what a plan could not do: stay in its budget, or use a block; ``None`` for nothing."""
    parts = []
    if plan.budget_bytes is not None and not plan.is_feasible:
        budget = format_bytes(plan.budget_bytes)
        if plan.cannot_help:
            peak = format_bytes(plan.plain_peak_bytes)
            parts.append(
                f"checkpointing cannot help to stay in {budget}: at the predicted peak of {peak}, "
                f"{_standing(plan)}, and no block is checkpointed"
            )
        else:
            peak = format_bytes(plan.peak_bytes)
            parts.append(
                f"no choice of blocks stays in {budget}: the lowest predicted peak is {peak}, at "
                f"which {_standing(plan)}; {_blocks(plan.paths)} are checkpointed"
            )
    if plan.dropped:
        parts.append(
            f"{_blocks(plan.dropped)} left out: their forward cannot be repeated (a dry run broke)"
        )
    return "; ".join(parts) or None


def _standing(plan: CheckpointPlan) -> str:
    """Say what is held at the peak that checkpointing does not lower."""
    kinds = [kind for kind in _STANDING if plan.peak_kinds.get(kind)]
    held_bytes = sum(plan.peak_kinds[kind] for kind in kinds)
    named = " and ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))
    return f"{named} hold {format_bytes(held_bytes)}"


def checkpoint_report(
    paths: Sequence[str], meter: CheckpointMeter | None, plan: CheckpointPlan | None
) -> str:
    """Say in one line what is checkpointed, what that saves and what it costs.

    Args:
        paths: The checkpointed modules.
        meter: What was measured; ``None`` for nothing.
        plan: What was predicted; ``None`` where nothing was.

    Example:
        >>> checkpoint_report(["h.0", "h.1"], None, None)
        '2 blocks (h.0, h.1) run again in the backward pass'
    """
    if not paths:
        text = "no block is checkpointed"
        if plan is not None and plan.is_feasible:
            text += ": the step fits without"
    else:
        text = f"{_blocks(paths)} run again in the backward pass"
        text += "" if meter is None else _measured(meter)
    if plan is not None:
        text += f"; predicted peak {format_bytes(plan.peak_bytes)}"
        if paths:
            text += f" instead of {format_bytes(plan.plain_peak_bytes)}"
        if plan.budget_bytes is not None:
            text += f", budget {format_bytes(plan.budget_bytes)}"
    return text


def _measured(meter: CheckpointMeter) -> str:
    text = (
        f": {format_bytes(meter.saved_bytes)} less kept for it, of which up to "
        f"{format_bytes(meter.largest_bytes)} come back at once (measured)"
    )
    seconds = meter.seconds()
    if seconds is not None:
        again, step = seconds
        text += f", for {again:.3g} s of a step of {step:.3g} s (measured)"
    return text


def _blocks(paths: Sequence[str]) -> str:
    shown = list(paths) if len(paths) <= _SHOWN else [*paths[: _SHOWN - 1], "...", paths[-1]]
    return f"{len(paths)} block{'s' if len(paths) > 1 else ''} ({', '.join(shown)})"
