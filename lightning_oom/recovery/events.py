"""What happened in steps that ran out of memory: one record per batch, one summary per run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from lightning_oom.recovery.batches import BatchSignature
    from lightning_oom.recovery.plan import AttemptPlan, Failure

__all__ = ["RecoverySummary", "StepOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One batch that ran out of memory at least once.

    Attributes:
        rows: Rows of the batch; ``None`` when it has none.
        signature: Its structure, dtypes and shapes; ``None`` when it has no rows.
        failures: The attempts that ran out of memory, oldest first; never empty.
        plan: The attempt that worked; ``None`` when none did.
        recovered: Whether the step ended as if memory had sufficed.
        skipped: Whether the batch was left out of the training.
        declined: Rung -> why it had nothing (more) to offer.
        stage: ``"train"``, ``"validation"``, ``"test"`` or ``"predict"``.
    """

    rows: int | None
    signature: BatchSignature | None
    failures: tuple[Failure, ...]
    plan: AttemptPlan | None
    recovered: bool
    skipped: bool = False
    declined: dict[str, str] = field(default_factory=dict)
    stage: str = "train"

    @property
    def num_attempts(self) -> int:
        """Attempts in all, the successful one included."""
        return len(self.failures) + (1 if self.recovered else 0)

    @property
    def wasted_seconds(self) -> float:
        """Time that went into attempts which failed, their rollback and cleaning included."""
        return sum(failure.seconds for failure in self.failures)

    def describe_batch(self) -> str:
        """Return rows and shapes for people: ``"32 rows of (512,)"``; never values."""
        if self.rows is None:
            return "a batch without rows"
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        shapes = list(dict.fromkeys(self.signature.shapes)) if self.signature is not None else []
        shown = ", ".join(str(tuple(shape)) for shape in shapes[:3])
        return f"{rows} of {shown}{', ...' if len(shapes) > 3 else ''}" if shown else rows  # noqa: PLR2004 - three fit a line

    def describe_request(self) -> str:
        """Return what was asked for and what there was: ``"asked for 2.00 MiB of 64.00 MiB"``."""
        cause = self.failures[0].cause
        if cause.requested_bytes is None:
            return _shorten(cause.message, 120)
        text = f"asked for {format_bytes(cause.requested_bytes)}"
        if cause.free_bytes is not None:
            text += f" with {format_bytes(cause.free_bytes)} free"
        return text if cause.limit_bytes is None else f"{text} of {format_bytes(cause.limit_bytes)}"

    def describe_attempts(self) -> str:
        """Return the failed attempts with their phases: ``"whole (backward), release (forward)"``."""
        return ", ".join(f"{f.plan.describe()} ({f.phase})" for f in self.failures)

    def line(self) -> str:
        """Return the one console line for this batch."""
        head = f"out of memory with {self.describe_batch()}: {self.describe_request()}"
        if self.recovered and self.plan is not None:
            done = f"recovered by {self.plan.describe()}"
            done += "" if self.plan.exact else " (not the same numbers)"
        elif self.skipped:
            done = "batch skipped"
        else:
            done = "not recovered"
        return (
            f"{head}; failed: {self.describe_attempts()}; {done} ({self.wasted_seconds:.2f} s lost)"
        )

    def note(self, *, raised_by: AttemptPlan | None = None) -> str:
        """Return the note that is attached to an error that could not be recovered from.

        Args:
            raised_by: The retry that raised an error of another kind; ``None`` for an
                out-of-memory error.
        """
        lines = [
            f"lightning_oom: {self.describe_batch()} ran out of memory and could not be saved.",
            f"  tried: {self.describe_attempts()}",
        ]
        lines += [f"  {rung}: {reason}" for rung, reason in self.declined.items()]
        if raised_by is not None:
            lines.append(f"  {raised_by.describe()}: raised this error, which is none of memory")
        if len(self.failures) > 1 or raised_by is not None:
            lines.append(f"  first error: {_shorten(self.failures[0].cause.message)}")
        return "\n".join(lines)


def _shorten(message: str, length: int = 400) -> str:
    first = message.splitlines()[0]
    return first if len(first) <= length else f"{first[: length - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySummary:
    """What a callback has seen since it was made; all counts are of this rank.

    Attributes:
        num_oom: Batches that ran out of memory.
        num_recovered: Of these, batches that ended as if memory had sufficed.
        num_skipped: Batches left out (``on_unrecoverable="skip"``).
        num_failed_attempts: Attempts that ran out of memory.
        num_optimizer: Optimizer steps that ran out of memory and were finished.
        wasted_seconds: Time spent on failed attempts, rollback and cleaning.
        fewest_rows: Fewest rows that had to run together; ``None`` when nothing was split.
        skipped: One line for each batch that was left out.
    """

    num_oom: int = 0
    num_recovered: int = 0
    num_skipped: int = 0
    num_failed_attempts: int = 0
    num_optimizer: int = 0
    wasted_seconds: float = 0.0
    fewest_rows: int | None = None
    skipped: tuple[str, ...] = ()

    def after(self, outcome: StepOutcome) -> RecoverySummary:
        """Return the summary with one more batch in it."""
        rows = outcome.plan.rows_together if outcome.plan is not None else None
        known = [r for r in (self.fewest_rows, rows) if r is not None]
        return RecoverySummary(
            num_oom=self.num_oom + 1,
            num_recovered=self.num_recovered + outcome.recovered,
            num_skipped=self.num_skipped + outcome.skipped,
            num_failed_attempts=self.num_failed_attempts + len(outcome.failures),
            num_optimizer=self.num_optimizer,
            wasted_seconds=self.wasted_seconds + outcome.wasted_seconds,
            fewest_rows=min(known) if known else None,
            skipped=(*self.skipped, outcome.line()) if outcome.skipped else self.skipped,
        )

    def final_lines(self) -> list[str]:
        """Return what to print at the end of a run: counts, and what to write into the config."""
        if not self.num_oom and not self.num_optimizer:
            return []
        lines = [
            (
                f"OOMRecovery: {self.num_oom} batch{'' if self.num_oom == 1 else 'es'} ran out of "
                f"memory, {self.num_recovered} recovered, {self.num_skipped} skipped; "
                f"{self.num_failed_attempts} failed attempts, {self.wasted_seconds:.1f} s lost."
            )
        ]
        if self.fewest_rows is not None:
            lines.append(
                "To start the next run where this one ended: OOMRecovery(max_rows="
                f"{self.fewest_rows}), or a batch size of {self.fewest_rows} with "
                "accumulate_grad_batches raised by as much."
            )
        return lines
