"""On a real device: its own allocator runs out, and the fit ends as without a limit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from lightning_oom import OOMRecovery
from lightning_oom.memory import read_memory
from lightning_oom.testing import memory_limit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Wide(LightningModule):
    """Holds 4 MiB of activations per row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 2**19), torch.nn.Tanh(), torch.nn.Linear(2**19, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A mean over rows."""
        loss = self.body(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Stateful, with the lists of temporaries that are the default here."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(recovery: OOMRecovery | None = None) -> tuple[Trainer, Wide]:
    seed_everything(0)
    model = Wide()
    rows = torch.randn(4 * 256, 16)
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recovery] if recovery else [],
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=256))
    return trainer, model


def test_a_capped_device_is_recovered_from():
    """Weights within rounding of the unlimited run, every batch trained."""
    expected_trainer, expected = _fit()
    peak = torch.cuda.max_memory_allocated()
    recovery = OOMRecovery(verbose=False)

    with memory_limit(int(peak * 0.7), device="cuda:0"):
        actual_trainer, actual = _fit(recovery)

    assert recovery.summary.num_oom >= 1
    assert recovery.summary.num_recovered == recovery.summary.num_oom
    assert actual_trainer.global_step == expected_trainer.global_step
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_guard_does_not_raise_the_peak():
    """Without an OOM, the allocator's peak is the one of a bare fit."""
    peaks = []
    for recovery in (None, OOMRecovery(verbose=False)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _fit(recovery)
        peaks.append(torch.cuda.max_memory_allocated())

    assert peaks[1] <= peaks[0] + 2**20  # scalars of the snapshot


def test_readings_come_without_synchronisation():
    """Counters of the allocator alone."""
    reading = read_memory("cuda:0")

    assert reading.allocated_bytes is not None
    assert reading.limit_bytes is not None
