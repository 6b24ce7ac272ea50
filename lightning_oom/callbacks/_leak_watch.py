"""A leak finder in a Trainer: when it looks, and that it says each thing once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lightning_oom.callbacks._outlets import warn_leak
from lightning_oom.memory import read_memory
from lightning_oom.memory.leaks import Leak, LeakFinder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LeakWatch"]


class LeakWatch:
    """Looks for leaks in the module, the trainer and its callbacks, and warns of each once.

    A search through objects of the user never ends a run: what it raises is dropped.

    Args:
        is_on: Otherwise it does nothing.

    Attributes:
        finder: What has been found.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.finder = LeakFinder()
        self._named: set[str] = set()

    def __call__(self) -> list[Leak]:
        """Return what has been found so far, and what is suspected in the middle of an epoch."""
        named = self.finder.leaks()
        paths = {leak.path for leak in named}
        return [*named, *(leak for leak in self.finder.suspects() if leak.path not in paths)]

    def after_batch(
        self, trainer: Trainer, pl_module: LightningModule, *, step: int, stage: str
    ) -> None:
        """Look, if it is time.

        Args:
            trainer: The trainer.
            pl_module: Its module.
            step: Optimizer steps so far, or in evaluation the batch.
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        if not self.is_on or trainer.sanity_checking:
            return
        with contextlib.suppress(Exception):
            device = trainer.strategy.root_device
            held = None if device.type == "cpu" else read_memory(device).allocated_bytes
            self.finder.observe(step, _roots(trainer, pl_module), stage=stage, allocated_bytes=held)
        self._tell()

    def after_epoch(self, trainer: Trainer, stage: str) -> None:
        """Note that an epoch is over, before the user's hooks clear what it left."""
        if self.is_on and not trainer.sanity_checking:
            self.finder.end_epoch(stage)

    def at_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge what is left when the run is over."""
        if not self.is_on:
            return
        with contextlib.suppress(Exception):
            self.finder.finish(_roots(trainer, pl_module))
        self._tell()

    def _tell(self) -> None:
        for leak in self.finder.leaks():
            if leak.path not in self._named:
                self._named.add(leak.path)
                warn_leak(leak)


def _roots(trainer: Trainer, pl_module: LightningModule) -> Mapping[str, object]:
    return {"model": pl_module, "trainer": trainer}
