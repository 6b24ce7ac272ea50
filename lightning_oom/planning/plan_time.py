"""How long a step takes with remedies, as a multiple of the plain step: a model of few constants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_oom.planning.checkpoint_profile import recomputation_costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_oom.planning.plan_remedies import Remedies
    from lightning_oom.planning.trace import MemoryTrace, OperatorCall

__all__ = [
    "BUS_BYTES_PER_SECOND",
    "FLOPS_PER_SECOND",
    "KERNEL_SECONDS",
    "StepTime",
    "measure_work",
]

FLOPS_PER_SECOND = 30e12
"""What a device reaches in 32-bit with matrix units: an A100 in TF32 reaches 30 to 100 TFLOP/s. A
byte moved counts as 32 operations (``checkpoint_profile``), so that this is also 0.94 TB/s."""

KERNEL_SECONDS = 5e-6
"""What each kernel takes however small it is: launch and tail. It is paid anew for each micro-batch
and for each recomputation."""

BUS_BYTES_PER_SECOND = 12e9
"""What crosses the bus to pinned memory and back: PCIe 3 x16 in practice. Copies are taken not to
overlap with the computation, which is true where they take longer than it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Work and kernels of one pass over some rows."""

    flops: float
    num_kernels: int
    optimizer_flops: float
    block_flops: dict[str, float]
    block_kernels: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicts the time of a step with any remedies from two plain dry runs.

    The work of a pass grows on a line with its rows; what does not grow, such as reading the weights,
    is paid for each micro-batch. Checkpointed blocks run their forward twice. Mixed precision counts
    as no faster, dropping gradients early as free.

    Attributes:
        rows: Of the whole batch.
        large: Of a pass over all rows.
        small: Of a pass over few rows.
        small_rows: How many.
        grouped_kernels: Kernels of the optimizer's step in groups of tensors.
        single_kernels: One tensor at a time.
    """

    rows: int
    large: _Work
    small: _Work
    small_rows: int
    grouped_kernels: int
    single_kernels: int

    def seconds(self, remedies: Remedies, *, moved_bytes: float = 0.0) -> float:
        """Return the seconds of a step; only their ratios mean much.

        Args:
            remedies: What is done to the step.
            moved_bytes: Activations of the whole batch that go to the host and come back.
        """
        parts = remedies.num_micro_batches
        flops = self._at(parts, self.large.flops, self.small.flops)
        kernels = self.large.num_kernels
        for path in remedies.checkpointed:
            flops += self._at(
                parts, self.large.block_flops.get(path, 0), self.small.block_flops.get(path, 0)
            )
            kernels += self.large.block_kernels.get(path, 0)
        stepping = self.single_kernels if remedies.one_by_one else self.grouped_kernels
        return (
            (parts * flops + self.large.optimizer_flops) / FLOPS_PER_SECOND
            + (parts * kernels + stepping) * KERNEL_SECONDS
            + 2 * moved_bytes / BUS_BYTES_PER_SECOND
        )

    def _at(self, parts: int, large: float, small: float) -> float:
        """Return the work of one micro-batch, on the line through two numbers of rows."""
        if self.rows <= self.small_rows:
            return large
        slope = (large - small) / (self.rows - self.small_rows)
        return max(large + slope * (self.rows / parts - self.rows), 0.0)


def measure_work(trace: MemoryTrace, levels: Sequence[Sequence[str]]) -> tuple[_Work, int]:
    """Return what one traced step without remedies does, and the kernels of its optimizer.

    Args:
        trace: Of one step, with its operators.
        levels: Every block that might be checkpointed, at each granularity.
    """
    costs: dict[str, float] = {}
    total = recomputation_costs(trace, [])[1]
    for paths in levels:
        costs |= zip(paths, recomputation_costs(trace, paths)[0], strict=True)
    kernels = [call for call in trace.operators if _is_kernel(call)]
    stepping = [call for call in kernels if call.phase == "optimizer"]
    optimizer_flops = 0.0
    if stepping:
        calls = tuple(call for call in trace.operators if call.phase == "optimizer")
        optimizer_flops = _total(trace, calls)
    work = _Work(
        flops=total - optimizer_flops,
        num_kernels=len(kernels) - len(stepping),
        optimizer_flops=optimizer_flops,
        block_flops=costs,
        block_kernels={path: _count_forward(kernels, path) for path in costs},
    )
    return work, len(stepping)


def _total(trace: MemoryTrace, calls: tuple[OperatorCall, ...]) -> float:
    return recomputation_costs(replace(trace, operators=calls), [])[1]


def _count_forward(kernels: Iterable[OperatorCall], path: str) -> int:
    return sum(
        call.phase == "forward" and (call.module == path or call.module.startswith(f"{path}."))
        for call in kernels
    )


def _is_kernel(call: OperatorCall) -> bool:
    """Say whether an operator computes: views do not."""
    inputs = {spec.storage for spec in call.inputs}
    is_view = bool(call.outputs) and all(spec.storage in inputs for spec in call.outputs)
    return not is_view or call.name.split(".")[1].endswith("_")
