"""Accumulate gradients up to an effective batch counted in rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.accumulation import (
    WindowControl,
    has_scheduler,
    loader_batch_size,
    reason_not_to_accumulate,
)
from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches import count_rows
from lightning_oom.reduction.accumulation import (
    AccumulationWindow,
    batches_for,
    scale_gradients,
)
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GradientAccumulation"]


class GradientAccumulation(Callback):
    """Accumulate gradients until about ``effective_batch_size`` rows have been seen.

    ``accumulate_grad_batches`` is chosen from the rows that batches really have and the number of
    devices, again for each window, so that a run keeps its effective batch when the batch size
    changes. The gradient of every optimizer step is the mean over the rows of its window::

        sum(rows_i * gradient_i) / sum(rows_i)

    where ``gradient_i`` is that of the mean loss of batch ``i``: also with batches of unequal length,
    and for the last, shorter window of an epoch, which Lightning divides by the full number of
    batches. A window closes where its rows come nearest to the effective batch. Clipping, the
    gradient scaler, ``on_after_backward`` and ``on_before_optimizer_step`` meet the final gradient.
    What ``self.log`` gets is not touched.

    With ``DDPStrategy`` the mean is over the rows of all ranks. The number of batches in a window is
    agreed between ranks at the first batch of each epoch, and then kept for the epoch.

    It stands aside, with one line that says why, under manual optimization, with strategies that
    shard gradients, with ``dataloader_iter`` steps, and with optimizers that run the step several
    times (``LBFGS``).

    Args:
        effective_batch_size: Rows of an optimizer step, over all devices; at least 1. One batch is
            the least: larger batches are not cut.
        rows_fn: ``rows_fn(batch)`` gives the rows of a batch, at least 0. Default the length of
            dimension 0 that its tensors share. For a loss that is a mean over tokens, count tokens
            here and in ``effective_batch_size``.
        verbose: Print the number of batches when it is chosen, and when an epoch changes it.

    Attributes:
        declined: Why it stood aside in the present or last fit; ``None`` when it did not.

    Raises:
        ValueError: ``effective_batch_size`` or ``rows_fn`` is outside its range; or the trainer's
            windows are set elsewhere too (``accumulate_grad_batches``,
            ``GradientAccumulationScheduler``).
        BatchSplitError: The rows of a batch cannot be counted: give ``rows_fn``.

    Note:
        Cost: 10 us a batch. A window that did not go as planned multiplies the gradients once in
        place. DDP: one number is reduced per window, without waiting for the device, and one per
        epoch with. No memory.

        Equal to the run with the effective batch at once up to rounding: the order of summation
        differs. Where all batches of a window are equally long it is bit-equal to
        ``Trainer(accumulate_grad_batches=k)``. Not equal where a batch sees itself as a whole
        (batch normalisation, in-batch negatives), and for a loss that is a sum, no mean.

        ``trainer.estimated_stepping_batches`` counts with the loader's ``batch_size``. A checkpoint
        from the middle of a window resumes with a new window: gradients are not saved.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel  # 64 batches of 1 row
        >>> trainer = Trainer(
        ...     max_epochs=1, callbacks=[GradientAccumulation(effective_batch_size=16)],
        ...     accelerator="cpu", logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        ... )
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step, trainer.accumulate_grad_batches
        (4, 1)

    References:
        Lightning-AI/pytorch-lightning#19987, #21808.
    """

    def __init__(
        self,
        *,
        effective_batch_size: int,
        rows_fn: Callable[[Any], int] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(effective_batch_size, int) or effective_batch_size < 1:
            raise ValueError(
                f"effective_batch_size is a number of rows, at least 1, got {effective_batch_size!r}"
            )
        if rows_fn is not None and not callable(rows_fn):
            raise ValueError(f"rows_fn is a function or None, got {rows_fn!r}")
        self.effective_batch_size = effective_batch_size
        self.verbose = verbose
        self.declined: str | None = None
        self._rows_fn = rows_fn
        self._undos = UndoStack()
        self._control: WindowControl | None = None
        self._window: AccumulationWindow | None = None
        self._resumed: dict[str, Any] | None = None
        self._said: tuple[float, int] | None = None
        self._has_gradient = False
        self._is_corrected = False

    # -- wiring
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the windows of this fit over, or say why not."""
        self._close()
        self._said = None
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1 or has_scheduler(trainer):
            raise ValueError(
                "GradientAccumulation chooses accumulate_grad_batches: remove it from the Trainer "
                f"(it is {trainer.accumulate_grad_batches}), and any GradientAccumulationScheduler"
            )
        self.declined = reason_not_to_accumulate(trainer, pl_module)
        if self._says_declined():
            return
        self._control = WindowControl(trainer)
        self._undos.push(Undo(lambda: setattr(trainer, "accumulate_grad_batches", 1)))
        self._undos.push(self._control.when_loaders_exist(lambda: self._guess(trainer)))

    def _says_declined(self) -> bool:
        if self.declined is not None and self.verbose:
            rank_zero_info(f"GradientAccumulation stands aside: {self.declined}.")
        return self.declined is not None

    def _guess(self, trainer: Trainer) -> None:
        """Set what the loader's batch size asks for, for those who compute the length of the run."""
        rows = loader_batch_size(trainer)
        if rows is not None:
            trainer.accumulate_grad_batches = batches_for(
                self.effective_batch_size, rows * _num_replicas(trainer)
            )

    def _close(self) -> None:
        self._control = self._window = None
        self._undos()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the windows back to the trainer."""
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the windows back to the trainer."""
        self._close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Where the last batch stood in its window."""
        return {} if self._control is None else self._control.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts."""
        self._resumed = dict(state_dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over, now that the optimizers are known."""
        state, self._resumed = self._resumed, None
        if self._control is None:
            return
        self.declined = reason_not_to_accumulate(trainer, pl_module)
        if self._says_declined():
            self._close()
            return
        self._undos.push(self._control.install())
        if state:
            self._control.restore(state)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with an empty window."""
        self._window = None

    # -- one batch
    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Place the batch in its window, before gradients are dropped and losses weighted."""
        control = self._control
        if control is None or control.is_paused:
            return
        rows = self._count(batch)
        if self._window is None:
            self._window = self._open_window(trainer, rows)
        window = self._window
        window.add(rows)
        if window.is_first:
            trainer.accumulate_grad_batches = window.planned_batches
        control.decide(is_first=window.is_first, closes=window.closes)
        self._has_gradient = False
        self._is_corrected = control.steps_now
        factor: float | torch.Tensor = window.share
        if self._is_corrected:
            correction = self._correction(trainer, window)
            if not window.is_first:
                scale_gradients(_parameters(trainer), correction)
            factor = factor * correction
        control.factor = None if isinstance(factor, float) and factor == 1.0 else factor

    def _count(self, batch: Any) -> float:
        rows: float | None
        if self._rows_fn is not None:
            rows = self._rows_fn(batch)
            if rows < 0:
                raise ValueError(f"rows_fn gives rows, at least 0, got {rows!r}")
            return float(rows)
        try:
            rows = count_rows(batch)
        except BatchSplitError as error:
            raise BatchSplitError(f"{error}; give rows_fn to GradientAccumulation") from error
        if rows is None:
            raise BatchSplitError(
                f"a batch of type {type(batch).__name__} holds nothing with rows; give rows_fn to "
                "GradientAccumulation"
            )
        return float(rows)

    def _open_window(self, trainer: Trainer, rows: float) -> AccumulationWindow:
        """Begin an epoch: with several devices, agree on the number of batches."""
        replicas = _num_replicas(trainer)
        num_batches = None
        if replicas > 1:
            rows = float(_sum_over_ranks(trainer, rows).item())
            num_batches = batches_for(self.effective_batch_size, rows)
        chosen = (rows, num_batches or batches_for(self.effective_batch_size, rows))
        if self.verbose and rows > 0 and chosen != self._said:
            devices = f" on {replicas} devices" if replicas > 1 else ""
            rank_zero_info(
                f"GradientAccumulation: {chosen[1]} x {rows:g} rows{devices} make a step of "
                f"{chosen[1] * rows:g} rows."
            )
        self._said = chosen
        return AccumulationWindow(self.effective_batch_size / replicas, num_batches=num_batches)

    def _correction(self, trainer: Trainer, window: AccumulationWindow) -> float | torch.Tensor:
        replicas = _num_replicas(trainer)
        if replicas == 1:
            return window.correction()
        return window.correction(_sum_over_ranks(trainer, window.rows) / replicas)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the batch has added to the gradients."""
        self._has_gradient = True

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Correct the mean where the last step of the window had no loss."""
        if self._window is not None and self._is_corrected and not self._has_gradient:
            scale_gradients(_parameters(trainer), self._window.drop_last())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave out a step that had no loss; close the window after an update."""
        control, window = self._control, self._window
        if control is None or window is None or control.is_paused:
            return
        control.factor = None
        if not self._has_gradient:
            window.drop_last()
        if self._is_corrected:
            window.start()


def _num_replicas(trainer: Trainer) -> int:
    """How many processes see batches of their own."""
    return int(trainer.world_size)


def _sum_over_ranks(trainer: Trainer, rows: float) -> torch.Tensor:
    own = torch.full((), rows, dtype=torch.float32, device=trainer.strategy.root_device)
    total: torch.Tensor = trainer.strategy.reduce(own, reduce_op="sum")
    return total


def _parameters(trainer: Trainer) -> list[torch.nn.Parameter]:
    """What the optimizers update."""
    return [
        parameter
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
