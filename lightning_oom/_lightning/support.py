"""Which set-ups the recovery can guard, and in which words it declines the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_oom._lightning.names import missing_names

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["overrides", "overrides_transfer", "reason_not_to_guard"]

_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")


def reason_not_to_guard(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why out-of-memory errors must pass through unchanged, or ``None`` when they need not.

    Args:
        trainer: The trainer in its ``setup`` stage.
        module: The module it runs.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy) or trainer.world_size > 1:
        return (
            f"{type(strategy).__name__} runs {trainer.world_size} process(es) whose ranks would have "
            "to agree on a retry; only strategies with a single device are guarded"
        )
    if trainer.training and not module.automatic_optimization:
        return (
            f"{type(module).__name__} uses manual optimization, where a step may have updated "
            "parameters before it runs out of memory"
        )
    missing = missing_names(trainer, module)
    if missing:
        return "this Lightning release has moved what the recovery relies on: " + ", ".join(missing)
    return None


def overrides(module: LightningModule, hook: str) -> bool:
    """Whether the user's module has its own version of a hook."""
    return is_overridden(hook, module)


def overrides_transfer(trainer: Trainer) -> bool:
    """Whether code of the user runs while a batch is moved to the device."""
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
    return any(
        is_overridden(hook, owner)
        for owner in owners
        if owner is not None
        for hook in _TRANSFER_HOOKS
    )
