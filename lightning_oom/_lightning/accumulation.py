"""Where accumulation windows begin and end, and how heavy each loss is: said by a callback."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_oom._lightning.names import ACCUMULATION_NAMES, missing_names
from lightning_oom._lightning.zero_first import runs_step_several_times
from lightning_oom.undo import Undo, UndoStack, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["WindowControl", "has_scheduler", "loader_batch_size", "reason_not_to_accumulate"]


def reason_not_to_accumulate(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why windows cannot be set from outside; ``None`` when they can.

    Args:
        trainer: The trainer, from ``setup`` on; optimizers are looked at once they are there.
        module: The module it trains.
    """
    return next(_reasons(trainer, module), None)


def _reasons(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield f"{type(module).__name__} uses manual optimization and steps when it likes"
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        yield f"{type(trainer.strategy).__name__} does not leave whole gradients on each device"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step fetches its own batches, whose rows are not known beforehand"
    for optimizer in trainer.optimizers:
        if runs_step_several_times(optimizer):
            yield f"{type(optimizer).__name__} runs the training step several times an update"
    missing = missing_names(trainer, module, table=ACCUMULATION_NAMES)
    if missing:
        yield "this Lightning release has moved what it relies on: " + ", ".join(missing)


def has_scheduler(trainer: Trainer) -> bool:
    """Whether a ``GradientAccumulationScheduler`` sets the windows of this trainer."""
    return any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    )


def loader_batch_size(trainer: Trainer) -> int | None:
    """Return the batch size of the one training loader, if there is one and it says."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if len(loaders) != 1:
        return None
    sampler = getattr(loaders[0], "batch_sampler", None)
    for owner in (loaders[0], sampler):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


class WindowControl:
    """Takes the place of Lightning's own counting of batches.

    Args:
        trainer: The trainer, in ``setup`` for a fit.

    Attributes:
        factor: What the present batch's loss is multiplied by before its backward; ``None`` for
            nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.factor: float | torch.Tensor | None = None
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._loop = self._epoch_loop.automatic_optimization
        self._is_first = True
        self._closes = False
        self._ready: int | None = None

    def when_loaders_exist(self, look: Callable[[], None]) -> Undo:
        """Call ``look()`` whenever the training loaders were made: before optimizers may be."""
        fit_loop = self.trainer.fit_loop
        setup_data = fit_loop.setup_data

        def set_up() -> None:
            before = fit_loop._combined_loader
            setup_data()
            if fit_loop._combined_loader is not before:
                look()

        return shadow(fit_loop, "setup_data", set_up)

    def install(self) -> Undo:
        """Let :meth:`decide` have the say, from ``on_train_start`` on."""
        trainer, loop = self.trainer, self._loop
        reached = self._epoch_loop._accumulated_batches_reached
        make_zero_grad = loop._make_zero_grad_fn
        backward = trainer.strategy.backward

        def accumulated_batches_reached() -> bool:
            if loop._skip_backward or self._ready is None:
                return bool(reached())
            return self._closes and self._ready == self._epoch_loop.batch_progress.current.ready

        def make_zero_grad_fn(batch_idx: int, optimizer: Any) -> Any:
            if loop._skip_backward or not self._is_first:
                return None
            batches, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
            try:
                return make_zero_grad(batch_idx, optimizer)
            finally:
                trainer.accumulate_grad_batches = batches

        def weighted_backward(
            closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self.factor is not None:
                closure_loss = closure_loss * self.factor
            return backward(closure_loss, optimizer, *args, **kwargs)

        undos = UndoStack()
        undos.push(
            shadow(self._epoch_loop, "_accumulated_batches_reached", accumulated_batches_reached)
        )
        undos.push(shadow(loop, "_make_zero_grad_fn", make_zero_grad_fn))
        undos.push(shadow(trainer.strategy, "backward", weighted_backward))
        return Undo(undos)

    @property
    def is_paused(self) -> bool:
        """Whether another callback passes over the data without training (weight averaging)."""
        return bool(self._loop._skip_backward)

    def decide(self, *, is_first: bool, closes: bool) -> None:
        """Say what the present batch is in its window, in ``on_train_batch_start``."""
        self._is_first, self._closes = is_first, closes
        self._ready = self._epoch_loop.batch_progress.current.ready

    @property
    def steps_now(self) -> bool:
        """Whether the optimizer steps with the present batch; it does with the last of an epoch."""
        return not self._epoch_loop._should_accumulate()

    def state(self) -> dict[str, Any]:
        """Return where the last batch stood, for a checkpoint."""
        return {"ready": self._ready, "closes": self._closes}

    def restore(self, state: dict[str, Any]) -> None:
        """Take :meth:`state` back: on resume Lightning asks whether the last batch made a step."""
        self._ready, self._closes = state["ready"], state["closes"]
