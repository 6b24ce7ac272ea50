"""Apply a memory plan to a running trainer, and say which remedies do not go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_oom._lightning.precision import install_precision, reason_not_to_switch
from lightning_oom._lightning.session import session_of
from lightning_oom._lightning.support import overrides
from lightning_oom._lightning.zero_first import (
    install_zero_first,
    reason_not_to_zero_first,
    zeroes_first,
)
from lightning_oom._torch import tree_leaves
from lightning_oom.planning.longest_batch import FoundBatch, longest_batch, size_of
from lightning_oom.planning.plan_remedies import step_one_by_one
from lightning_oom.reduction.checkpointing import install
from lightning_oom.reduction.offload import offload_activations
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.planning.plan_remedies import Remedies
    from lightning_oom.undo import UndoStack

__all__ = ["apply_plan", "impossible_remedies", "planned_batch"]

_MIXED: Final = "bf16-mixed"
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


def planned_batch(trainer: Trainer, module: LightningModule, batch: Any) -> FoundBatch:
    """Return the longest batch of the training data, or ``batch`` where none longer can be found.

    Args:
        trainer: In its first training batch.
        module: Whose transfer hooks may change batches: then only ``batch`` is known.
        batch: The first one, as the step gets it.
    """
    first = FoundBatch(batch, "the first batch")
    owners = [module, getattr(trainer, "datamodule", None)]
    loader = trainer.train_dataloader
    hooked = any(overrides(o, hook) for o in owners if o is not None for hook in _TRANSFER_HOOKS)
    if hooked or not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return first
    try:
        found = longest_batch(loader)
    except ValueError:
        return first
    return found if size_of(found.batch) > size_of(batch) else first


def impossible_remedies(trainer: Trainer, module: LightningModule) -> frozenset[str]:
    """Return the remedies of a plan that do not go with a run.

    Args:
        trainer: In its first training batch.
        module: That it trains.
    """
    impossible = set()
    if reason_not_to_zero_first(trainer, module) is not None and not _zeroes_early(trainer):
        impossible.add("zero_grad")
    if session_of(trainer) is None:
        impossible.add("rows")
    strategy = trainer.strategy
    known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if not known or strategy.root_device.type == "cpu":
        impossible.add("offload")
    if reason_not_to_switch(trainer, module, _MIXED) is not None:
        impossible.add("precision")
    return frozenset(impossible)


def apply_plan(
    trainer: Trainer,
    module: LightningModule,
    remedies: Remedies,
    rows_together: int | None,
    undos: UndoStack,
) -> None:
    """Change a run to what a plan says.

    Args:
        trainer: Between two steps.
        module: That it trains.
        remedies: Of the plan.
        rows_together: Rows of a micro-batch.
        undos: Takes the undo of each change.
    """
    if remedies.early_zero_grad and not _zeroes_early(trainer):
        undos.push(install_zero_first(trainer))
    if remedies.checkpointed:
        undos.push(install(module, remedies.checkpointed))
    if remedies.offload:
        undos.push(_offload(trainer))
    if remedies.one_by_one:
        undos.push(_step_one_by_one(trainer))
    if remedies.mixed:
        undos.push(install_precision(trainer, _MIXED))
    session = session_of(trainer)
    if remedies.num_micro_batches > 1 and rows_together is not None and session is not None:
        undos.push(session.limit_rows(rows_together))


def _zeroes_early(trainer: Trainer) -> bool:
    return zeroes_first(trainer.fit_loop.epoch_loop.automatic_optimization)


def _offload(trainer: Trainer) -> Undo:
    strategy = trainer.strategy
    step = strategy.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        module = trainer.lightning_module
        held = [*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs))]
        with offload_activations(keep=held):
            del held
            return step(*args, **kwargs)

    return shadow(strategy, "training_step", training_step)


def _step_one_by_one(trainer: Trainer) -> Undo:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [(group, group["foreach"]) for group in groups if "foreach" in group]
    step_one_by_one(trainer.optimizers)

    def put_back() -> None:
        for group, value in before:
            if group.get("foreach") is False:
                group["foreach"] = value

    return Undo(put_back)
