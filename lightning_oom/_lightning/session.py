"""What is in place while one trainer runs: guards, snapshots, programs; all of it with an undo."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_oom._lightning.closing import install_closing_guard
from lightning_oom._lightning.evaluation import EvaluationSetup, install_steps
from lightning_oom._lightning.precision import CurrentLossScaler
from lightning_oom._lightning.progress import Progress
from lightning_oom._lightning.results import ResultsPart
from lightning_oom._lightning.support import overrides_transfer
from lightning_oom._lightning.train import install_closures
from lightning_oom._lightning.train_setup import TrainSetup
from lightning_oom._lightning.transfer import Transfer
from lightning_oom.memory import read_memory, release_cached
from lightning_oom.recovery.classify import OOMCause, classify_oom
from lightning_oom.recovery.cleanup import collect_garbage
from lightning_oom.recovery.interleaved import InterleavedGuard, is_interleaved
from lightning_oom.recovery.ladder import Ladder, ReleaseRung
from lightning_oom.recovery.optimizer import OptimizerGuard
from lightning_oom.recovery.snapshot import (
    Attributes,
    Buffers,
    Metrics,
    ParameterVersions,
    RandomState,
    Snapshot,
    Structure,
)
from lightning_oom.recovery.step import GuardedStep
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor

    from lightning_oom._lightning.evaluation import EvaluationProgram
    from lightning_oom._lightning.train import TrainProgram
    from lightning_oom.memory import MemoryReading
    from lightning_oom.recovery.events import StepOutcome
    from lightning_oom.recovery.knowledge import Knowledge, RowsPolicies
    from lightning_oom.recovery.opening import Opening
    from lightning_oom.recovery.plan import Failure
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["RecoveryOptions", "RecoverySession", "session_of"]

_GUARDING: weakref.WeakKeyDictionary[Trainer, RecoverySession] = weakref.WeakKeyDictionary()
"""Trainers whose training steps are guarded, with the session that does it."""

_MODULE_ATTRIBUTES_OF_LIGHTNING = ("_trainer", "_current_fx_name", "_fabric", "_hparams")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What the user may set; see :class:`~lightning_oom.OOMRecovery`."""

    ladder: Ladder
    weight_fn: Callable[[Any], float | Tensor] | None = None
    split_fn: Callable[[Any, int], Sequence[Any]] | None = None
    log_merge: dict[str, str] = field(default_factory=dict)
    skip: bool = False
    split_inseparable: bool = False
    early_zero_grad: bool = True
    max_rows: int | None = None


class RecoverySession:
    """The guards of one trainer, from the first batch to teardown.

    Args:
        trainer: The trainer, after its strategy has put the module on its device.
        module: The module it runs.
        options: What the user has set.
        knowledge: What earlier sessions have learnt; goes on learning.
        is_wanted: Asked at every step; while it says no, errors pass through.
        report: Called with the outcome of each batch that ran out of memory, and its stage.
        report_optimizer: Called with a sentence after an update or clipping that was finished.
        observe: Called with each out-of-memory error of a step before anything of it is freed.
        warn: Called with a sentence when a split would change logged values.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        options: RecoveryOptions,
        knowledge: Knowledge,
        is_wanted: Callable[[], bool],
        report: Callable[[StepOutcome], None],
        report_optimizer: Callable[[str], None],
        observe: Callable[[Exception, Failure], None],
        warn: Callable[[str], None],
    ) -> None:
        self.trainer = trainer
        self.device = trainer.strategy.root_device
        self.options = options
        self.knowledge = knowledge
        self.is_wanted = is_wanted
        self.report = report
        self.report_optimizer = report_optimizer
        self.observe = observe
        self.warn = warn
        own = getattr(module, "split_batch", None)
        self._split_fn = options.split_fn or (own if callable(own) else None)
        self._undos = UndoStack()
        randomness = RandomState([self.device])
        self._attributes = Attributes(module, ignore=_MODULE_ATTRIBUTES_OF_LIGHTNING)
        listing = (Buffers(module), Metrics(module), self._attributes, ParameterVersions(module))
        self._structure = Structure(module, [part.look_again for part in listing])
        self._parts: list[Part] = [self._structure, randomness, *listing]
        self._parts.append(CurrentLossScaler(trainer))
        self._opening: Opening | None = None
        self._closing: Undo | None = None
        self._closed_plugin: Any = None
        self._transfer = Transfer(
            trainer,
            classify=self.classify,
            release=self.release,
            read=self.read,
            randomness=randomness if overrides_transfer(trainer) else None,
        )
        self._undos.push(self._transfer.install())
        self._guard_evaluation()

    def close(self) -> None:
        """Put every replaced object back."""
        if _GUARDING.get(self.trainer) is self:
            del _GUARDING[self.trainer]
        self._undos()

    # -- guards
    def _guard_evaluation(self) -> None:
        options = self.options
        setup = EvaluationSetup(
            self.trainer,
            transfer=self._transfer,
            attributes=self._attributes,
            split_fn=self._split_fn,
            log_merge=options.log_merge,
            warn=self.warn,
        )
        rungs = [rung for rung in options.ladder.rungs if rung.name != "chunk"]
        guarded = self._guarded_step(Ladder(rungs or [ReleaseRung()]), self.knowledge.evaluation)

        def run(program: EvaluationProgram) -> Any:
            return guarded.run(program) if self.is_wanted() else program.run_whole(attempt=1)

        self._undos.push(install_steps(setup, run))

    def guard_training(self) -> None:
        """Guard the closures of automatic optimization."""
        options = self.options
        setup = TrainSetup(
            self.trainer,
            transfer=self._transfer,
            attributes=self._attributes,
            weight_fn=options.weight_fn,
            split_fn=self._split_fn,
            log_merge=options.log_merge,
            warn=self.warn,
        )
        self._structure.follow(setup.look_again)
        wanted = options.early_zero_grad or self.knowledge.zero_first
        setup.zero_first = wanted and setup.may_zero_first
        guarded = self._guarded_step(options.ladder, self.knowledge.training)
        self._opening = guarded.opening
        _GUARDING[self.trainer] = self

        def run(program: TrainProgram) -> Any:
            if not self.is_wanted():
                return program.run_plain()
            self._follow_precision()
            result = guarded.run(program)
            if not options.early_zero_grad:
                self.knowledge.zero_first = setup.zero_first
            return result

        self._undos.push(install_closures(setup, run))

    def limit_rows(self, max_rows: int) -> Undo:
        """Run at most so many rows of a training batch together, until the undo."""
        opening = self._opening
        before = None if opening is None else opening.max_rows

        def set_to(rows: int | None) -> None:
            if opening is not None:
                opening.max_rows = rows

        set_to(max_rows if before is None else min(before, max_rows))
        return Undo(lambda: set_to(before))

    def guard_optimizers(self) -> None:
        """Guard updates, clipping and unscaling, once the optimizers exist."""
        for optimizer in self.trainer.optimizers:
            guard = (
                self._interleaved(optimizer)
                if is_interleaved(optimizer)
                else OptimizerGuard(
                    optimizer,
                    device=self.device,
                    release=self.release,
                    report=self.report_optimizer,
                )
            )
            self._undos.push(guard.install())
        self._guard_closing()
        self._undos.push(self._unguard_closing)

    def _guard_closing(self) -> None:
        self._closed_plugin = self.trainer.precision_plugin
        self._closing = install_closing_guard(
            self.trainer,
            parts=self._parts,
            classify=self.classify,
            release=self.release,
            report=self.report_optimizer,
        )

    def _unguard_closing(self) -> None:
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()

    def _follow_precision(self) -> None:
        """Guard clipping and unscaling of a precision plugin that was put in place in mid-run."""
        if self._closing is None or self.trainer.precision_plugin is self._closed_plugin:
            return
        self._unguard_closing()
        self._guard_closing()

    def _interleaved(self, optimizer: torch.optim.Optimizer) -> InterleavedGuard:
        trainer, module = self.trainer, self.trainer.lightning_module
        parts: list[Part] = [
            RandomState([self.device]),
            Buffers(module),
            Metrics(module),
            Attributes(module, ignore=_MODULE_ATTRIBUTES_OF_LIGHTNING),
            Progress(trainer),
            ResultsPart(trainer),
        ]
        return InterleavedGuard(
            optimizer,
            snapshot=Snapshot(parts),
            classify=self.classify,
            release=self.release,
            report=self.report_optimizer,
        )

    def _guarded_step(self, ladder: Ladder, policies: RowsPolicies) -> GuardedStep:
        options = self.options
        guarded = GuardedStep(
            device=self.device,
            parts=self._parts,
            ladder=ladder,
            policies=policies,
            report=self.report,
            observe=self.observe,
            split_fn=self._split_fn,
            max_rows=options.max_rows,
            split_inseparable=options.split_inseparable,
            on_unrecoverable="skip" if options.skip else "raise",
        )
        self._structure.follow(guarded.questions.forget)
        return guarded

    # -- the device
    def classify(self, error: Exception) -> OOMCause | None:
        """Return the cause of an error that may be recovered from on this device."""
        cause = classify_oom(error)
        return cause if cause is not None and cause.recoverable_on(self.device.type) else None

    def release(self) -> None:
        """Collect garbage, then empty the cache."""
        collect_garbage()
        release_cached(self.device)

    def read(self) -> MemoryReading | None:
        """Return the device's counters; ``None`` when even that fails."""
        try:
            return read_memory(self.device)
        except Exception:
            return None


def session_of(trainer: Trainer) -> RecoverySession | None:
    """Return the session that guards the training steps of a trainer, if one does."""
    return _GUARDING.get(trainer)
