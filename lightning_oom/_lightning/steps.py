"""Where a run is: what Lightning counts but does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["describe_place", "finished_batches"]


def finished_batches(trainer: Trainer) -> int:
    """Return how many batches have finished an optimizer step before the present one.

    It is the step under which Lightning logs what ``self.log`` got, so that rows of one step meet in
    a logger that refuses to go back (W&B). Micro-batches that accumulate do not count.

    Args:
        trainer: Of any stage.
    """
    loop = trainer.fit_loop.epoch_loop
    stepped = getattr(loop, "_batches_that_stepped", None)
    return int(trainer.global_step if stepped is None else stepped)


def describe_place(trainer: Trainer, stage: str) -> str:
    """Return where a run is, for people: ``"epoch 0, batch 3"``, ``"sanity check, batch 0"``.

    Args:
        trainer: In the middle of a batch.
        stage: ``"train"``, ``"validation"``, ``"test"`` or ``"predict"``.

    Returns:
        The stage, or for training the epoch; the batch within its dataloader; and which dataloader,
        where there are several. The batch counts over all of them if one has no length.
    """
    if stage == "train":
        return f"epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx}"
    loop: Any = {
        "validation": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }[stage]
    if trainer.state.fn == "fit":
        loop = trainer.fit_loop.epoch_loop.val_loop
    number, dataloader = loop.batch_progress.current.ready - 1, 0
    lengths = loop.max_batches if isinstance(loop.max_batches, list) else [loop.max_batches]
    while dataloader < len(lengths) - 1 and number >= lengths[dataloader]:
        number -= int(lengths[dataloader])
        dataloader += 1
    name = "sanity check" if trainer.sanity_checking else stage
    return f"{name}, batch {number}{f' of dataloader {dataloader}' if len(lengths) > 1 else ''}"
