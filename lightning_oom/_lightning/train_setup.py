"""What all training programs of one fit share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom._lightning.progress import Progress
from lightning_oom._lightning.results import ResultsPart
from lightning_oom._lightning.support import overrides
from lightning_oom._lightning.zero_first import reason_not_to_zero_first, zeroes_first
from lightning_oom.recovery.gradients import GradientGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from lightning.pytorch import Trainer

    from lightning_oom._lightning.transfer import Transfer
    from lightning_oom.recovery.snapshot import Attributes

__all__ = ["TrainSetup"]


class TrainSetup:
    """What all training programs of one fit share.

    Args:
        trainer: The trainer, after its optimizers exist.
        transfer: The guard of batch transfers.
        attributes: The part that keeps the module's attributes; merged after a split.
        weight_fn: Weight of a micro-batch, ``None`` for its rows.
        split_fn: The user's way to cut a batch, or ``None``.
        log_merge: Name -> how values of micro-batches become one, for what cannot be inferred.
        warn: Called with a sentence when a split would change logged values.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        transfer: Transfer,
        attributes: Attributes,
        weight_fn: Callable[[Any], float | torch.Tensor] | None = None,
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        log_merge: dict[str, str] | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self.trainer = trainer
        self.warn = warn
        self.module = trainer.lightning_module
        self.loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self.transfer = transfer
        self.attributes = attributes
        self.weight_fn = weight_fn
        self.split_fn = split_fn
        self.log_merge = dict(log_merge or {})
        self.gradients = GradientGuard(self.module.parameters())
        self.progress = Progress(trainer)
        self.results = ResultsPart(trainer)
        self.chunk_verdicts: dict[str, Any] = {}
        self.owns_zero_grad = overrides(self.module, "optimizer_zero_grad")
        self.may_zero_first = reason_not_to_zero_first(trainer, self.module) is None
        self.zero_first = False

    @property
    def zeroes_first(self) -> bool:
        """Whether gradients are dropped before the forward: learnt, or wanted by a callback."""
        return self.zero_first or zeroes_first(self.loop)

    def look_again(self) -> None:
        """Forget what was found out about children and parameters, after some were exchanged."""
        self.gradients.watch(self.module.parameters())
        self.chunk_verdicts.clear()
