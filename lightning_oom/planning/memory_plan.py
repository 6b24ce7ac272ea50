"""Decide how to run a training step so that it fits, with the least predicted slowdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.planning.longest_batch import longest_batch
from lightning_oom.planning.plan_remedies import (
    ALWAYS_ALLOWED,
    REMEDIES,
    Remedies,
    check_remedies,
)
from lightning_oom.planning.plan_search import PlanSearch
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_oom.planning.target import TargetDevice

__all__ = ["MemoryPlan", "make_plan", "plan_memory"]

_MIXES_ROWS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How to run a training step in a limit.

    Attributes:
        limit_bytes: What the device can hold.
        fits: Whether the upper bound of the plan is in the limit. Where it is not, the plan is the
            one that needs least.
        remedies: What is done.
        rows: Of the batch that was planned for; ``None`` where it has none.
        precision: What the step computes in, as the Trainer calls it.
        slowdown: Predicted time of a step over that of the plain one, less 1; at least 0.
        allocated_bytes: The most in live tensors, expected.
        peak_bytes: What the device has to hold, expected.
        upper_bytes: The upper bound of the interval and 20 MiB, which had to be in the limit.
        plain_peak_bytes: As ``peak_bytes``, of the step as it is.
        plain_upper_bytes: As ``upper_bytes``, of the step as it is.
        smallest_limit_bytes: What a device would have to hold for a plan with the allowed remedies;
            ``None`` where the plan fits.
        missing: Remedies that are not allowed and would make it fit, each alone, or all together
            where none does alone; empty where the plan fits, or nothing helps.
        excluded: Remedies that were allowed and do not go with the module, with the reason.
        device: Name of the target.
        coverage: Of the interval.
        batch: What batch this was planned for, in words.
        num_dry_runs: Steps that were simulated.
    """

    limit_bytes: int
    fits: bool
    remedies: Remedies
    rows: int | None
    precision: str
    slowdown: float
    allocated_bytes: int
    peak_bytes: int
    upper_bytes: int
    plain_peak_bytes: int
    plain_upper_bytes: int
    smallest_limit_bytes: int | None
    missing: tuple[str, ...]
    excluded: tuple[str, ...]
    device: str
    coverage: float
    batch: str
    num_dry_runs: int

    @property
    def rows_per_micro_batch(self) -> int | None:
        """Rows that run together; ``None`` where the batch has no rows."""
        return None if self.rows is None else -(-self.rows // self.remedies.num_micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        remedies = self.remedies
        return {
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "rows": self.rows,
            "rows_per_micro_batch": self.rows_per_micro_batch,
            "num_micro_batches": remedies.num_micro_batches,
            "early_zero_grad": remedies.early_zero_grad,
            "checkpointed": list(remedies.checkpointed),
            "offload_activations": remedies.offload,
            "optimizer_one_by_one": remedies.one_by_one,
            "precision": self.precision,
            "slowdown": self.slowdown,
            "allocated_bytes": self.allocated_bytes,
            "peak_bytes": self.peak_bytes,
            "upper_bytes": self.upper_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "plain_upper_bytes": self.plain_upper_bytes,
            "smallest_limit_bytes": self.smallest_limit_bytes,
            "missing": list(self.missing),
            "excluded": list(self.excluded),
            "device": self.device,
            "coverage": self.coverage,
            "batch": self.batch,
            "num_dry_runs": self.num_dry_runs,
        }


def plan_memory(
    module: torch.nn.Module,
    datamodule_or_batch: Any,
    limit: int | str,
    *,
    precision: str | int | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device: TargetDevice | torch.device | str | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    coverage: float = 0.9,
    allow: Iterable[str] = ALWAYS_ALLOWED,
) -> MemoryPlan:
    """Choose what to do to a training step so that it stays in a limit, least slowdown first.

    Every combination that is taken has been run on fake tensors as a whole, and the upper bound of
    its interval is in the limit; savings are never added up. With a larger limit the plan is never
    slower. Nothing is changed and nothing is allocated on a device.

    ==============  =====================================================================
    Remedy          What it does
    ==============  =====================================================================
    ``zero_grad``   old gradients are dropped before the forward
    ``checkpoint``  some repeated blocks run their forward again in the backward
    ``rows``        micro-batches whose gradients accumulate; not with batch normalisation
    ``offload``     saved activations wait on the host
    ``optimizer``   ``foreach=False``: one tensor at a time, with small temporaries
    ``precision``   bfloat16 autocast; changes the numbers, and so only where it is named
    ==============  =====================================================================

    Args:
        module: A LightningModule, or any ``nn.Module``.
        datamodule_or_batch: A DataLoader, or something with ``train_dataloader()``, whose longest
            batch is looked for (:func:`~lightning_oom.planning.longest_batch.longest_batch`); all
            else is taken for the batch itself.
        limit: What the device can hold, in bytes or as text such as ``"24 GiB"``; above 0.
        precision: As in ``Trainer(precision=...)``; ``None`` is 32-bit.
        optimizer: Makes an optimizer from parameters; ``None`` asks ``configure_optimizers``.
        device: The target, as for :func:`~lightning_oom.planning.estimate.estimate_peak`.
        loss: For a module without ``training_step``: ``loss(module, batch)``.
        coverage: Of the interval whose upper bound has to fit, above 0 and below 1.
        allow: Remedies out of those above.

    Returns:
        The plan.

    Raises:
        StepNotTracedError: The step cannot be run on fake tensors; the message names the line.
        ValueError: An argument is out of its range.

    Note:
        The time is that of a simple model (``plan_time``): operations and bytes of the step, 5 us per
        kernel, 12 GB/s over the bus. Losses that compare rows of a batch with each other are not
        recognised here; ``OOMRecovery`` does, and then does not split.

        Cost: some 6 dry runs where the step fits as it is, 15 to 50 where much has to be tried; each
        takes 1 to 4 s for BERT-base.

    Example:
        >>> layers = [m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        >>> model = torch.nn.Sequential(*layers)
        >>> batch = torch.zeros(65536, 64)
        >>> plan = plan_memory(model, batch, "96 MiB", optimizer=torch.optim.SGD, device="cpu")
        >>> plan.fits, plan.remedies.names, plan.rows_per_micro_batch < 65536
        (True, ('rows',), True)
    """
    allowed = check_remedies(allow)
    limit_bytes = parse_bytes(limit)
    if limit_bytes < 1:
        raise ValueError(f"limit must be above 0, got {limit!r}")
    found = longest_batch(datamodule_or_batch)
    search = PlanSearch(
        module,
        found.batch,
        precision=precision,
        optimizer=optimizer,
        device=device,
        loss=loss,
        coverage=coverage,
    )
    return make_plan(search, module, limit_bytes, allow=allowed, batch=found.origin)


def make_plan(
    search: PlanSearch,
    module: torch.nn.Module,
    limit_bytes: int,
    *,
    allow: Iterable[str] = ALWAYS_ALLOWED,
    batch: str = "the batch as given",
) -> MemoryPlan:
    """Choose a plan from a search, which may have been used for other limits before.

    Args:
        search: Of the step.
        module: Looked at for layers that mix rows.
        limit_bytes: What the device can hold.
        allow: Remedies that may be used.
        batch: What batch the search is about, in words.
    """
    allowed = check_remedies(allow)
    mixing = _layers_that_mix_rows(module)
    excluded: tuple[str, ...] = ()
    possible = frozenset(REMEDIES)
    if mixing:
        possible -= {"rows"}
        if "rows" in allowed:
            excluded = (f"rows: {mixing[0]} normalises over the batch, which may not be split",)
    allowed &= possible
    best = search.best(limit_bytes, allowed)
    fits = best is not None
    smallest: int | None = None
    missing: tuple[str, ...] = ()
    if best is None:
        best = search.leanest(allowed)
        smallest = best.upper_bytes
        missing = _missing(search, limit_bytes, allowed, possible)
    plain = search.candidate(Remedies())
    assert plain is not None  # noqa: S101 - it was run when the search was made
    return MemoryPlan(
        limit_bytes=limit_bytes,
        fits=fits,
        remedies=best.remedies,
        rows=search.rows,
        precision=str(best.remedies.precision_from(search.precision)),
        slowdown=max(best.seconds / plain.seconds - 1, 0.0),
        allocated_bytes=best.allocated_bytes,
        peak_bytes=best.peak_bytes,
        upper_bytes=best.upper_bytes,
        plain_peak_bytes=plain.peak_bytes,
        plain_upper_bytes=plain.upper_bytes,
        smallest_limit_bytes=smallest,
        missing=missing,
        excluded=excluded,
        device=search.target.name,
        coverage=search.coverage,
        batch=batch,
        num_dry_runs=search.num_dry_runs,
    )


def _missing(
    search: PlanSearch, limit_bytes: int, allowed: frozenset[str], possible: frozenset[str]
) -> tuple[str, ...]:
    others = [name for name in REMEDIES if name in possible - allowed]
    alone = [n for n in others if search.leanest(allowed | {n}).upper_bytes <= limit_bytes]
    if not alone and others and search.leanest(possible).upper_bytes <= limit_bytes:
        alone = others
    return tuple(alone)


def _layers_that_mix_rows(module: torch.nn.Module) -> list[str]:
    return [
        path or type(part).__name__
        for path, part in module.named_modules()
        if isinstance(part, _MIXES_ROWS) and part.training
    ]
