"""The demo's model: a GPT small enough to train on two cores within a minute."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_oom.cli.demo_text import PADDING

__all__ = ["TinyGPT"]


class TinyGPT(LightningModule):
    """Predict the next token with a few pre-norm transformer blocks.

    The loss is the mean over rows of each row's mean over its own tokens: no row weighs more
    because another one is short, and micro-batches weighted by rows give the same gradient as the
    whole batch.

    Args:
        num_tokens: Size of the vocabulary, the padding token included.
        width: Features of a position; a multiple of ``num_heads``.
        num_layers: Transformer blocks, at least 1.
        num_heads: Attention heads, at least 1.
        block_length: Longest row that the position embedding holds.
        learning_rate: Step width of SGD with momentum.

    Raises:
        ValueError: ``width`` is not a multiple of ``num_heads``.

    Example:
        >>> model = TinyGPT(width=16, num_layers=1)
        >>> model(torch.ones(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 1024])
    """

    def __init__(
        self,
        *,
        num_tokens: int = 1024,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        block_length: int = 2048,
        learning_rate: float = 0.3,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width is a multiple of num_heads, got {width} and {num_heads}")
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(block_length, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the next token after each of ``tokens`` (rows, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position(positions)
        logits: Tensor = self.head(self.blocks(hidden))
        return logits

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the mean over rows of each row's mean loss."""
        tokens = batch["tokens"]
        targets = tokens[:, 1:]
        logits = self(tokens[:, :-1])
        losses = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="none"
        ).view_as(targets)
        num_predicted = (targets != PADDING).sum(1)
        loss = (losses.sum(1) / num_predicted).mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=len(tokens))
        self.log(
            "train/tokens", num_predicted.sum().float(), reduce_fx="sum", batch_size=len(tokens)
        )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: it does not blow rounding differences up, as a division by sqrt(v) does."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class _Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a norm and a skip."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        heads = (rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = (
            self.projection(self.attention_norm(hidden)).view(heads).permute(2, 0, 3, 1, 4)
        )
        # Padding is on the right and the mask is causal: no token sees any of it.
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(hidden)  # type: ignore[no-any-return]  # nn.Module call
