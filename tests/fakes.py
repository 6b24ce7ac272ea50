"""Plain stand-ins that tests share; ``test_fakes.py`` says what they promise."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["ListLogger", "TinyRegressor", "regression_loader"]


class ListLogger(Logger):
    """A logger that keeps every row in memory.

    Attributes:
        rows: ``(step, metrics)`` in the order in which they were logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        """A fixed name."""
        return "list"

    @property
    def version(self) -> int:
        """A fixed version."""
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row."""
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are not kept."""

    def values(self, key: str) -> list[float]:
        """Every value logged under ``key``, in order."""
        return [row[key] for _, row in self.rows if key in row]


class TinyRegressor(LightningModule):
    """Two linear layers and a mean squared error: gradients are means over rows.

    Args:
        features: Columns of the input.
        hidden: Width of the hidden layer.
        learning_rate: Of plain SGD.

    Attributes:
        rows_seen: Rows of each ``training_step`` call, in order.
    """

    def __init__(self, *, features: int = 8, hidden: int = 16, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.learning_rate = learning_rate
        self.rows_seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """One prediction a row."""
        return self.body(x).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        """Mean squared error of a batch ``(x, y)``."""
        x, y = batch
        return functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the loss."""
        self.rows_seen.append(len(batch[0]))
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One prediction a row."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def regression_loader(
    rows: int = 40, *, batch_size: int = 8, features: int = 8, seed: int = 1, shuffle: bool = False
) -> DataLoader:
    """Batches ``(x, y)`` of a fixed random regression task.

    Args:
        rows: Rows in all.
        batch_size: Rows of a batch; the last one may be shorter.
        features: Columns of ``x``.
        seed: Fixes the rows, whatever the global random state is.
        shuffle: Draw the order from torch's random state at each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    y = x.sum(-1) + 0.1 * torch.randn(rows, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)
