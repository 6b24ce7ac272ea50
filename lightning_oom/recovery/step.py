"""The guarded step: attempts as transactions, with a rollback between them.

The engine knows no trainer. It gets a :class:`Program` that can run a batch whole or in parts, a
snapshot that can put everything back that an attempt may change, a ladder of remedies and a policy
that foresees how many rows fit. It returns what the unbroken step would have returned, or raises
the error of the last attempt, with a note that says what was tried.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from lightning_oom.errors import BatchSplitError, NotSeparableError, add_note
from lightning_oom.memory import read_memory, release_cached
from lightning_oom.recovery.batches import count_rows, describe_batch
from lightning_oom.recovery.batches.part_rows import rows_of_parts
from lightning_oom.recovery.classify import OOMCause, classify_oom
from lightning_oom.recovery.cleanup import clear_frames, collect_garbage
from lightning_oom.recovery.events import StepOutcome
from lightning_oom.recovery.learning import RowsLearning
from lightning_oom.recovery.opening import Opening
from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial
from lightning_oom.recovery.slice_questions import SliceQuestions
from lightning_oom.recovery.snapshot.compose import SavedSnapshot, Snapshot
from lightning_oom.recovery.taking import take_patiently

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lightning_oom.memory import MemoryReading
    from lightning_oom.recovery.chunked.chunk_gain import ChunkGain
    from lightning_oom.recovery.knowledge import RowsPolicies
    from lightning_oom.recovery.ladder import Ladder
    from lightning_oom.recovery.separability import Separability
    from lightning_oom.recovery.snapshot.part import Part

__all__ = ["GuardedStep", "Program"]

_LOST = (
    "before this batch was split, its step was tried on a few rows, and that changed {} for good: "
    "the step may not be split (max_rows, or rows learnt from a checkpoint) unless it leaves that "
    "to on_train_batch_end"
)


class Program(Protocol):
    """One batch's work, without saying where it comes from.

    Attributes:
        batch: The batch as it was handed over.
        phase: What is running now: ``"forward"``, ``"backward"``, ...; read when it fails.
        stage: ``"train"``, ``"validation"``, ``"test"`` or ``"predict"``.
        can_split: Whether :meth:`run_parts` is possible.
        can_chunk: Whether :meth:`chunked` is possible.
        prior_failure: The batch could not be moved to the device; it is still on the host.
    """

    batch: Any
    phase: str
    stage: str
    can_split: bool
    can_chunk: bool

    prior_failure: Failure | None

    def parts(self) -> Sequence[Part]:
        """Return what this batch alone can change, beside what the run's snapshot holds."""

    def begin(self, saved: SavedSnapshot) -> None:
        """Called once before the first attempt, with everything as it stands."""

    def run_whole(self, *, attempt: int) -> Any:
        """Run the batch as the user wrote it; from attempt 2 on, from restored containers."""

    def run_parts(self, rows_together: int) -> Any:
        """Run the batch in micro-batches and return what the whole would have returned."""

    def chunked(self, rows: int, rows_together: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which :meth:`run_whole` chunks the module's children."""

    def reset(self) -> tuple[str, ...]:
        """After the rollback of a failed attempt: gradients; return what could not be put back."""

    def gradients_droppable(self) -> bool:
        """Return whether a retry starts with less memory because old gradients go first."""

    def check_separability(self, *, whole_failed: bool) -> Separability:
        """Compare gradients of a small slice with those of its parts."""

    def estimate_chunk_gain(self) -> ChunkGain | None:
        """Count, on a small slice, what chunks would save; ``None`` where it cannot be known."""

    def give_up(self) -> Any:
        """Return what stands for a batch that was left out."""

    def succeed(self) -> None:
        """Called once after the attempt that worked."""

    def learn(self, trial: Trial, plan: AttemptPlan) -> None:
        """Called after :meth:`succeed` when earlier attempts had failed."""


class GuardedStep:
    """Runs programs one after another and learns from what happens.

    Args:
        device: Where the step runs; its counters are read after a failure.
        parts: What every attempt may change; each is taken before the first attempt.
        ladder: What to try after a failure.
        policies: How many rows to run together.
        split_fn: The user's way to cut a batch, or ``None``.
        max_rows: Upper bound on rows that run together, or ``None``.
        split_inseparable: Split also where the gradients of the parts do not add up.
        on_unrecoverable: ``"raise"`` or ``"skip"``.
        report: Called with one :class:`StepOutcome` per batch that ran out of memory.
        observe: Called with each error and its facts before anything of it is freed.

    Note:
        Cost without an OOM: the snapshot, one description of the batch and one look at the policy.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        parts: Sequence[Part],
        ladder: Ladder,
        policies: RowsPolicies,
        report: Callable[[StepOutcome], None],
        observe: Callable[[Exception, Failure], None] | None = None,
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        max_rows: int | None = None,
        split_inseparable: bool = False,
        on_unrecoverable: str = "raise",
    ) -> None:
        self.device = device
        self.parts = tuple(parts)
        self.ladder = ladder
        self.policies = policies
        self.report = report
        self.observe = observe
        self.split_fn = split_fn
        self.opening = Opening(
            ladder, policies, max_rows=max_rows, split_inseparable=split_inseparable
        )
        self.on_unrecoverable = on_unrecoverable
        self.questions = SliceQuestions(classify=self._recoverable, release=self._release)
        self.learning = RowsLearning(policies, device=device, read=self._read)

    # -- one step
    def run(self, program: Program) -> Any:
        """Run one batch, whatever it takes.

        Returns:
            What the unbroken program returns.

        Raises:
            Exception: The last attempt's error when no remedy is left, unwrapped, with a note.
            BatchSplitError: A split is needed and the batch cannot be cut; the OOM is its cause.
        """
        taken = self._take(program)
        saved: SavedSnapshot | None = taken
        program.begin(taken)
        trial = self._open(program, taken)
        del taken
        plan: AttemptPlan | None = self.opening.plan(program.prior_failure, trial)
        if self.questions.lost:
            raise NotSeparableError(_LOST.format(", ".join(self.questions.lost)))
        error: Exception | None = None
        while plan is not None and saved is not None:
            started = time.perf_counter()
            failure: Failure | None = None
            try:
                result = self._attempt(program, plan, trial)
            except Exception as caught:
                failure = self._failure(program, plan, caught)
                if failure is None:
                    self._note_other_error(program, trial, plan, caught)
                    raise
                self._observe(caught, failure)
                clear_frames(caught)
                error = caught
            if failure is None:
                self._close(program, trial, plan, saved)
                return result
            plan = self._after_failure(program, trial, saved, failure, started)
            if plan is not None:
                error = None
        try:
            if error is None or self._may_skip(trial):
                return self._skip(program, trial)
            raise self._final_error(program, trial, error)
        finally:
            error = saved = None

    def _failure(self, program: Program, plan: AttemptPlan, error: Exception) -> Failure | None:
        cause = self._recoverable(error)
        if cause is None:
            return None
        return Failure(
            plan=plan, cause=cause, phase=program.phase, seconds=0.0, reading=self._read()
        )

    def _note_other_error(
        self, program: Program, trial: Trial, plan: AttemptPlan, error: Exception
    ) -> None:
        """Say of an error of another kind that the batch ran in another way than the user's."""
        if not trial.failures:
            if plan.mode != "whole":
                add_note(error, f"lightning_oom: raised while the batch ran as {plan.describe()}.")
            return
        outcome = self._outcome(program, trial, plan=None, recovered=False)
        with contextlib.suppress(Exception):  # a failing report never hides the error
            self.report(outcome)
        add_note(error, outcome.note(raised_by=plan))

    def _observe(self, error: Exception, failure: Failure) -> None:
        if self.observe is not None:
            with contextlib.suppress(Exception):  # an observer's failure never hides the OOM
                self.observe(error, failure)

    def _after_failure(
        self, program: Program, trial: Trial, saved: SavedSnapshot, failure: Failure, started: float
    ) -> AttemptPlan | None:
        trial.gradients_droppable = program.gradients_droppable()
        trial.can_chunk = trial.can_chunk and program.can_chunk
        lost = (*saved.restore(), *program.reset())
        garbage = self._release()
        seconds = time.perf_counter() - started
        trial.failures.append(replace(failure, seconds=seconds, garbage_bytes=garbage))
        if trial.rows is None and self.split_fn is not None:
            trial.rows = rows_of_parts([program.batch], self.split_fn)[0]
        if lost:
            trial.decline("rollback", f"could not be put back: {', '.join(lost)}")
            return None
        plan = self.ladder.next_plan(trial)
        if self.questions.lost:
            changed = ", ".join(self.questions.lost)
            trial.decline("rollback", f"a trial on a few rows changed for good: {changed}")
            return None
        return plan

    def _may_skip(self, trial: Trial) -> bool:
        return self.on_unrecoverable == "skip" and "rollback" not in trial.declined

    def _skip(self, program: Program, trial: Trial) -> Any:
        self.report(self._outcome(program, trial, plan=None, recovered=False, skipped=True))
        return program.give_up()

    def _final_error(self, program: Program, trial: Trial, error: Exception) -> Exception:
        outcome = self._outcome(program, trial, plan=None, recovered=False)
        with contextlib.suppress(Exception):  # a failing report never hides the OOM
            self.report(outcome)
        if trial.split_refused is not None and trial.declined.get("split") == trial.split_refused:
            refused = BatchSplitError(trial.split_refused)
            refused.__cause__ = error
            return refused
        add_note(error, outcome.note())
        return error

    # -- pieces
    def _take(self, program: Program) -> SavedSnapshot:
        return take_patiently(
            Snapshot([*self.parts, *program.parts()]),
            classify=self._recoverable,
            release=self._release,
        )

    def _open(self, program: Program, saved: SavedSnapshot) -> Trial:
        rows = refused = signature = None
        try:
            rows = count_rows(program.batch)
            if rows is not None:
                signature = describe_batch(program.batch)
        except BatchSplitError as error:
            refused = str(error)
        learning = self.learning
        failures: list[Failure] = []
        return Trial(
            rows=rows,
            signature=signature,
            split_refused=refused if self.split_fn is None else None,
            can_split=program.can_split,
            can_chunk=program.can_chunk,
            keeps_graph=program.stage == "train",
            failures=failures,
            separability=lambda: self.questions.separability(
                program, signature, saved, whole_failed=bool(failures)
            ),
            chunk_gain=lambda: self.questions.chunk_gain(program, signature, saved),
            propose=lambda mode: learning.propose(mode, signature, rows),
            shrink=lambda mode, failed: learning.shrink(mode, signature, rows, failed),
        )

    def _attempt(self, program: Program, plan: AttemptPlan, trial: Trial) -> Any:
        attempt = len(trial.failures) + 1
        with contextlib.ExitStack() as stack:
            for context in plan.contexts:
                stack.enter_context(context())
            self.learning.before_attempt()
            if plan.mode == "split" and plan.rows_together is not None:
                return program.run_parts(plan.rows_together)
            if plan.mode == "chunk" and plan.rows_together is not None and trial.rows is not None:
                stack.enter_context(program.chunked(trial.rows, plan.rows_together))
            return program.run_whole(attempt=attempt)

    def _recoverable(self, error: Exception) -> OOMCause | None:
        cause = classify_oom(error)
        if cause is None or not cause.recoverable_on(self.device.type):
            return None
        return cause

    def _read(self) -> MemoryReading | None:
        try:
            return read_memory(self.device)
        except Exception:
            return None

    def _release(self) -> int | None:
        """Collect garbage, empty the cache; return what the collector freed."""
        before = self._read()
        collect_garbage()
        after = self._read()
        release_cached(self.device)
        if before is None or after is None:
            return None
        if before.allocated_bytes is None or after.allocated_bytes is None:
            return None
        self.learning.note_base(after)
        return max(0, before.allocated_bytes - after.allocated_bytes)

    def _close(
        self, program: Program, trial: Trial, plan: AttemptPlan, saved: SavedSnapshot
    ) -> None:
        program.succeed()
        if plan.mode == "whole":
            saved.learn()
        self.learning.after_success(trial, plan)
        if trial.failures:
            program.learn(trial, plan)
            self.report(self._outcome(program, trial, plan=plan, recovered=True))

    def _outcome(
        self,
        program: Program,
        trial: Trial,
        *,
        plan: AttemptPlan | None,
        recovered: bool,
        skipped: bool = False,
    ) -> StepOutcome:
        return StepOutcome(
            rows=trial.rows,
            signature=trial.signature,
            failures=tuple(trial.failures),
            plan=plan,
            recovered=recovered,
            skipped=skipped,
            declined=dict(trial.declined),
            stage=program.stage,
        )
