"""Models, callbacks and comparisons that the tests of the precision switch share."""

from __future__ import annotations

from typing import Any

import torch
from fakes import FailsAt, Tally, TinyRegressor, regression_loader
from fits import end_state, fit, recovery
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from states import compare

__all__ = [
    "ChangesAt",
    "NotFinite",
    "Watched",
    "differences",
    "loaders",
    "oom_before",
    "scaled",
    "trained",
]


class Watched(TinyRegressor):
    """Notes what each training step is computed in.

    Attributes:
        seen: ``(global_step, trainer.precision, dtype of the prediction)`` of each step.
        validated: Precision of each validation step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.validated = Tally()
        self.seen = Rows()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Note, and train."""
        with torch.no_grad():
            dtype = self.body[0](batch[0]).dtype
        self.seen.append((self.trainer.global_step, str(self.trainer.precision), dtype))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Note, and validate."""
        self.validated.add(self.trainer.precision)
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state of two tensors and a counter."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Rows:
    """A list that a rollback of the module's attributes leaves alone."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, torch.dtype]] = []

    def append(self, row: tuple[int, str, torch.dtype]) -> None:
        """Add one."""
        self.rows.append(row)


class NotFinite(Watched):
    """A loss or a gradient is not finite in chosen steps, in mixed precision only.

    Args:
        steps: Which; every one from the first of them on when ``always``.
        where: ``"loss"`` or ``"gradient"``.
        always: Whether all later steps are bad as well.
    """

    def __init__(self, *steps: int, where: str = "loss", always: bool = False) -> None:
        super().__init__()
        self.steps, self.where, self.always = steps, where, always
        self.body[0].weight.register_hook(self.spoil)

    def is_bad(self, where: str) -> bool:
        """Whether this step goes wrong there."""
        step = self.trainer.global_step
        chosen = step in self.steps or (self.always and step >= min(self.steps))
        return chosen and where == self.where and self.trainer.precision != "32-true"

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        """Make one element infinite."""
        if self.is_bad("gradient"):
            gradient = gradient.clone()
            gradient[0, 0] = float("inf")
        return gradient

    def loss(self, batch: Any) -> torch.Tensor:
        """NaN in bad steps."""
        loss = super().loss(batch)
        return loss * float("nan") if self.is_bad("loss") else loss


class ChangesAt(Callback):
    """What a user would write: another plugin from batch ``at`` on, and the first one from ``back`` on."""

    def __init__(self, at: int, precision: str = "bf16-mixed", *, back: int | None = None) -> None:
        self.at, self.precision, self.back = at, precision, back

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Change."""
        if batch_idx == self.at:
            self.first = trainer.strategy.precision_plugin
            trainer.strategy.precision_plugin = MixedPrecision(self.precision, "cpu")
        if batch_idx == self.back:
            trainer.strategy.precision_plugin = self.first


def loaders(batches: int = 8) -> tuple[Any, Any]:
    """A training and a validation loader."""
    return regression_loader(8 * batches), regression_loader(8, seed=2)


def trained(*callbacks: Any, make: Any = Watched, batches: int = 8, **options: Any) -> Any:
    """Trainer, model and end of a fit."""
    trainer, model = fit(make, loaders(batches), *callbacks, **options)
    return trainer, model, end_state(trainer)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    """Where two ends differ, bit by bit."""
    return compare(one, other)


def scaled(scale: float = 2.0**16) -> MixedPrecision:
    """Lightning's own float16 on the CPU, where its flag would give bfloat16."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def oom_before(batch: int, make: Any = Watched) -> tuple[Any, Any]:
    """A model whose step before ``batch`` runs out of memory once, and the guard that saves it."""

    def failing() -> Any:
        model = make()
        model.body.insert(1, FailsAt(batch - 1))
        return model

    return failing, recovery(ladder=["release"])
