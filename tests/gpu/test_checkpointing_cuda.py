"""On a real device: the peak falls as predicted, and time is measured by events."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_oom import ActivationCheckpointing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Encoder(LightningModule):
    """Eight encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True) for _ in range(8)
        )

    def training_step(self, batch, batch_idx):
        """A mean of squares."""
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        """Stateful."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def peak_of_fit(*callbacks) -> tuple[int, dict[str, torch.Tensor]]:
    """The peak of a short fit, and the weights at its end."""
    seed_everything(0)
    model = Encoder()
    data = DataLoader(torch.randn(64, 128, 256), batch_size=16)
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(model, data)
    return torch.cuda.max_memory_allocated(), {k: v.cpu() for k, v in model.state_dict().items()}


def test_a_budget_is_kept_on_the_device(monkeypatch) -> None:
    """Predicted peaks are within 5 % of real ones; the weights are those of the plain fit."""
    lines: list[str] = []
    monkeypatch.setattr(
        "lightning_oom.callbacks.activation_checkpointing.rank_zero_info", lines.append
    )
    plain_bytes, plain = peak_of_fit()
    callback = ActivationCheckpointing(budget=int(0.7 * plain_bytes))
    peak_bytes, ours = peak_of_fit(callback)
    assert 0 < len(callback.paths) < 8
    assert callback.plan.plain_peak_bytes == pytest.approx(plain_bytes, rel=0.05)
    assert callback.plan.peak_bytes == pytest.approx(peak_bytes, rel=0.05)
    torch.testing.assert_close(ours, plain)
    assert "of a step of" in lines[0]
