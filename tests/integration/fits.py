"""Fits of the end-to-end tests, and what they end with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fakes import ListLogger
from lightning.pytorch import Callback, LightningModule, Trainer
from states import plain_copy, user_rows, without_own_keys

from lightning_oom import OOMRecovery

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AtBatch", "end_state", "fit", "notes_of", "quiet", "recovery", "weights"]


def recovery(**options: Any) -> OOMRecovery:
    """The callback under test, silent."""
    return OOMRecovery(verbose=False, **options)


def quiet(*callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer on the CPU without bars, summaries and checkpoints, unless ``options`` say so."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": ListLogger(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**defaults, **options})


def fit(
    make_model: Callable[[], LightningModule],
    loaders: Any,
    *callbacks: Callback,
    **options: Any,
) -> tuple[Trainer, Any]:
    """Fit a new model from fixed seeds; return the trainer and the model."""
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002 the global state is what user code draws from
    torch.manual_seed(11)
    model = make_model()
    trainer = quiet(*callbacks, **options)
    trainer.fit(model, *(loaders if isinstance(loaders, tuple) else (loaders,)))
    return trainer, model


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """Copies of parameters and buffers."""
    return plain_copy(model.state_dict())


def end_state(trainer: Trainer) -> dict[str, Any]:
    """Parameters, buffers, optimizer, metrics, logged rows, progress and random state."""
    return {
        "weights": weights(trainer.lightning_module),
        "optimizers": [plain_copy(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "callback_metrics": without_own_keys(plain_copy(dict(trainer.callback_metrics))),
        "rows": user_rows(trainer.logger) if isinstance(trainer.logger, ListLogger) else [],
        "global_step": trainer.global_step,
        "loops": plain_copy(trainer.fit_loop.state_dict()),
        "random": {
            "torch": torch.get_rng_state().clone(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 as above
        },
    }


def notes_of(error: BaseException) -> str:
    """The message of an error, its notes and its causes, as one text."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        parts += [str(current), *getattr(current, "__notes__", ())]
        current = current.__cause__
    return "\n".join(parts)


class AtBatch(Callback):
    """Call ``look(trainer, model)`` after each batch (of the given numbers)."""

    def __init__(self, look: Callable[[Trainer, LightningModule], None], *batches: int) -> None:
        self.look = look
        self.batches = batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Look."""
        if not self.batches or batch_idx in self.batches:
            self.look(trainer, pl_module)
