"""A memory plan in words, as a table, and as the YAML to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_oom.planning.memory_plan import MemoryPlan

__all__ = ["plan_line", "plan_steps", "plan_table", "plan_yaml"]

_SHOWN = 3


def plan_steps(plan: MemoryPlan) -> list[str]:
    """Say what a plan does, one phrase for each remedy; none for the step as it is.

    Args:
        plan: Of a step.
    """
    remedies = plan.remedies
    steps = []
    if remedies.num_micro_batches > 1:
        steps.append(
            f"run {plan.rows_per_micro_batch} of {plan.rows} rows at a time "
            f"({remedies.num_micro_batches} micro-batches)"
        )
    if remedies.early_zero_grad:
        steps.append("drop old gradients before the forward")
    if remedies.checkpointed:
        count = len(remedies.checkpointed)
        steps.append(
            f"checkpoint {count} block{'s' * (count > 1)} ({_some(remedies.checkpointed)})"
        )
    if remedies.offload:
        steps.append("keep saved activations on the host")
    if remedies.one_by_one:
        steps.append("step the optimizer one tensor at a time (foreach=False)")
    if remedies.mixed:
        steps.append(f"compute in {plan.precision}")
    return steps


def plan_line(plan: MemoryPlan) -> str:
    """Say a plan in one line.

    Args:
        plan: Of a step.
    """
    limit = format_bytes(plan.limit_bytes)
    needs = f"{format_bytes(plan.peak_bytes)}, at most {format_bytes(plan.upper_bytes)}"
    if not plan.fits:
        return f"nothing that may be done fits into {limit}: {_what_would(plan)}"
    steps = plan_steps(plan)
    if not steps:
        return f"the step fits into {limit} as it is: {needs}"
    return (
        f"to fit into {limit}: {'; '.join(steps)}. Predicted: {needs} (as it is: "
        f"{format_bytes(plan.plain_peak_bytes)}), {plan.slowdown:.0%} slower"
    )


def plan_table(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Return rows of a table: what, and its value.

    Args:
        plan: Of a step.
    """
    rows = [
        ("limit", f"{format_bytes(plan.limit_bytes)} on {plan.device}"),
        ("planned for", f"{plan.batch}{'' if plan.rows is None else f', {plan.rows} rows'}"),
        ("as it is", _amounts(plan.plain_peak_bytes, plan.plain_upper_bytes, plan)),
    ]
    if plan.fits:
        rows.append(("plan", _amounts(plan.peak_bytes, plan.upper_bytes, plan)))
        rows += [("", step) for step in plan_steps(plan) or ["change nothing"]]
        rows.append(("slowdown", f"{plan.slowdown:.0%}, by a model of few constants"))
    else:
        rows.append(("plan", f"nothing fits; {_what_would(plan)}"))
    rows += [("left out", reason) for reason in plan.excluded]
    return rows


def plan_yaml(plan: MemoryPlan) -> str:
    """Return what to paste into a LightningCLI config; empty where there is nothing to change.

    Args:
        plan: One that fits.

    Example:
        >>> from lightning_oom.planning.memory_plan import plan_memory
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> plan = plan_memory(model, torch.zeros(65536, 64), "80 MiB", device="cpu")
        >>> print(plan_yaml(plan))  # doctest: +ELLIPSIS
        trainer:
          callbacks:
            - class_path: lightning_oom.OOMRecovery
              init_args:
                max_rows: ...
    """
    remedies = plan.remedies
    lines: list[str] = []
    if remedies.mixed:
        lines.append(f"  precision: {plan.precision}")
    callbacks: list[str] = []
    if remedies.early_zero_grad:
        callbacks += _callback("EarlyZeroGrad")
    if remedies.checkpointed:
        callbacks += _callback("ActivationCheckpointing", "modules:")
        callbacks += [f"          - {path}" for path in remedies.checkpointed]
    if remedies.offload:
        callbacks += _callback("CPUOffload", "activations: true")
    if remedies.num_micro_batches > 1:
        callbacks += _callback("OOMRecovery", f"max_rows: {plan.rows_per_micro_batch}")
    if callbacks:
        lines += ["  callbacks:", *callbacks]
    if lines:
        lines.insert(0, "trainer:")
    if remedies.one_by_one:
        lines.append(
            "# and foreach=False for the optimizer, in configure_optimizers or its init_args"
        )
    return "\n".join(lines)


def _callback(name: str, *arguments: str) -> list[str]:
    lines = [f"    - class_path: lightning_oom.{name}"]
    if arguments:
        lines += ["      init_args:", *(f"        {argument}" for argument in arguments)]
    return lines


def _what_would(plan: MemoryPlan) -> str:
    would = f"the least that is needed is {format_bytes(plan.upper_bytes)}"
    steps = plan_steps(plan)
    if steps:
        would += f" ({'; '.join(steps)})"
    if plan.missing:
        would += f"; it would fit if {' or '.join(map(repr, plan.missing))} were allowed"
    return would


def _amounts(peak_bytes: int, upper_bytes: int, plan: MemoryPlan) -> str:
    tail = f"{(1 + plan.coverage) / 2:.0%}"
    return f"{format_bytes(peak_bytes)}, at most {format_bytes(upper_bytes)} ({tail})"


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_SHOWN])
    return shown if len(paths) <= _SHOWN else f"{shown}, ..."
