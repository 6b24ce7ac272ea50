"""Empty the allocator's cache where it helps, and not at each step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.steps import finished_batches
from lightning_oom.callbacks._outlets import LoggerOutlet
from lightning_oom.memory.cleaning import CachePressure, Cleaning, clean_cache
from lightning_oom.memory.devices import read_memory
from lightning_oom.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import LightningModule, Trainer

__all__ = ["CacheCleaner"]

Moment = Literal["sanity_check_end", "validation_start", "validation_end", "epoch_end"]

_MOMENTS = ("sanity_check_end", "validation_start", "validation_end", "epoch_end")


class CacheCleaner(Callback):
    """Collect garbage and give cached memory back to the device, at few and chosen moments.

    Training and validation want blocks of other sizes: what one has cached is no use to the other
    and may be what the other lacks. A cleaning is done at the stage changes in ``at``, after every
    ``every_n_steps``-th optimizer step, and when the device is full of cached memory: when
    ``above_used`` of the limit is reserved while no tensor uses ``above_fragmentation`` of it.

    For every cleaning, every logger of the trainer gets:

    ===========================  ====  ==========================================================
    Key                          Unit  Meaning
    ===========================  ====  ==========================================================
    ``memory/cache_freed_gib``   GiB   given back to the device by this cleaning
    ``memory/cleaning_seconds``  s     spent on cleanings so far
    ===========================  ====  ==========================================================

    Args:
        at: Stage changes, out of ``"sanity_check_end"``, ``"validation_start"``,
            ``"validation_end"`` and ``"epoch_end"``.
        every_n_steps: Optimizer steps between two cleanings, at least 1. ``None`` does not count
            steps.
        above_used: Reserved part of the limit, in (0, 1], from which on pressure is felt. ``None``
            never cleans by pressure.
        above_fragmentation: Unused part of what is reserved, in [0, 1), that must be there as well.
        pause_steps: Optimizer steps without a cleaning by pressure after one, at least 1. What a
            cleaning gave back has to be taken again; more often than this costs more than it gives.
        verbose: Print a line at the end of fit.

    Attributes:
        cleanings: The last 1000 cleanings, oldest first, each a
            :class:`~lightning_oom.memory.cleaning.Cleaning`.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor.

    Note:
        Cost of a step without a cleaning: one reading of the counters. A cleaning waits for the
        device; ``gc.collect`` takes from 10 ms to a second, by the number of Python objects. Does
        nothing at all on the CPU.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_oom.testing import SimulatedGPUStrategy
        >>> cleaner = CacheCleaner(at=["validation_start"], verbose=False)
        >>> trainer = Trainer(
        ...     strategy=SimulatedGPUStrategy("64 MiB"), max_epochs=1, limit_train_batches=2,
        ...     limit_val_batches=1, num_sanity_val_steps=0, callbacks=[cleaner], logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> [cleaning.reason for cleaning in cleaner.cleanings]
        ['validation_start']

    References:
        huggingface/transformers#31372, huggingface/peft#2894.
    """

    def __init__(
        self,
        *,
        at: Sequence[Moment] = ("sanity_check_end", "validation_start", "validation_end"),
        every_n_steps: int | None = None,
        above_used: float | None = 0.9,
        above_fragmentation: float = 0.3,
        pause_steps: int = 100,
        verbose: bool = True,
    ) -> None:
        if isinstance(at, str) or any(moment not in _MOMENTS for moment in at):
            raise ValueError(f"at is a list of moments out of {list(_MOMENTS)}, got {at!r}")
        for name, value in (("every_n_steps", every_n_steps), ("pause_steps", pause_steps)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is at least 1, got {value!r}")
        if above_used is not None and not 0 < above_used <= 1:
            raise ValueError(f"above_used is a fraction in (0, 1] or None, got {above_used!r}")
        if not 0 <= above_fragmentation < 1:
            raise ValueError(
                f"above_fragmentation is a fraction in [0, 1), got {above_fragmentation!r}"
            )
        self.cleanings: deque[Cleaning] = deque(maxlen=1000)
        self.verbose = verbose
        self._at = frozenset(at)
        self._every = every_n_steps
        self._pause = pause_steps
        self._pressure = (
            None
            if above_used is None
            else CachePressure(used_fraction=above_used, fragmentation_fraction=above_fragmentation)
        )
        self._start_run()

    def _start_run(self) -> None:
        self._outlet = LoggerOutlet("CacheCleaner")
        self._num_cleanings = 0
        self._seconds = 0.0
        self._freed_bytes = 0
        self._last_step = 0
        self._quiet_until = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Count steps anew."""
        self._start_run()
        self._last_step = trainer.global_step

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clean after the sanity check."""
        self._at_moment(trainer, "sanity_check_end")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clean before a validation; there is nothing to clean before the sanity check."""
        if not trainer.sanity_checking:
            self._at_moment(trainer, "validation_start")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clean after a validation; the sanity check has a moment of its own."""
        if not trainer.sanity_checking:
            self._at_moment(trainer, "validation_end")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clean after an epoch."""
        self._at_moment(trainer, "epoch_end")

    def _at_moment(self, trainer: Trainer, moment: Moment) -> None:
        if moment in self._at:
            self._clean(trainer, moment)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Clean every n steps, or when pressure is felt."""
        device, step = trainer.strategy.root_device, trainer.global_step
        if device.type == "cpu" or step == self._last_step:
            return
        self._last_step = step
        if self._every is not None and step % self._every == 0:
            self._clean(trainer, f"every {self._every} steps")
        elif (
            self._pressure is not None
            and step >= self._quiet_until
            and self._pressure.is_felt(read_memory(device))
        ):
            self._clean(trainer, "pressure")
            self._quiet_until = step + self._pause

    def _clean(self, trainer: Trainer, reason: str) -> None:
        cleaning = clean_cache(trainer.strategy.root_device, reason=reason)
        if cleaning is None:
            return
        self.cleanings.append(cleaning)
        self._num_cleanings += 1
        self._seconds += cleaning.seconds
        row = {"memory/cleaning_seconds": self._seconds}
        if cleaning.freed_bytes is not None:
            self._freed_bytes += cleaning.freed_bytes
            row["memory/cache_freed_gib"] = cleaning.freed_bytes / GIB
        self._outlet.log(trainer, row, step=finished_batches(trainer))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the cleanings cost and gave."""
        if self.verbose and self._num_cleanings:
            rank_zero_info(
                f"CacheCleaner: {self._num_cleanings} cleanings took {self._seconds:.2f} s and gave "
                f"{format_bytes(self._freed_bytes)} back to the device."
            )
