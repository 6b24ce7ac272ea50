"""Batches that run out of memory on their way to the device stay on the host until they are split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.errors import add_note
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.plan import AttemptPlan, Failure
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from lightning.pytorch import Trainer

    from lightning_oom.memory import MemoryReading
    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["Transfer"]


class Transfer:
    """Stands in front of ``strategy.batch_to_device``.

    A transfer that runs out of memory is repeated once with caches empty. If that fails too, the
    loop gets the batch as it is on the host, and the step moves it piece by piece.

    Args:
        trainer: The trainer whose strategy moves batches.
        classify: Gives the cause of an error that may be recovered from, else ``None``.
        release: Collects garbage and empties caches.
        read: Reads the device's counters, ``None`` where it cannot.
        randomness: Put back before a transfer is repeated; ``None`` where no hook of the user can
            draw random numbers in a transfer.

    Attributes:
        failure: The facts of the last transfer that stayed on the host, until it is taken.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        classify: Callable[[Exception], OOMCause | None],
        release: Callable[[], object],
        read: Callable[[], MemoryReading | None],
        randomness: Part | None,
    ) -> None:
        self.strategy = trainer.strategy
        self.classify = classify
        self.release = release
        self.read = read
        self.randomness = randomness
        self.enabled = True
        self._move: Callable[..., Any] = self.strategy.batch_to_device
        self._pending: Any = None
        self.failure: Failure | None = None

    def install(self) -> Undo:
        """Put the guard in front of the strategy's method; return its undo."""
        self._move = self.strategy.batch_to_device
        undo = shadow(self.strategy, "batch_to_device", self)

        def remove() -> None:
            undo()
            self.__dict__.pop("_move", None)
            self._pending = self.failure = None

        return Undo(remove)

    def __call__(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch; return it unmoved when it does not fit and can be split later."""
        self._pending = self.failure = None
        saved = self.randomness.take() if self.randomness is not None else None
        cause: OOMCause | None = None
        reading: MemoryReading | None = None
        for attempt in (1, 2):
            try:
                return self._move(batch, device, dataloader_idx)
            except Exception as error:
                cause = self.classify(error)
                if cause is None:
                    raise
                if not self.enabled and attempt == 2:  # noqa: PLR2004 - the second is the last
                    add_note(error, "lightning_oom: the batch does not fit on the device.")
                    raise
                reading = self.read()
                clear_frames(error)
            if saved is not None:
                saved.restore()
            self.release()
        if cause is not None:
            plan = AttemptPlan(rung="release")
            self.failure = Failure(
                plan=plan, cause=cause, phase="transfer", seconds=0.0, reading=reading
            )
        self._pending = batch
        return batch

    def is_on_host(self, batch: Any) -> bool:
        """Whether this very batch has stayed on the host."""
        return batch is not None and batch is self._pending

    def move(self, part: Any) -> Any:
        """Move a piece of a batch that stayed on the host."""
        return self._move(part)
