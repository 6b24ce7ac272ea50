"""A fake step in the middle of a fit, and on the models that bars are set for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from fakes import TinyRegressor, regression_loader
from lightning.pytorch import Callback, Trainer
from torch import nn

from lightning_oom.planning.fake_step import trace_step
from lightning_oom.planning.real_step import measure_rows

if TYPE_CHECKING:
    from lightning_oom.planning.trace import MemoryTrace


class Foresees(Callback):
    """Traces a step when training starts."""

    trace: MemoryTrace | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Trace."""
        batch = next(iter(regression_loader()))
        self.trace = trace_step(pl_module, batch)


def weights_after_fit(callbacks: list[Callback]) -> dict[str, torch.Tensor]:
    """Train a tiny module."""
    torch.manual_seed(3)
    module = TinyRegressor()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, regression_loader())
    return module.state_dict()


def test_a_fit_ends_with_the_same_weights() -> None:
    """The dry step draws no random number and trains nothing."""
    foresees = Foresees()

    torch.testing.assert_close(weights_after_fit([foresees]), weights_after_fit([]), rtol=0, atol=0)

    assert foresees.trace is not None
    assert foresees.trace.peak_bytes > 0


def normalised_cnn() -> tuple[nn.Module, Any]:
    """Convolutions with BatchNorm."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return net, torch.randn(4, 3, 8, 8)


def vision_transformer() -> tuple[nn.Module, Any]:
    """Two blocks of ViT, with a loss of its own."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=8,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 0])}
    return transformers.ViTForImageClassification(config).train(), batch


@pytest.mark.parametrize("make", [normalised_cnn, vision_transformer])
def test_plain_modules_are_traced_with_an_optimizer_that_is_given(make: Any) -> None:
    """They need no ``training_step``; the peak is the real one."""
    module, batch = make()

    fake = trace_step(module, batch, optimizer=torch.optim.AdamW)

    assert fake.peak_bytes == measure_rows(module, batch, optimizer=torch.optim.AdamW).peak_bytes
