"""The model of the fault campaign: everything that a retried step can get wrong, in one small step.

BatchNorm and dropout; random numbers of torch, Python and NumPy in ``training_step``; eight
torchmetrics with summed, in-place and list states and a collection with compute groups; ``self.log``
from five hooks with every reduction; a list and a counter kept on the module; extra keys in the
returned dict.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.aggregation import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTIMIZERS", "ROWS", "CampaignModel", "Recipe", "campaign_loader", "do_nothing"]

ROWS = (8, 8, 5)
FEATURES = 12
CLASSES = 4

OPTIMIZERS = {
    "sgd_single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_single": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam_single": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
    "nadam_foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the model contains and how it is trained."""

    optimizer: str = "adam_single"
    batch_norm: bool = True
    dropout: float = 0.3
    random_inputs: bool = True
    keeps_state: bool = True
    checkpointed: bool = False
    scheduled: bool = False

    def row_separable(self) -> Recipe:
        """The same training without what couples rows or counts calls of ``training_step``."""
        return replace(self, batch_norm=False, dropout=0.0, random_inputs=False, keeps_state=False)


def do_nothing() -> None:
    """What a model does when nobody watches."""


class CampaignModel(LightningModule):
    """A small classifier that uses every feature which a naive retry breaks."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__()
        self.recipe = recipe or Recipe()
        layers: list[nn.Module] = [nn.Linear(FEATURES, 16)]
        if self.recipe.batch_norm:
            layers.append(nn.BatchNorm1d(16))
        layers.append(nn.ReLU())
        if self.recipe.dropout:
            layers.append(nn.Dropout(self.recipe.dropout))
        self.body = nn.Sequential(*layers, nn.Linear(16, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)
        self.f1 = MulticlassF1Score(CLASSES, validate_args=False)
        self.squared_error = MeanSquaredError()
        self.scores = CatMetric()
        self.mean_loss = MeanMetric()
        self.collection = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES, validate_args=False),
                "f1": MulticlassF1Score(CLASSES, validate_args=False),
                "auroc": MulticlassAUROC(CLASSES, validate_args=False),
            }
        )
        self.losses: list[Tensor] = []
        self.num_calls = 0
        self.when_ready_to_update: Callable[[], None] = do_nothing

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, one row for each row of ``x``."""
        if self.recipe.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Use everything; return the loss with extras."""
        x, y = batch["x"], batch["y"]
        if self.recipe.random_inputs:
            scale = random.random() * float(np.random.rand())  # noqa: S311, NPY002 global state is the point
            x = x + 0.01 * torch.randn_like(x) * scale
        scores = self(x)
        loss = functional.cross_entropy(scores, y)
        probabilities = scores.detach().softmax(-1)
        self._update_metrics(probabilities, y, loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", probabilities.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", probabilities.min(), on_step=True, on_epoch=True, reduce_fx="min")
        self.log("rows", torch.ones(()) * len(y), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("constant", 0.1, on_step=True, on_epoch=False)
        if self.recipe.keeps_state:
            self.num_calls += 1
            self.losses.append(loss.detach())
        return {"loss": loss, "predicted": probabilities.argmax(-1), "name": "train"}

    def _update_metrics(self, probabilities: Tensor, y: Tensor, loss: Tensor) -> None:
        self.accuracy(probabilities, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.f1.update(probabilities, y)
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        self.squared_error(probabilities[:, 0].contiguous(), (y == 0).to(probabilities.dtype))
        self.log("squared_error", self.squared_error, on_step=True, on_epoch=True)
        self.scores.update(probabilities[:, 1])
        self.mean_loss.update(loss, weight=len(y))
        self.collection.update(probabilities, y)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Log from a hook that runs before the forward."""
        self.log("before_zero_grad", 1.0, on_step=True, on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        """Log what the backward is about to see."""
        self.log("before_backward", loss.detach(), on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        """Log the norm of the whole gradient."""
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("gradient_norm", torch.stack(norms).norm(), on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log from the last hook before the update."""
        self.log("before_step", 1.0, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """Log what was gathered by hand, then clear it."""
        self.log_dict(self.collection.compute())
        self.log("score_sum", self.scores.compute().sum())
        self.log("mean_loss", self.mean_loss.compute())
        for metric in (self.collection, self.scores, self.mean_loss):
            metric.reset()
        if self.losses:
            self.log("mean_of_losses", torch.stack(self.losses).mean())
            self.losses.clear()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip as usual, then say that the gradients are ready: only the update is left."""
        self.clip_gradients(optimizer, *args, **kwargs)
        self.when_ready_to_update()

    def configure_optimizers(self) -> Any:
        """The optimizer of the recipe, with a schedule per step when it asks for one."""
        optimizer = OPTIMIZERS[self.recipe.optimizer](self.parameters())
        if not self.recipe.scheduled:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class _Batches(Dataset):
    """Three ready batches, the last one short."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            {
                "x": torch.randn(rows, FEATURES, generator=generator),
                "y": torch.randint(0, CLASSES, (rows,), generator=generator),
            }
            for rows in ROWS
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(self.batches[index])


def campaign_loader(*, shuffle: bool = True) -> DataLoader:
    """Batches of 8, 8 and 5 rows, in an order drawn from torch's random state."""
    return DataLoader(_Batches(), batch_size=None, shuffle=shuffle)
