# ruff: noqa: D102, D103 - the classes say what each is for
"""Training steps that do what users do around the model: logs, trainer, operators, optimizers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WIDTH = 16
GLOBAL_WEIGHTS = torch.linspace(0.5, 1.5, WIDTH)


def make_batch(rows: int = 4) -> dict[str, Tensor]:
    """Floats, labels, token ids and lengths of so many rows."""
    return {
        "x": torch.randn(rows, WIDTH),
        "y": torch.randint(0, 3, (rows,)),
        "ids": torch.randint(0, 20, (rows, 6)),
        "lengths": torch.tensor([6, 5, 3, 2, 2])[:rows],
    }


class UserModule(LightningModule):
    """A classifier; subclasses change its body, its loss or its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """Return (rows, WIDTH)."""
        return self.body(batch["x"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Return a cross entropy."""
        return functional.cross_entropy(self.head(self.features(batch).relu()), batch["y"])

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters())


class Logs(UserModule):
    """Logs, prints, and returns more than a loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss.detach()})
        return {"loss": loss, "features": self.features(batch)}


class AsksTrainer(UserModule):
    """Reads counters of the trainer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        warm = min(1.0, (self.trainer.global_step + 1) / 10) + self.current_epoch
        return warm * super().training_step(batch, batch_idx)


class AsksStepsAhead(UserModule):
    """Builds its schedule from the number of steps that are to come."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(UserModule):
    """Calls a custom autograd function."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return _Square.apply(self.body(batch["x"]))


@torch.library.custom_op("lightning_oom_tests::known", mutates_args=())
def _known(x: Tensor) -> Tensor:
    return x * 2


@_known.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_oom_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


for _operator in (_known, unknown):
    _operator.register_autograd(lambda ctx, grad: 2 * grad)


class KnownOperator(UserModule):
    """A custom operator that says what shape it returns."""

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return _known(self.body(batch["x"]))


class Compiled(UserModule):
    """A compiled part; below a dispatch mode it runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), backend="eager"
        )


class Adversarial(UserModule):
    """Two optimizers by hand, with toggling and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.body, self.head)]


class Normed(UserModule):
    """Spectral and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        )


class Recurrent(UserModule):
    """An LSTM keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(self.embedding(batch["ids"]))[0][:, -1]
