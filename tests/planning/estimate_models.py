"""Twelve LightningModules of different kinds, to hold estimates against what a fit takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODELS", "ROWS", "example"]

ROWS = (16, 33, 64)
"""Batch sizes that every model is tried at."""


class Case(LightningModule):
    """Trains by AdamW; says what a batch looks like.

    Attributes:
        shapes: Of one row of each tensor of the batch.
        vocab: Where given, the first tensor holds numbers of tokens below it.
    """

    shapes: tuple[tuple[int, ...], ...] = ((3, 48, 48),)
    vocab: int | None = None

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Classifier(Case):
    """A network, cross entropy and a logged loss."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], optimizer: Any = None) -> None:
        super().__init__()
        self.net = net
        self.shapes = (shape,)
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Predict class 1 for everything."""
        (images,) = batch
        logits = self.net(images)
        target = torch.ones(len(images), dtype=torch.long, device=logits.device)
        loss = functional.cross_entropy(logits, target)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return what was asked for."""
        if self.make_optimizer is None:
            return super().configure_optimizers()
        return self.make_optimizer(self.parameters())


class Residual(nn.Module):
    """Adds the input to what an inner network makes of it."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add."""
        return x + self.inner(x)


class Patches(nn.Module):
    """A transformer on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 96, 8, stride=8)
        self.position = nn.Parameter(torch.zeros(1, 36, 96))
        layer = nn.TransformerEncoderLayer(96, 4, 384, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(96, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(1))


class HuggingFace(Case):
    """A model of transformers, which computes its own loss."""

    shapes = ((64,),)

    def __init__(self, make: Callable[[], nn.Module], vocab: int) -> None:
        super().__init__()
        self.model = make()
        self.vocab = vocab

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a dictionary, as many do."""
        (ids,) = batch
        output = self.model(input_ids=ids, labels=ids)
        self.log("train_loss", output.loss)
        return {"loss": output.loss, "logits": output.logits.detach()}


def gpt2() -> nn.Module:
    """Make a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=2000, n_positions=64, n_embd=96, n_layer=3, n_head=4, use_cache=False)
    )


def bert() -> nn.Module:
    """Make a small BERT."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=3000,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=64,
    )
    return BertForMaskedLM(config)


class Recurrent(Case):
    """Two layers of LSTM over a sequence."""

    shapes = ((40, 64),)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Predict the sequence."""
        (sequence,) = batch
        hidden, _ = self.lstm(sequence)
        return functional.mse_loss(self.head(hidden), sequence)


class Autoencoder(Case):
    """Three losses, a scheduler for each step."""

    def __init__(self) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=4, stride=2, padding=1)
        back = partial(nn.ConvTranspose2d, kernel_size=4, stride=2, padding=1)
        self.encoder = nn.Sequential(conv(3, 32), nn.GELU(), conv(32, 64), nn.GELU())
        self.decoder = nn.Sequential(back(64, 32), nn.GELU(), back(32, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Sum the losses."""
        (images,) = batch
        code = self.encoder(images)
        noisy = self.decoder(code + 0.1 * torch.randn_like(code))
        losses = {
            "l2": functional.mse_loss(noisy, images),
            "l1": functional.l1_loss(noisy, images),
            "code": code.square().mean(),
        }
        self.log_dict(losses, on_epoch=True)
        return sum(losses.values())

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum and a scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Factors(Case):
    """Large tables, one of them with sparse gradients."""

    shapes = ((32,),)
    vocab = 20000

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(20000, 64, sparse=True)
        self.right = nn.EmbeddingBag(20000, 64, mode="sum")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Multiply what both tables say."""
        (ids,) = batch
        return (self.left(ids).mean(1) * self.right(ids)).sum(1).square().mean()

    def configure_optimizers(self) -> Any:
        """Return what takes sparse gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Adversarial(Case):
    """Two networks that are stepped in turn, by hand."""

    shapes = ((1024,),)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024))
        self.critic = nn.Sequential(nn.Linear(1024, 512), nn.LeakyReLU(), nn.Linear(512, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step the critic, then the generator."""
        (real,) = batch
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), 64, device=real.device))
        self.toggle_optimizer(for_critic)
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        loss = -self.critic(fake).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log("generator_loss", loss)

    def configure_optimizers(self) -> Any:
        """Return one for each."""
        make = partial(torch.optim.Adam, lr=1e-4)
        return [make(self.generator.parameters()), make(self.critic.parameters())]


class Tied(Case):
    """A language model whose head is its embedding, with dropout."""

    shapes = ((48,),)
    vocab = 4000

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, 64)
        self.body = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2))
        self.down = nn.Linear(256, 64)
        self.head = nn.Linear(64, 4000, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Predict the next token."""
        (ids,) = batch
        logits = self.head(self.down(self.body(self.embed(ids))))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _conv(before: int, after: int, groups: int = 1) -> nn.Module:
    return nn.Conv2d(before, after, 3, padding=1, groups=groups, bias=False)


def _head(width: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)


def _mlp() -> Case:
    hidden = (Residual(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(2))
    return Classifier(nn.Sequential(nn.Linear(256, 512), *hidden, nn.Linear(512, 10)), (256,))


def _cnn() -> Case:
    layers = [_conv(3, 32), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [_conv(32, 64), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return Classifier(nn.Sequential(*layers, *_head(64)), (3, 48, 48))


def _depthwise() -> Case:
    layers = [nn.Conv2d(3, 32, 4, stride=4)]
    for _ in range(3):
        layers += [_conv(32, 32, groups=32), nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 1), nn.SiLU()]
    return Classifier(nn.Sequential(*layers, *_head(32)), (3, 48, 48))


def _residual() -> Case:
    blocks = (
        Residual(_conv(24, 24), nn.BatchNorm2d(24), nn.ReLU(inplace=True), _conv(24, 24))
        for _ in range(3)
    )
    momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)
    layers = [nn.Conv2d(3, 24, 2, stride=2), *blocks, nn.ReLU(inplace=True), *_head(24)]
    return Classifier(nn.Sequential(*layers), (3, 48, 48), momentum)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "depthwise": _depthwise,
    "residual": _residual,
    "vit": lambda: Classifier(Patches(), (3, 48, 48)),
    "gpt2": lambda: HuggingFace(gpt2, 2000),
    "bert": lambda: HuggingFace(bert, 3000),
    "lstm": Recurrent,
    "autoencoder": Autoencoder,
    "embedding": Factors,
    "gan": Adversarial,
    "tied": Tied,
}
"""Name to a function that makes the module."""


def example(module: Case, rows: int) -> list[torch.Tensor]:
    """Return a batch on the host as the DataLoader of a fit gives it."""
    if module.vocab is not None:
        return [torch.randint(0, module.vocab, (rows, *shape)) for shape in module.shapes]
    return [torch.randn(rows, *shape) for shape in module.shapes]
