"""Drop the gradients of the last step before the forward, not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.zero_first import install_zero_first, reason_not_to_zero_first

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.undo import Undo

__all__ = ["EarlyZeroGrad"]


class EarlyZeroGrad(Callback):
    """Drop the gradients of the last step right before ``training_step``.

    Lightning runs forward, ``zero_grad``, backward, so that the gradients of the last step lie
    beside the activations of the whole forward. Dropped before the forward, they are gone when the
    peak comes. The results are bit-equal: neither forward nor backward reads them. Inside an
    accumulation window nothing is dropped, as without this callback.

    The peak falls by at most the bytes of the gradients (those of the trained parameters), and only
    where it lies in the forward or early in the backward. Where it lies in the optimizer step, or
    activations are many times the parameters, little is gained.

    It stands aside, with one line that says why, where something may look at the old gradients:
    ``on_before_zero_grad`` overridden by the module or by a callback, ``optimizer_zero_grad``
    overridden, manual optimization, more than one optimizer, optimizers that run the step several
    times (``LBFGS``), strategies that keep gradients themselves (DeepSpeed).

    Args:
        verbose: Print the line when it stands aside.

    Attributes:
        declined: Why it stood aside in the present or last fit; ``None`` when it did not.

    Note:
        Cost: 1 us a step. Hooks up to ``on_train_batch_start`` still see the old gradients. Code
        in ``training_step`` (or in ``forward``) that reads ``.grad``, for instance to log the norm
        of the last gradients, sees ``None`` instead; that cannot be noticed from outside. Read them
        in ``on_before_optimizer_step``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Looks(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         print("gradients at the forward:", self.layer.weight.grad)
        ...         return super().training_step(batch, batch_idx)
        >>> trainer = Trainer(
        ...     max_steps=2, callbacks=[EarlyZeroGrad()], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Looks())
        gradients at the forward: None
        gradients at the forward: None

    References:
        The order: ``lightning.pytorch.loops.optimization.automatic.Closure``.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        self.verbose = verbose
        self.declined: str | None = None
        self._undo: Undo | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the order, or say why not."""
        self._close()
        self.declined = reason_not_to_zero_first(trainer, pl_module)
        if self.declined is None:
            self._undo = install_zero_first(trainer)
        elif self.verbose:
            rank_zero_info(f"EarlyZeroGrad stands aside: {self.declined}.")

    def _close(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put Lightning's order back."""
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put Lightning's order back."""
        self._close()
