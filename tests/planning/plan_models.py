"""Twelve small models whose memory has different shapes, with a batch of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODELS", "Planned"]


class Planned(LightningModule):
    """Trains a network on batches of one kind.

    Args:
        net: Returns one loss per row, or a mean over rows.
        tensors: The whole data.
        batch_size: Rows of a batch.
        optimizer: Made from the parameters.
    """

    def __init__(
        self,
        net: nn.Module,
        tensors: tuple[torch.Tensor, ...],
        batch_size: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        self.net = net
        self.data = DataLoader(TensorDataset(*tensors), batch_size=batch_size)
        self.make_optimizer = optimizer

    def training_step(self, batch, batch_idx):
        """Return the mean loss of the rows."""
        return self.net(*batch).mean()

    def configure_optimizers(self):
        """Make the optimizer."""
        return self.make_optimizer(self.parameters())

    def train_dataloader(self):
        """Give the data in order."""
        return self.data


class Residual(nn.Module):
    """A block of two layers around which the input is added."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        layers = [nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU()]
        self.inner = nn.Sequential(*layers, nn.Linear(hidden, width))

    def forward(self, x):
        """Add."""
        return x + self.inner(x)


class ConvBlock(nn.Module):
    """A residual block of convolutions with a normalisation."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, width, width, 3, padding=1)
        self.inner = nn.Sequential(conv(), norm(width), nn.ReLU(), conv(), norm(width))

    def forward(self, x):
        """Add."""
        return functional.relu(x + self.inner(x))


class Regress(nn.Module):
    """A body, and the squared mean of each row."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        """Return one loss per row."""
        return self.body(x).flatten(1).square().mean(1)


class Language(nn.Module):
    """A causal language model."""

    def __init__(self, vocab: int, width: int, depth: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, batch_first=True)
        self.layers = nn.ModuleList(layer(dropout=0.1) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        """Return one loss per row."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden[:, :-1]).transpose(1, 2)
        return functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x):
        """Return one loss per row."""
        return self.lstm(x)[0].square().mean((1, 2))


class Factors(nn.Module):
    """Two embedding tables and their products: parameters outweigh everything else."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(items, width), nn.Embedding(items, width)

    def forward(self, ids):
        """Return one loss per row."""
        return (self.left(ids[:, 0]) * self.right(ids[:, 1])).sum(1).square()


def _rows(rows: int, *shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(3 * rows, *shape),)


def _ids(rows: int, length: int, vocab: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocab, (3 * rows, length)),)


_SGD = partial(torch.optim.SGD, lr=0.01)
_MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_ADAM = partial(torch.optim.AdamW, lr=1e-3)
_BATCH_NORM, _GROUP_NORM = nn.BatchNorm2d, partial(nn.GroupNorm, 4)


def _conv(depth: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    return Regress(nn.Conv2d(3, 16, 3, padding=1), *(ConvBlock(16, norm) for _ in range(depth)))


MODELS: dict[str, Callable[[], Planned]] = {
    "mlp": lambda: Planned(
        Regress(*(Residual(64, 256) for _ in range(4))), _rows(12288, 64), 12288, _SGD
    ),
    "wide mlp": lambda: Planned(
        Regress(*(Residual(256, 1024) for _ in range(3))), _rows(4096, 256), 4096, _ADAM
    ),
    "encoder": lambda: Planned(
        Regress(
            *(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)),
        ),
        _rows(72, 64, 64),
        72,
        _ADAM,
    ),
    "language model": lambda: Planned(Language(2048, 64, 3), _ids(56, 64, 2048), 56, _ADAM),
    "tied language model": lambda: Planned(
        Language(8192, 64, 2, tied=True), _ids(24, 64, 8192), 24, _MOMENTUM
    ),
    "cnn": lambda: Planned(_conv(4, _GROUP_NORM), _rows(96, 3, 32, 32), 96, _MOMENTUM),
    "cnn with batch normalisation": lambda: Planned(
        _conv(4, _BATCH_NORM), _rows(96, 3, 32, 32), 96, _MOMENTUM
    ),
    "autoencoder": lambda: Planned(
        Regress(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            ConvBlock(32, _GROUP_NORM),
            ConvBlock(32, _GROUP_NORM),
            nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
        ),
        _rows(64, 3, 64, 64),
        64,
        _ADAM,
    ),
    "lstm": lambda: Planned(Recurrent(96), _rows(1536, 24, 96), 1536, _ADAM),
    "factors": lambda: Planned(Factors(100_000, 64), _ids(512, 2, 100_000), 512, _ADAM),
    "linear": lambda: Planned(
        Regress(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)),
        _rows(8192, 1024),
        8192,
        _MOMENTUM,
    ),
    "deep and narrow": lambda: Planned(
        Regress(*(Residual(32, 64) for _ in range(10))), _rows(16384, 32), 16384, _SGD
    ),
}
"""Name to a function that makes the module; its data are three batches."""
