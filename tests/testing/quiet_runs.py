"""Trainers and fits for the tests of this folder, small and silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fakes import TinyRegressor, regression_loader
from lightning.pytorch import Trainer

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["fit", "quiet_trainer"]


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing."""
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
            **options,
        }
    )


def fit(*callbacks: Callback, model: Any = None, **options: Any) -> Trainer:
    """Fit five batches; return the trainer."""
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(TinyRegressor() if model is None else model, regression_loader())
    return trainer
