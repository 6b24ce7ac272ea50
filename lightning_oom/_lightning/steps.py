"""Where a run is: what Lightning counts but does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["finished_batches"]


def finished_batches(trainer: Trainer) -> int:
    """Return how many batches have finished an optimizer step before the present one.

    It is the step under which Lightning logs what ``self.log`` got, so that rows of one step meet in
    a logger that refuses to go back (W&B). Micro-batches that accumulate do not count.

    Args:
        trainer: Of any stage.
    """
    loop = trainer.fit_loop.epoch_loop
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))
