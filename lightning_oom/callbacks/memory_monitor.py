"""Watch how much memory a run holds, what holds it, and how near the limit it comes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_oom._lightning.steps import finished_batches
from lightning_oom.callbacks._leak_watch import LeakWatch
from lightning_oom.callbacks._outlets import (
    LoggerOutlet,
    show_in_progress_bar,
    warn_near_limit,
)
from lightning_oom.callbacks._tensorboard import draw_run, lay_out_charts
from lightning_oom.memory.ranks import MEMORY_SCALARS, RankAggregates
from lightning_oom.memory.step_reader import StepReader
from lightning_oom.undo import UndoStack

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.memory.step_memory import StepMemory

__all__ = ["MemoryMonitor"]


class MemoryMonitor(Callback):
    """Record how much memory each step holds and how near the limit its peak came.

    A reading is taken on the strategy's root device after the batch that completes every
    ``every_n_steps``-th optimizer step; under gradient accumulation the micro-batches in between
    are covered by the peak, not read one by one. In validate, test and predict it is taken after
    every ``every_n_steps``-th batch. A run too short for one is read at its end. A validation inside
    a fit is a phase of it: its peak is part of the next reading, or of one more at the end of fit.

    Readings go to every logger of the trainer, and stay in :attr:`readings` when there is none:

    =====================================  =====  =================================================
    Key                                    Unit   Meaning
    =====================================  =====  =================================================
    ``memory/allocated_gib``               GiB    held by live tensors when the reading was taken
    ``memory/peak_allocated_gib``          GiB    most held at once since the previous reading
    ``memory/reserved_gib``                GiB    taken from the device, cached memory included
    ``memory/peak_reserved_gib``           GiB    most of it since the previous reading
    ``memory/limit_gib``                   GiB    what the device can hold for this process
    ``memory/used_fraction``               0..1   that peak over what the device can hold for it
    ``memory/headroom_gib``                GiB    what the device can hold for it minus that peak
    ``memory/fragmentation_fraction``      0..1   part of what is reserved that no tensor uses
    ``memory/alloc_retries``               count  times the cache had to be emptied to go on
    ``memory/by_phase/<phase>_gib``        GiB    ``peak_allocated_gib`` of ``forward``,
                                                  ``backward``, ``optimizer``, ``validation``,
                                                  ``test``, ``predict``
    ``memory/peak_phase``                  0..5   the phase of the peak, in that order
    ``memory/host_rss_gib``                GiB    resident sets of the process and its workers
    ``memory/other_processes_gib``         GiB    held on the device by other processes
    ``memory/this_process_outside_torch_   GiB    held by this one beside torch's allocator: CUDA
    gib``                                         context, libraries
    ``memory/by_kind/<kind>_gib``          GiB    with ``breakdown``: ``parameters``, ``buffers``,
                                                  ``gradients``, ``optimizer``, ``activations``,
                                                  ``batch``, ``other``
    ``memory/by_kind_total_gib``           GiB    their sum: allocated when they were counted
    =====================================  =====  =================================================

    What "held" means depends on the backend, and a backend never fills a key it cannot measure: CUDA
    and XPU ask the caching allocator; MPS has no peak, so ``peak_*`` is absent; CPU reports the
    resident set of the process against physical memory. Other processes come from NVML; without it,
    and in containers that number their processes anew, they are absent.

    TensorBoard opens with these in its Custom Scalars tab, in a category "Memory", and gets a picture
    of the run at its end (with matplotlib).

    Kinds are counted from the live tensors at the end of forward, backward and optimizer of the step
    that is read; logged is the fullest of these moments, and ``kinds_by_phase`` of a reading has all.

    Args:
        every_n_steps: Optimizer steps between two readings, at least 1. ``None`` follows
            ``Trainer(log_every_n_steps=...)``.
        breakdown: Count who holds the memory, in steps that are read.
        find_leaks: Look for what grows from step to step and issue a
            :class:`~lightning_oom.errors.MemoryLeakWarning` that names it, once each.
        warn_above: Fraction of the limit, in (0, 1], past which a
            :class:`~lightning_oom.errors.NearLimitWarning` is issued, once per run. ``None``
            never warns.
        progress_bar: Show the peak and the limit in the progress bar.
        across_ranks: Also log ``<key>_min``, ``<key>_mean`` and ``<key>_max`` over the readings of
            all ranks, at the end of each training epoch and of validate, test and predict.
        sample_seconds: Between two looks at the host, at other processes and at the limit, above 0.
        keep: Number of most recent readings held in :attr:`readings`, at least 1. Host memory
            stays constant however long the run.

    Attributes:
        readings: The last ``keep`` readings, oldest first, each a
            :class:`~lightning_oom.memory.step_memory.StepMemory`. Sizes in bytes.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor, never mid-run.

    Note:
        Cost: a reading of counters per reading, three readings of the peak counters per step where
        the backend has them. No device synchronisation; no collective but those of ``across_ranks``,
        at ends of epochs. Host and NVML are read on a thread of their own. Each rank logs its own
        device; the callback never changes the loss, the gradients or the random state.

        The peak counters of the backend are reset at each change of phase. Peaks of the recovery
        and of :class:`~lightning_oom.memory.PeakWatch` are kept apart from that; a call of
        ``torch.cuda.max_memory_allocated`` in user code sees the present phase only.

        With ``breakdown``, a step that is read notes each tensor that autograd saves, 4 us each.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> monitor = MemoryMonitor(every_n_steps=2)
        >>> trainer = Trainer(
        ...     max_steps=4, callbacks=[monitor], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> [reading.step for reading in monitor.readings]
        [2, 4]
        >>> 0 < monitor.readings[-1].used_fraction < 1
        True

    See Also:
        :class:`MemoryProfiler` for which line allocated it,
        :class:`OOMRecovery` for what to do when the limit is passed.

    References:
        Lightning-AI/pytorch-lightning#18652, #12266, #20807, #9032, #15794.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        breakdown: bool = False,
        find_leaks: bool = False,
        warn_above: float | None = None,
        progress_bar: bool = False,
        across_ranks: bool = False,
        sample_seconds: float = 2.0,
        keep: int = 1000,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is at least 1, got {value!r}")
        if warn_above is not None and not 0 < warn_above <= 1:
            raise ValueError(f"warn_above is a fraction in (0, 1] or None, got {warn_above!r}")
        if not sample_seconds > 0:
            raise ValueError(f"sample_seconds is above 0, got {sample_seconds!r}")
        self.every_n_steps = every_n_steps
        self.breakdown = breakdown
        self.warn_above = warn_above
        self.progress_bar = progress_bar
        self.readings: deque[StepMemory] = deque(maxlen=keep)
        self._sample_seconds = sample_seconds
        self._find_leaks = find_leaks
        self._ranks = RankAggregates(MEMORY_SCALARS) if across_ranks else None
        self._forget_run()

    def _forget_run(self) -> None:
        self._reader: StepReader | None = None
        self._undos = UndoStack()
        self.leaks = LeakWatch(is_on=False)
        self._outlet = LoggerOutlet("MemoryMonitor")
        self._warned = False
        self._every = 0
        self._batch: Any = None
        self._is_due = False
        self._last_step = -1
        self._num_batches = 0
        self._oom_steps: deque[int] = deque(maxlen=self.readings.maxlen)
        self._is_owed = True  # a reading, before the run ends

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the run before."""
        self._close()

    def _open(self, trainer: Trainer, phase: str) -> None:
        """Begin with the first stage of a run, when the module is on its device."""
        if self._reader is None:
            self._reader = StepReader(
                trainer.strategy.root_device, sample_seconds=self._sample_seconds
            )
            self._reader.open()
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
            self._every = self.every_n_steps or every
            self._last_step = trainer.global_step
            if self.progress_bar:
                self._undos.push(show_in_progress_bar(trainer, self._latest))
            self.leaks = LeakWatch(is_on=self._find_leaks)
            self._undos.push(lay_out_charts(trainer))
        self._reader.enter(phase)

    def _close(self) -> None:
        reader, undos = self._reader, self._undos
        self._forget_run()
        if reader is not None:
            reader.close()
        undos()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the thread and the NVML session, and say what is left behind."""
        self.leaks.at_end(trainer, pl_module)
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the thread and the NVML session."""
        self._close()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, with or without a sanity check before."""
        self._open(trainer, "forward")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note whether this batch completes a step that is read."""
        self._is_due = self._every > 0 and (finished_batches(trainer) + 1) % self._every == 0
        if self._is_due and self.breakdown and self._reader is not None:
            self._batch = batch
            self._reader.begin_breakdown()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """End the forward."""
        self._end_phase(trainer, pl_module, "forward", then="backward")

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """End the backward."""
        self._end_phase(trainer, pl_module, "backward", then="optimizer")

    def _end_phase(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, *, then: str
    ) -> None:
        reader = self._reader
        if reader is None:
            return
        if self._is_due and self.breakdown:
            reader.break_down(phase, pl_module, trainer.optimizers, self._batch)
        reader.enter(then)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, and read after every n-th."""
        reader = self._reader
        if reader is None:
            return
        step = trainer.global_step
        stepped, self._last_step = step != self._last_step, step
        if self._is_due and self.breakdown:
            phase = "optimizer" if stepped else "backward"
            reader.break_down(phase, pl_module, trainer.optimizers, batch)
            reader.end_breakdown()
        self._batch = None
        if self._is_due and (stepped or not pl_module.automatic_optimization):
            self._read(trainer, step, "train", then="forward")
        else:
            reader.enter("forward")
        self.leaks.after_batch(trainer, pl_module, step=step, stage="train")

    def on_oom(self, trainer: Trainer, *_: Any) -> None:
        """Note the step for the picture of the run; called by :class:`OOMRecovery`."""
        is_fit = trainer.state.fn == "fit"
        self._oom_steps.append(trainer.global_step if is_fit else self._num_batches)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce over ranks, where asked for."""
        self._end_epoch(trainer, "train", finished_batches(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what no reading has covered."""
        if self._is_owed and self._reader is not None:
            self._read(trainer, trainer.global_step, "train")
        draw_run(trainer, self.readings, oom_steps=self._oom_steps)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin validation, alone or as a phase of a fit."""
        self._open(trainer, "validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to training, or end."""
        if trainer.state.fn == "fit":
            if self._reader is not None:
                self._reader.enter("forward")
            self._is_owed = True
            self.leaks.after_epoch(trainer, "validate")
        else:
            self._end_evaluation(trainer, "validate")

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Read after every n-th batch, unless this is a phase of a fit."""
        if trainer.state.fn != "fit":
            self._end_batch(trainer, pl_module, "validate")
        else:
            self.leaks.after_batch(trainer, pl_module, step=args[2], stage="validate")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._open(trainer, "test")

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Read after every n-th batch."""
        self._end_batch(trainer, pl_module, "test")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read a run that was too short for it."""
        self._end_evaluation(trainer, "test")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._open(trainer, "predict")

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Read after every n-th batch."""
        self._end_batch(trainer, pl_module, "predict")

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read a run that was too short for it."""
        self._end_evaluation(trainer, "predict")

    def _end_batch(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._num_batches += 1
        if self._reader is not None and self._every and self._num_batches % self._every == 0:
            if self.breakdown:
                self._reader.break_down(stage, pl_module, (), None)
            self._read(trainer, self._num_batches, stage)
        self.leaks.after_batch(trainer, pl_module, step=self._num_batches, stage=stage)

    def _end_evaluation(self, trainer: Trainer, stage: str) -> None:
        if self._is_owed and self._reader is not None:
            self._read(trainer, self._num_batches, stage)
        self._end_epoch(trainer, stage, self._num_batches)
        draw_run(trainer, self.readings, oom_steps=self._oom_steps)

    def _end_epoch(self, trainer: Trainer, stage: str, step: int) -> None:
        self._log_over_ranks(trainer, step)
        self.leaks.after_epoch(trainer, stage)

    def _read(self, trainer: Trainer, step: int, stage: str, *, then: str | None = None) -> None:
        if self._reader is None or not self._every:
            return
        reading = self._reader.read(step, stage, then=then)
        self._is_owed = False
        self.readings.append(reading)
        scalars = reading.scalars()
        log_step = finished_batches(trainer) if stage == "train" else step
        self._outlet.log(trainer, scalars, step=log_step)
        if self._ranks is not None:
            self._ranks.add(scalars)
        used = reading.used_fraction
        is_near = self.warn_above is not None and used is not None and used > self.warn_above
        if is_near and not self._warned:
            self._warned = True
            warn_near_limit(reading, above=self.warn_above or 1.0)

    def _log_over_ranks(self, trainer: Trainer, step: int) -> None:
        if self._ranks is not None:
            scalars = self._ranks.compute(trainer.strategy.root_device)
            self._outlet.log(trainer, scalars, step=step)

    def _latest(self) -> StepMemory | None:
        return self.readings[-1] if self.readings else None
