"""On a real device: the dtype that it has, the trainer's own run, memory that falls, a way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from lightning_oom import AMPSwitcher
from lightning_oom._torch.gradients import largest_magnitudes
from lightning_oom.errors import StepSkippedWarning
from lightning_oom.reduction.precision import choose_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Deep(LightningModule):
    """Activations outweigh parameters; may go wrong in mixed precision."""

    def __init__(self, bad_step: int | None = None) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)]
        self.body = torch.nn.Sequential(*layers)
        self.bad_step = bad_step

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A mean over rows."""
        loss = self.body(batch).square().mean()
        is_bad = self.global_step == self.bad_step and self.trainer.precision != "32-true"
        return loss * float("nan") if is_bad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(*callbacks: Any, bad_step: int | None = None, **options: Any) -> tuple[Deep, int]:
    seed_everything(0)
    model = Deep(bad_step)
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(4 * 8192, 256), batch_size=8192))
    return model.cpu(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_from_the_start_is_the_trainers_own(precision):
    """Bit by bit, and less memory than in 32-bit."""
    if precision == "bf16-mixed" and choose_precision(torch.device("cuda")) != precision:
        pytest.skip("no bfloat16 in hardware")
    expected, _ = _fit(precision=precision)
    actual, peak = _fit(AMPSwitcher(precision=precision, when="start", verbose=False))
    _, plain_peak = _fit()

    assert peak < plain_peak
    for one, other in zip(expected.parameters(), actual.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_way_back_leaves_finite_weights():
    """One update left out."""
    with pytest.warns(StepSkippedWarning):
        model, _ = _fit(
            AMPSwitcher(precision="bf16-mixed", when="start", verbose=False), bad_step=1
        )

    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_value_is_seen_by_the_devices_own_kernel(bad, dtype):
    """It keeps NaN through its maximum."""
    tensor = torch.zeros(100_000, dtype=dtype, device="cuda")
    tensor[61_700] = bad

    first, second = largest_magnitudes([tensor, torch.ones(3, dtype=dtype, device="cuda")])

    assert not first.isfinite()
    assert second.isfinite()
