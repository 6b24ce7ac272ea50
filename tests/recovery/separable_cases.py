"""Models, batches and losses of which some are separable and some not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_oom.recovery.separability import check_separable

IGNORED = -100


class Transformer(nn.Module):
    """Embedding, two blocks with dropout, and a head."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.3, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Return logits."""
        return self.head(self.blocks(self.embed(tokens)))


class Recurrent(nn.Module):
    """A two-layer LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.cells = nn.LSTM(8, 16, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        """Return logits."""
        return self.head(self.cells(self.embed(tokens))[0])


def mlp(*extra: nn.Module) -> nn.Module:
    """Return a small classifier with ``extra`` layers in the middle."""
    return nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 5))


def vectors(rows: int = 12):
    """Return inputs and classes."""
    return torch.randn(rows, 8), torch.randint(0, 5, (rows,))


def tokens(rows: int = 12):
    """Return inputs and labels of different lengths."""
    x = torch.randint(1, 20, (rows, 10))
    labels = x.roll(-1, dims=1)
    for row in range(rows):
        labels[row, 2 + (5 * row) % 8 :] = IGNORED
    return x, labels


def mean_loss(model, batch):
    """Mean cross-entropy over rows or counted tokens."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=IGNORED)


def sum_loss(model, batch):
    """Sum of cross-entropies."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrastive_loss(model, batch):
    """Each row's negatives are the other rows."""
    embedded = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(embedded @ embedded.T / 0.1, torch.arange(len(embedded)))


def count_tokens(batch):
    """Weigh a micro-batch by its counted tokens."""
    return (batch[1] != IGNORED).sum()


def check(model, batch, loss=mean_loss, **options):
    """Check a step given as model and loss."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients_of(part):
        return torch.autograd.grad(loss(model, part), parameters, allow_unused=True)

    return check_separable(gradients_of, batch, names=names, **options)
