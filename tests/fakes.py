"""Plain stand-ins that tests share; ``test_fakes.py`` says what they promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_oom._torch import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CUDA_MESSAGE",
    "FailsAt",
    "ListLogger",
    "RowLimit",
    "Tally",
    "TinyRegressor",
    "batches_of",
    "cuda_oom",
    "failing",
    "regression_loader",
]

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 17.00 MiB is free. Of the allocated memory 7.50 GiB is allocated by PyTorch, and "
    "128.00 MiB is reserved by PyTorch but unallocated."
)


def cuda_oom() -> RuntimeError:
    """The error that torch raises on a full CUDA device."""
    return OutOfMemoryError(CUDA_MESSAGE)


class Tally:
    """A list of numbers that a rollback of the module's attributes leaves alone."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, number: int) -> None:
        """Append one."""
        self.numbers.append(number)


class RowLimit(nn.Module):
    """An identity layer that runs out of memory on more than ``rows`` rows when a graph is kept.

    Args:
        rows: Most rows that fit; ``None`` never fails. May be changed between calls.
        make_error: Makes the error.

    Attributes:
        refused: Rows of each call that failed.
    """

    def __init__(
        self, rows: int | None = None, make_error: Callable[[], Exception] = cuda_oom
    ) -> None:
        super().__init__()
        self.rows = rows
        self.make_error = make_error
        self.refused = Tally()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` when it fits."""
        if self.rows is not None and len(x) > self.rows and torch.is_grad_enabled():
            self.refused.add(len(x))
            raise self.make_error()
        return x


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


class FailsAt(nn.Module):
    """An identity layer that raises at chosen calls.

    Args:
        calls: Calls that fail, from 0; every one when none is given.
        make_error: Makes the error.

    Attributes:
        calls: Rows of each call, failed ones included.
    """

    def __init__(self, *calls: int, make_error: Callable[[], Exception] = cuda_oom) -> None:
        super().__init__()
        self.failing = calls
        self.make_error = make_error
        self.calls = Tally()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` unless this call fails."""
        self.calls.add(len(x))
        if len(self.calls.numbers) - 1 in self.failing or not self.failing:
            raise self.make_error()
        return x


class TinyRegressor(LightningModule):
    """Two linear layers and a mean squared error: gradients are means over rows.

    Args:
        features: Columns of the input.
        hidden: Width of the hidden layer.
        learning_rate: Of SGD with momentum.
        fits_rows: Rows that fit in memory, ``None`` for any number.

    Attributes:
        limit: The layer that fails, a :class:`RowLimit`.
        rows_seen: Rows of each ``training_step`` call, failed ones included.
    """

    def __init__(
        self,
        *,
        features: int = 8,
        hidden: int = 16,
        learning_rate: float = 0.01,
        fits_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.limit = RowLimit(fits_rows)
        self.body = nn.Sequential(
            nn.Linear(features, hidden), self.limit, nn.ReLU(), nn.Linear(hidden, 1)
        )
        self.learning_rate = learning_rate
        self.rows_seen = Tally()

    def forward(self, x: Tensor) -> Tensor:
        """One prediction a row."""
        return self.body(x).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        """Mean squared error of a batch ``(x, y)``."""
        x, y = batch
        return functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the loss."""
        self.rows_seen.add(len(batch[0]))
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
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


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


def batches_of(rows: Sequence[int], *, features: int = 8, seed: int = 1) -> DataLoader:
    """Batches ``(x, y)`` of the given numbers of rows, in this order.

    Args:
        rows: Rows of each batch.
        features: Columns of ``x``.
        seed: Fixes the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in rows:
        x = torch.randn(count, features, generator=generator)
        batches.append((x, x.sum(-1) + 0.1 * torch.randn(count, generator=generator)))
    return DataLoader(batches, batch_size=None)


def failing(*calls: int, make_error: Callable[[], Exception] = cuda_oom) -> Callable[[], Any]:
    """Make models whose second layer raises at these calls; at every one when none is given.

    Args:
        calls: Calls that fail, from 0.
        make_error: Makes the error.
    """

    def make() -> TinyRegressor:
        model = TinyRegressor()
        model.body.insert(1, FailsAt(*calls, make_error=make_error))
        return model

    return make
