"""Say why memory ran out, and what to do about it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom.errors import add_note
from lightning_oom.memory import read_memory
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.batch import host_copy
from lightning_oom.report.collect import Scene, collect_report
from lightning_oom.report.files import FORMATS, ReportFolder
from lightning_oom.report.frames import failed_frames, find_batch
from lightning_oom.report.record import FailedAttempt, GrowingThing
from lightning_oom.report.remedies import with_advice
from lightning_oom.report.tensorboard import write_tensorboard
from lightning_oom.report.timeline import TimelineKeeper
from lightning_oom.report.words import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.events import StepOutcome
    from lightning_oom.recovery.plan import Failure
    from lightning_oom.report.record import OOMReport

__all__ = ["OOMReporter"]

_TENSORBOARD = "tensorboard"


class OOMReporter(Callback):
    """Write a report of every out-of-memory error that ends a run: what, where, why, what to do.

    The report is made at the moment of the error, before anything is freed: which batch (shapes and
    dtypes, never values), which phase and module, what was asked for and what there was, what the
    memory held by kind, the largest live tensors and who holds them, the modules, the allocator's own
    summary, other processes, memory over the steps before. It ends in a diagnosis and in remedies
    with what each would free.

    Works in fit, validate, test and predict. Beside :class:`~lightning_oom.OOMRecovery`, what the
    recovery tried is part of the report, and OOMs that it recovered from are reported on request.

    Args:
        dirpath: Folder for the reports, made when the first one comes; a relative path starts at the
            trainer's ``default_root_dir``.
        formats: Out of ``"text"``, ``"html"``, ``"json"`` (one file each for every rank and OOM) and
            ``"tensorboard"`` (text ``oom/report`` and image ``oom/memory``, where the trainer has a
            TensorBoard logger).
        max_reports: OOMs that are written down in one run, at least 1. One place is kept for the
            error that ends the run.
        include_values: Add the first numbers of each tensor of the batch, and save the batch beside
            the report (``*.batch.pt``, for :func:`torch.load`).
        on_recovered: Write a report also where the recovery succeeded.

    Attributes:
        last_report: The last one that was written, an :class:`~lightning_oom.OOMReport`; ``None``
            before the first.
        paths: The files written so far.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor; nothing that goes
            wrong with a report ever hides the error that it is about.

    Note:
        Cost without an OOM: one reading of the counters at the end of some steps, the fewer the
        longer the run (about 200 in 1,000 steps). At an OOM that is recovered from: 10 ms, and 50 ms
        more where it is reported; at one that ends the run: 0.2 s. Nothing is allocated on the
        device. No tensor, error or frame is kept.

    Example:
        >>> import tempfile
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_oom.testing import fail_on
        >>> reporter = OOMReporter(dirpath=tempfile.mkdtemp())
        >>> trainer = Trainer(
        ...     max_steps=4, callbacks=[reporter, fail_on(step=1, phase="forward")],
        ...     accelerator="cpu", logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        Traceback (most recent call last):
            ...
        torch.OutOfMemoryError: CUDA out of memory. ...
        >>> reporter.last_report.phase, reporter.last_report.batch_index
        ('forward', 1)
        >>> sorted(path.suffix for path in reporter.paths)
        ['.html', '.json', '.txt']

    References:
        k2-fsa/icefall#343, axolotl-ai-cloud/axolotl#925, Lightning-AI/pytorch-lightning#10717.
    """

    def __init__(
        self,
        *,
        dirpath: str = "oom_reports",
        formats: Sequence[str] = ("text", "html", "json", "tensorboard"),
        max_reports: int = 10,
        include_values: bool = False,
        on_recovered: bool = False,
    ) -> None:
        known = (*FORMATS, _TENSORBOARD)
        if isinstance(formats, str) or not formats or not set(formats) <= set(known):
            raise ValueError(f"formats is a list out of {sorted(known)}, got {formats!r}")
        if not isinstance(max_reports, int) or max_reports < 1:
            raise ValueError(f"max_reports is at least 1, got {max_reports!r}")
        self.dirpath = str(dirpath)
        self.formats = tuple(formats)
        self.max_reports = max_reports
        self.include_values = include_values
        self.on_recovered = on_recovered
        self.last_report: OOMReport | None = None
        self.paths: tuple[Path, ...] = ()
        self._folder: ReportFolder | None = None
        self._timeline = TimelineKeeper()
        self._batch_index: int | None = None
        self._pending: OOMReport | None = None
        self._pending_place: tuple[Any, ...] = ()
        self._written_place: tuple[Any, ...] = ()
        self._pending_batch: Any = None

    # -- looking on
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start anew."""
        self._folder = ReportFolder(
            Path(trainer.default_root_dir) / self.dirpath,
            formats=[name for name in self.formats if name in FORMATS],
            max_reports=self.max_reports,
        )
        self._timeline = TimelineKeeper()
        self._batch_index = None
        self._written_place = ()
        self._drop_pending()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the number of the batch."""
        self._batch_index = batch_idx

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the number of the batch."""
        self._batch_index = batch_idx

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the number of the batch."""
        self._batch_index = batch_idx

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the number of the batch."""
        self._batch_index = batch_idx

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note what memory holds, now and then."""
        step = trainer.global_step
        if self._timeline.wants(step):
            with contextlib.suppress(Exception):
                self._timeline.add(step, read_memory(trainer.strategy.root_device))

    # -- the moment of the error
    def on_oom(
        self, trainer: Trainer, pl_module: LightningModule, error: BaseException, failure: Failure
    ) -> None:
        """Write down an error that the recovery has caught, while its frames hold everything.

        Args:
            trainer: The trainer.
            pl_module: The module it runs.
            error: The error.
            failure: The attempt that it ended.
        """
        if self._pending is not None and self._pending_place == self._place(trainer):
            return  # the first failure, that of the whole batch, is the one to explain
        with contextlib.suppress(Exception):
            self._collect(trainer, pl_module, error, failure.cause, phase=failure.phase)

    def on_oom_outcome(
        self, trainer: Trainer, pl_module: LightningModule, outcome: StepOutcome
    ) -> None:
        """Finish the report of a batch about which the recovery has decided.

        Args:
            trainer: The trainer.
            pl_module: The module it runs.
            outcome: What was tried and how it ended.
        """
        report, batch = self._pending, self._pending_batch
        self._drop_pending()
        if report is None or (outcome.recovered and not self.on_recovered):
            return
        with contextlib.suppress(Exception):
            ended = "recovered" if outcome.recovered else "skipped" if outcome.skipped else "raised"
            report = report.but(
                outcome=ended,
                attempts=tuple(
                    FailedAttempt(
                        what=failure.plan.describe(),
                        phase=failure.phase,
                        seconds=failure.seconds,
                        requested_bytes=failure.cause.requested_bytes,
                    )
                    for failure in outcome.failures
                ),
                declined=tuple(f"{rung}: {reason}" for rung, reason in outcome.declined.items()),
            )
            self._write(trainer, report, batch)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the report of an error that ends the run."""
        with contextlib.suppress(Exception):
            cause = classify_oom(exception)
            if cause is not None:
                self._end_with(trainer, pl_module, exception, cause)
        self._drop_pending()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep nothing."""
        self._drop_pending()

    # -- making it
    def _end_with(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        error: BaseException,
        cause: OOMCause,
    ) -> None:
        if self._written_place != self._place(trainer):  # else the recovery has just given up on it
            if self._pending_place != self._place(trainer):
                self._collect(trainer, pl_module, error, cause)
            if self._pending is not None:
                self._write(trainer, self._pending, self._pending_batch)
        report = self.last_report
        if report is not None and report.diagnoses:
            note = f"lightning_oom: {report.diagnoses[0].title}"
            if report.remedies:
                note += f"\n  try first: {report.remedies[0].action}"
            if self.paths:
                note += f"\n  report: {self.paths[-1].with_suffix('')}.*"
            add_note(error, note)

    def _place(self, trainer: Trainer) -> tuple[Any, ...]:
        return _stage_of(trainer), trainer.global_step, self._batch_index

    def _collect(
        self,
        trainer: Trainer,
        pl_module: LightningModule | None,
        error: BaseException,
        cause: OOMCause,
        *,
        phase: str | None = None,
    ) -> None:
        scene = Scene(
            error=error,
            cause=cause,
            device=trainer.strategy.root_device,
            module=pl_module,
            optimizers=tuple(trainer.optimizers),
            may_go_on=phase is not None,
        )
        known: dict[str, Any] = {
            "rank": trainer.global_rank,
            "stage": _stage_of(trainer),
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "accumulate": trainer.accumulate_grad_batches,
            "has_recovery": any(type(c).__name__ == "OOMRecovery" for c in _callbacks(trainer)),
            "timeline": self._timeline.points,
            "growing": tuple(_growing(trainer)),
        }
        if phase is not None:
            known["phase"] = phase
        report = collect_report(scene, include_values=self.include_values, **known)
        if report.batch_index is None:
            report = report.but(batch_index=self._batch_index)
        self._pending = report
        self._pending_place = self._place(trainer)
        if self.include_values:
            self._pending_batch = host_copy(find_batch(failed_frames(error))[0])

    def _drop_pending(self) -> None:
        self._pending = self._pending_batch = None
        self._pending_place = ()

    def _write(self, trainer: Trainer, report: OOMReport, batch: Any) -> None:
        report = with_advice(report)
        self.last_report = report
        if report.outcome == "raised":
            self._written_place = self._place(trainer)
        written = () if self._folder is None else self._folder.write(report, batch=batch)
        self.paths += written
        where = f" Report: {written[0].with_suffix('')}.*" if written else ""
        rank_zero_info(f"OOMReporter: {one_line(report)}{where}")
        if _TENSORBOARD in self.formats:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    write_tensorboard(logger.experiment, report, step=trainer.global_step)


def _stage_of(trainer: Trainer) -> str | None:
    stage = trainer.state.stage
    return None if stage is None else {"train": "fit"}.get(stage.value, str(stage.value))


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(getattr(trainer, "callbacks", ()))


def _growing(trainer: Trainer) -> list[GrowingThing]:
    """Ask every callback that finds leaks what it has found."""
    found = []
    for callback in _callbacks(trainer):
        with contextlib.suppress(Exception):
            leaks = getattr(callback, "leaks", ())
            for leak in leaks() if callable(leaks) else leaks:
                found.append(  # noqa: PERF401 - what one callback raises must not lose the others'
                    GrowingThing(
                        path=str(leak.path),
                        num_bytes=int(leak.num_bytes),
                        bytes_per_step=float(leak.bytes_per_step),
                        holds_graph=bool(leak.holds_graph),
                    )
                )
    return found
