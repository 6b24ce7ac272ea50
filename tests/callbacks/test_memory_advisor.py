"""The advisor looks once, prints, and leaves the training as it was."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_oom import MemoryAdvisor
from lightning_oom.errors import LightningOOMWarning


class Block(torch.nn.Module):
    """Keeps more than it hands on."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(3) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
        self.inner = torch.nn.Sequential(*layers)

    def forward(self, x):
        """Run the layers."""
        return self.inner(x)


class Wide(BoringModel):
    """Blocks whose activations are the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.Linear(32, 2))

    def train_dataloader(self):
        """Yield two large batches."""
        return torch.utils.data.DataLoader(torch.randn(2048, 32), batch_size=1024)


def fit(model, *callbacks, epochs=1):
    """Train and return the weights."""
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=epochs,
        limit_train_batches=2,
        limit_val_batches=0,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model.state_dict()


@pytest.fixture
def lines(monkeypatch):
    """What is printed."""
    printed = []
    monkeypatch.setattr("lightning_oom.callbacks.memory_advisor.rank_zero_info", printed.append)
    return printed


def make():
    """Make the model with the same weights every time."""
    torch.manual_seed(1)
    return Wide()


def test_a_fit_with_advice_ends_as_one_without(lines):
    """Weights are the same bits; the table is printed once in two epochs."""
    advisor = MemoryAdvisor()
    actual = fit(make(), advisor, epochs=2)

    expected = fit(make(), epochs=2)

    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert "checkpoint activations" in [entry.title for entry in advisor.advice.entries]
    assert len(lines) == 1
    assert "callbacks: ActivationCheckpointing()" in lines[0]


def test_a_step_that_cannot_be_followed_gets_one_line(lines):
    """The training goes on."""

    class Numpy(Wide):
        def training_step(self, batch, batch_idx):
            batch.numpy()
            return super().training_step(batch, batch_idx)

    advisor = MemoryAdvisor()
    fit(Numpy(), advisor)

    assert advisor.advice is None
    assert lines[0].startswith("MemoryAdvisor has no advice")


def test_a_failure_of_the_advisor_is_a_warning(monkeypatch):
    """Never an error of the training."""
    monkeypatch.setattr(
        "lightning_oom.callbacks.memory_advisor.render_advice", lambda *_, **__: 1 / 0
    )

    with pytest.warns(LightningOOMWarning, match="ZeroDivisionError"):
        fit(make(), MemoryAdvisor())


def test_the_number_of_entries_is_checked():
    """At least one."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        MemoryAdvisor(most=0)
