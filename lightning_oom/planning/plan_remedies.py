"""What a plan may do to a step, and how a dry run does it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_oom.reduction.checkpointing import install

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from lightning_oom.planning.offload_dry_run import DryOffload

__all__ = [
    "ALWAYS_ALLOWED",
    "REMEDIES",
    "Remedies",
    "check_remedies",
    "step_in_groups",
    "step_one_by_one",
]

REMEDIES = ("zero_grad", "checkpoint", "rows", "offload", "optimizer", "precision")
"""Everything that a plan may use."""

ALWAYS_ALLOWED = REMEDIES[:-1]
"""What leaves the numbers of the training as they are, up to rounding."""

_MIXED = "bf16-mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """One combination.

    Attributes:
        num_micro_batches: Parts that the batch is run in; gradients accumulate over them.
        early_zero_grad: Old gradients are dropped before the forward.
        checkpointed: Paths of the checkpointed blocks.
        offload: Saved activations wait on the host.
        one_by_one: The optimizer steps one tensor at a time (``foreach=False``).
        mixed: Forward and loss run in bfloat16 autocast.

    Example:
        >>> Remedies(num_micro_batches=2, early_zero_grad=True).names
        ('zero_grad', 'rows')
    """

    num_micro_batches: int = 1
    early_zero_grad: bool = False
    checkpointed: tuple[str, ...] = ()
    offload: bool = False
    one_by_one: bool = False
    mixed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Which of :data:`REMEDIES` are used."""
        is_used = {
            "zero_grad": self.early_zero_grad,
            "checkpoint": self.checkpointed,
            "rows": self.num_micro_batches > 1,
            "offload": self.offload,
            "optimizer": self.one_by_one,
            "precision": self.mixed,
        }
        return tuple(name for name in REMEDIES if is_used[name])

    def precision_from(self, precision: str | int | None) -> str | int | None:
        """Return what the step computes in, where ``precision`` is the user's own."""
        return _MIXED if self.mixed else precision

    def run_options(self, offload: DryOffload | None, *, accumulate: int = 1) -> dict[str, Any]:
        """Return what :meth:`FakeStep.run <lightning_oom.planning.fake_step.FakeStep.run>` takes.

        Args:
            offload: Plays the host, where activations are to be moved.
            accumulate: Batches per optimizer step.
        """
        options: dict[str, Any] = {
            "zero_grad": "early" if self.early_zero_grad else "lightning",
            "accumulate": min(
                self.num_micro_batches * accumulate, 2
            ),  # more add nothing to the peak
            "prepare_optimizers": step_one_by_one if self.one_by_one else step_in_groups,
        }
        if self.checkpointed:
            options["transform"] = partial(install, paths=self.checkpointed)
        if offload is not None:
            options["forward_context"] = offload.around
        return options


def check_remedies(allow: Iterable[str]) -> frozenset[str]:
    """Return the remedies that are allowed.

    Args:
        allow: Out of :data:`REMEDIES`.

    Raises:
        ValueError: There is another name among them.
    """
    if isinstance(allow, str):
        allow = (allow,)
    allowed = frozenset(allow)
    unknown = sorted(allowed - set(REMEDIES))
    if unknown:
        raise ValueError(f"allow takes names out of {list(REMEDIES)}, got {unknown[0]!r}")
    return allowed


def step_one_by_one(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers step one tensor at a time, whose temporaries are as large as that tensor.

    Fused optimizers have no temporaries and are left alone.

    Args:
        optimizers: Changed in place.
    """
    _set_foreach(optimizers, value=False)


def step_in_groups(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Do what torch does by itself on an accelerator."""
    _set_foreach(optimizers, value=True, only_default=True)


def _set_foreach(
    optimizers: Iterable[torch.optim.Optimizer], *, value: bool, only_default: bool = False
) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            is_open = group["foreach"] is None or not only_default if "foreach" in group else False
            if is_open and not group.get("fused"):
                group["foreach"] = value
