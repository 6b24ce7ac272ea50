"""Go on after CUDA out of memory, and end where the unlimited run ends."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom._lightning.session import RecoveryOptions, RecoverySession
from lightning_oom._lightning.steps import describe_place
from lightning_oom._lightning.support import reason_not_to_guard
from lightning_oom.callbacks._ladder import DEFAULT_LADDER, build_ladder
from lightning_oom.errors import (
    AmbiguousOOMWarning,
    LightningOOMWarning,
    NotSeparableWarning,
    RecoveryDisabledWarning,
    StepSkippedWarning,
)
from lightning_oom.recovery.events import RecoverySummary, StepOutcome
from lightning_oom.recovery.knowledge import Knowledge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor

    from lightning_oom.recovery.plan import Failure

__all__ = ["OOMRecovery"]


class OOMRecovery(Callback):
    """Repeat a step that ran out of memory in a way that fits, with the result of the whole step.

    One attempt of a training step is a transaction: forward, zeroing of gradients and backward. When
    it runs out of memory, everything that it changed is put back (random state, buffers, metrics,
    logs, counters, attributes of the module), memory is released, and the next rung of the ladder is
    tried:

    ==============  ==========================================================  ================
    Rung            What it does                                                Result
    ==============  ==========================================================  ================
    ``release``     the same again, caches empty, old gradients dropped first   bit-equal
    ``chunk``       children of the module run row-chunk by row-chunk and       equal (rounding)
                    again in backward; loss, logs, metrics see the whole batch
    ``split``       micro-batches, losses weighted by rows or ``weight_fn``     equal (rounding)
    ``checkpoint``  repeated blocks keep their inputs only, run again in        bit-equal
                    backward
    ``offload``     activations wait for the backward in host memory            bit-equal
    ``amp``         forward and loss in bfloat16 autocast; only when named      other numbers
    ==============  ==========================================================  ================

    From ``checkpoint`` on the batch stays whole, which is right with batch normalisation too; each of
    these rungs is used together with those before it, and where that is not enough, and the batch may
    be split, with ever fewer rows. Larger batches then start in this way.

    A split is done only where the gradients of a small slice are the weighted sum of those of its
    parts; in-batch negatives and batch normalisation in training mode are not. The number of rows
    that fit is learnt, kept in checkpoints, and used before the next such batch fails. Validation,
    test and predict steps, transfers to the device, clipping and the optimizer's update are guarded
    as well. Hooks such as ``on_after_backward`` run once per step; loggers get one row.

    For every batch that ran out of memory, every logger of the trainer gets:

    ============================  =======  ====================================================
    Key                           Unit     Meaning
    ============================  =======  ====================================================
    ``oom/recovered``             batches  recovered so far
    ``oom/attempts``              count    attempts that this batch took, the last one included
    ``oom/rows_per_micro_batch``  rows     that ran together in the end
    ``oom/wasted_seconds``        s        spent on failed attempts so far
    ============================  =======  ====================================================

    Args:
        ladder: Rungs in the order in which they are tried, out of those above; at least one.
        weight_fn: ``weight_fn(micro_batch)`` gives the weight of a micro-batch's loss, at least 0;
            default its rows. For a loss that is a mean over tokens, count the tokens that the loss
            counts.
        split_fn: ``split_fn(batch, max_rows)`` gives micro-batches of at most ``max_rows`` rows, for
            batches that :func:`~lightning_oom.recovery.batches.split_batch` cannot cut. A method
            ``split_batch`` of the LightningModule is used in the same way.
        log_merge: Logged name -> ``"mean"``, ``"sum"``, ``"last"``, ``"max"`` or ``"min"``: how the
            values of micro-batches become one, where ``reduce_fx`` does not tell.
        on_unrecoverable: ``"raise"`` raises the original error with a note when nothing helped.
            ``"skip"`` leaves the batch out, warns, counts it and lists it in :attr:`summary`.
        on_inseparable: ``"raise"`` never splits a step whose parts do not add up. ``"split"`` splits
            it with a warning that says how large the difference is.
        max_rows: Most rows that run together from the first step on, at least 1; ``None`` for as
            many as fit.
        margin: Fraction of the device, in [0, 1), kept free when rows are predicted.
        early_zero_grad: Drop the last step's gradients before the forward, which is bit-equal and
            lowers the peak, where nothing may look at them; see
            :class:`~lightning_oom.EarlyZeroGrad`. ``False`` does so only once it has helped.
        verbose: Print one line per batch that ran out of memory and a summary at the end.

    Attributes:
        summary: What was seen so far, a :class:`~lightning_oom.recovery.events.RecoverySummary`.

    Raises:
        ValueError: An argument is outside its range. Raised by the constructor.
        torch.OutOfMemoryError: When no rung helps: the original error, its note says what was
            tried, and weights, optimizer and metrics are as before the batch.

    Note:
        Cost of a step without an OOM: 0.2 to 0.4 ms of CPU time for a small module on a slow core, most of
        it the snapshot. No synchronisation, no collective, no copy of parameters or gradients, no
        higher peak. (With ``LBFGS``, copies of parameters in host memory.)

        Not guarded, with one warning at setup: manual optimization and strategies of more than one
        process. Their errors pass through unchanged.

        Where it differs from the unlimited run: a split draws other dropout masks than the whole
        (the same ones every time), and values that are logged as plain numbers but are no means over
        rows become means of micro-batches (see ``log_merge``).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_oom.testing import fail_at
        >>> recovery = OOMRecovery(verbose=False)
        >>> trainer = Trainer(
        ...     max_steps=4, callbacks=[recovery, fail_at(2, step=1)], accelerator="cpu",
        ...     logger=False, enable_checkpointing=False, enable_progress_bar=False,
        ...     enable_model_summary=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> recovery.summary.num_oom, recovery.summary.num_recovered
        (1, 1)

    References:
        Lightning-AI/pytorch-lightning#8531, #5243, #4810.
    """

    def __init__(
        self,
        *,
        ladder: Sequence[str] = DEFAULT_LADDER,
        weight_fn: Callable[[Any], float | Tensor] | None = None,
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        log_merge: dict[str, str] | None = None,
        on_unrecoverable: Literal["raise", "skip"] = "raise",
        on_inseparable: Literal["raise", "split"] = "raise",
        max_rows: int | None = None,
        margin: float = 0.05,
        early_zero_grad: bool = True,
        verbose: bool = True,
    ) -> None:
        _check_choice("on_unrecoverable", on_unrecoverable, ("raise", "skip"))
        _check_choice("on_inseparable", on_inseparable, ("raise", "split"))
        if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 1):
            raise ValueError(f"max_rows is at least 1 or None, got {max_rows!r}")
        if not isinstance(margin, (int, float)) or not 0 <= margin < 1:
            raise ValueError(f"margin is a fraction in [0, 1), got {margin!r}")
        for name, function in (("weight_fn", weight_fn), ("split_fn", split_fn)):
            if function is not None and not callable(function):
                raise ValueError(f"{name} is a function or None, got {function!r}")
        for name, rule in (log_merge or {}).items():
            _check_choice(f"log_merge[{name!r}]", rule, ("mean", "sum", "last", "max", "min"))
        self.verbose = verbose
        self.summary = RecoverySummary()
        self._options = RecoveryOptions(
            ladder=build_ladder(
                ladder,
                trainer=self._running_trainer,
                split_inseparable=on_inseparable == "split",
                on_inseparable=self._warn_inseparable,
            ),
            weight_fn=weight_fn,
            split_fn=split_fn,
            log_merge=dict(log_merge or {}),
            skip=on_unrecoverable == "skip",
            split_inseparable=on_inseparable == "split",
            early_zero_grad=early_zero_grad,
            max_rows=max_rows,
        )
        self._knowledge = Knowledge(margin_fraction=margin)
        self._trainer: Trainer | None = None
        self._session: RecoverySession | None = None
        self._warned: set[str] = set()

    def _running_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("OOMRecovery is not attached to a running trainer")
        return self._trainer

    # -- wiring
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take this trainer on, or say why not."""
        if self._is_busy_elsewhere(trainer):
            self._warn_once(
                "OOMRecovery stands aside: it guards another trainer, whose run is not over; give "
                "each trainer an OOMRecovery of its own.",
                RecoveryDisabledWarning,
            )
            return
        self._close()
        reason = reason_not_to_guard(trainer, pl_module)
        if reason is not None:
            self._warn_once(f"OOMRecovery stands aside: {reason}.", RecoveryDisabledWarning)
            return
        self._trainer = trainer

    def _open(self, trainer: Trainer, pl_module: LightningModule, *, fit: bool) -> None:
        """Put the guards in place, once the strategy has put the module on its device."""
        if self._trainer is not trainer or self._session is not None:
            return
        self._session = RecoverySession(
            trainer,
            pl_module,
            options=self._options,
            knowledge=self._knowledge,
            is_wanted=self._is_wanted,
            report=self._report,
            report_optimizer=self._report_optimizer,
            observe=self._observe,
            warn=self._warn_of_logs,
        )
        if fit:
            self._session.guard_training()

    def _is_busy_elsewhere(self, trainer: Trainer) -> bool:
        other = self._trainer
        return (
            self._session is not None
            and other is not None
            and other is not trainer
            and other.state.status == TrainerStatus.RUNNING
        )

    def _close(self) -> None:
        session, self._session, self._trainer = self._session, None, None
        if session is not None:
            session.close()

    def _is_wanted(self) -> bool:
        """Whether no tuner is probing: it takes the callbacks away and wants to see the error."""
        trainer = self._trainer
        return trainer is not None and any(callback is self for callback in _callbacks(trainer))

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the sanity check as well."""
        self._open(trainer, pl_module, fit=True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the optimizers, which exist from here on."""
        self._open(trainer, pl_module, fit=True)
        if self._session is not None:
            self._session.guard_optimizers()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard a validation that is not part of a fit."""
        self._open(trainer, pl_module, fit=False)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the test loop."""
        self._open(trainer, pl_module, fit=False)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the predict loop."""
        self._open(trainer, pl_module, fit=False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what happened and what to write into the config."""
        if self.verbose and self._session is not None:
            for line in self.summary.final_lines():
                rank_zero_info(line)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put every replaced object back."""
        if not self._is_busy_elsewhere(trainer):
            self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put every replaced object back."""
        if not self._is_busy_elsewhere(trainer):
            self._close()

    # -- telling
    def _observe(self, error: Exception, failure: Failure) -> None:
        """Let callbacks with a method ``on_oom`` look, while everything is still in memory."""
        if failure.cause.confidence == "likely":
            self._warn_once(
                f"OOMRecovery takes {failure.cause.error_type} for out of memory, though its text "
                f"does not say so plainly: {failure.cause.message.splitlines()[0][:200]}",
                AmbiguousOOMWarning,
            )
        trainer = self._trainer
        if trainer is None:
            return
        for callback in _callbacks(trainer):
            look = getattr(callback, "on_oom", None)
            if look is not None:
                with contextlib.suppress(Exception):  # an observer never hides the OOM
                    look(trainer, trainer.lightning_module, error, failure)

    def _tell_outcome(self, outcome: StepOutcome) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        for callback in _callbacks(trainer):
            hear = getattr(callback, "on_oom_outcome", None)
            if hear is not None:
                with contextlib.suppress(Exception):  # an observer never hides the OOM
                    hear(trainer, trainer.lightning_module, outcome)

    def _report(self, outcome: StepOutcome) -> None:
        self.summary = self.summary.after(outcome)
        with contextlib.suppress(Exception):  # a failing console never hides the OOM
            if self.verbose:
                rank_zero_info(f"OOMRecovery: {self._place(outcome.stage)}{outcome.line()}")
        if outcome.skipped:
            warnings.warn(outcome.note(), StepSkippedWarning, stacklevel=2)
        self._log(outcome)
        self._tell_outcome(outcome)

    def _place(self, stage: str) -> str:
        return "" if self._trainer is None else f"{describe_place(self._trainer, stage)}, "

    def _log(self, outcome: StepOutcome) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        row: dict[str, float] = {
            "oom/recovered": float(self.summary.num_recovered),
            "oom/attempts": float(outcome.num_attempts),
            "oom/wasted_seconds": self.summary.wasted_seconds,
        }
        rows = outcome.plan.rows_together if outcome.plan is not None else None
        rows = outcome.rows if rows is None and outcome.recovered else rows
        if rows is not None:
            row["oom/rows_per_micro_batch"] = float(rows)
        for logger in trainer.loggers:
            try:
                logger.log_metrics(row, step=trainer.global_step)
            except Exception as error:  # noqa: PERF203 - every logger gets its turn
                self._warn_once(
                    f"OOMRecovery could not log to {type(logger).__name__}: "
                    f"{type(error).__name__}: {error}",
                    LightningOOMWarning,
                )

    def _report_optimizer(self, text: str) -> None:
        self.summary = replace(self.summary, num_optimizer=self.summary.num_optimizer + 1)
        if self.verbose:
            rank_zero_info(f"OOMRecovery: {self._place('train')}{text}")

    def _warn_of_logs(self, text: str) -> None:
        self._warn_once(f"OOMRecovery: {text}.", NotSeparableWarning)

    def _warn_inseparable(self, reason: str) -> None:
        self._warn_once(
            f"OOMRecovery splits a step whose parts do not add up to the whole: {reason}.",
            NotSeparableWarning,
        )

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, category, stacklevel=2)

    # -- checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain data."""
        return self._knowledge.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what an earlier run has learnt; a state of another version is ignored."""
        self._knowledge.load_state_dict(state_dict)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # set by a connector


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {list(choices)}, got {value!r}")
