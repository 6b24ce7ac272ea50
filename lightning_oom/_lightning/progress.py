"""The trainer's own bookkeeping that an attempt moves: counters of zeroed gradients, current hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Progress"]

_MISSING = object()


class Progress:
    """Zero-grad counters, the name of the running hook, and the module's ``forward`` entry.

    Args:
        trainer: The trainer whose loops run the step.

    Note:
        Cost: 2 us.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def take(self) -> SavedProgress:
        """Remember the counters as they stand."""
        return SavedProgress(self.trainer)


class SavedProgress:
    """The counters at one moment."""

    __slots__ = ("_counters", "_forward", "_hook", "_module")

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        zero_grad = loop.optim_progress.optimizer.zero_grad
        self._counters: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(counter), dict(vars(counter))) for counter in (zero_grad.total, zero_grad.current)
        ]
        self._module = module
        self._hook = module._current_fx_name
        self._forward = module.__dict__.get("forward", _MISSING)

    def restore(self) -> tuple[str, ...]:
        """Put the counters back; always possible."""
        for counter, before in self._counters:
            counter.update(before)
        self._module._current_fx_name = self._hook
        if self._forward is _MISSING:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._forward
        return ()
