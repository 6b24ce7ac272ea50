"""What to try after an attempt ran out of memory: exact remedies first.

A rung is anything with a name and :meth:`Rung.next_plan`. The ladder asks its rungs in order; a rung
is asked again after each failure of its own until it declines, then the next one gets its turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lightning_oom.recovery.plan import AttemptPlan, Mode, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ChunkRung", "Ladder", "ReleaseRung", "Rung", "SplitRung"]


class Rung(Protocol):
    """One remedy.

    Attributes:
        name: The word that users write into ``ladder=[...]`` and read in reports.
    """

    name: str

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return the next attempt, or ``None`` after :meth:`Trial.decline` when there is none."""


class Ladder:
    """Rungs in the order in which they are tried.

    Args:
        rungs: At least one; names must differ.

    Raises:
        ValueError: No rung, or two of the same name.
    """

    def __init__(self, rungs: Sequence[Rung]) -> None:
        names = [rung.name for rung in rungs]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a ladder needs one or more rungs of different names, got {names}")
        self.rungs = tuple(rungs)

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return what to try next, or ``None`` when every rung has declined.

        An error that is only *likely* an OOM gets one smaller attempt (or, where the batch cannot
        be made smaller, one equal attempt) and no second one.
        """
        likely = trial.last.cause.confidence == "likely"
        if likely and len(trial.failures) > 1:
            trial.decline("ladder", "an ambiguous error came back after one more attempt")
            return None
        rungs = (
            sorted(self.rungs, key=lambda rung: rung.name == "release") if likely else self.rungs
        )
        for rung in rungs:
            if rung.name in trial.declined:
                continue
            plan = rung.next_plan(trial)
            if plan is not None:
                return plan
            trial.declined.setdefault(rung.name, "had nothing to offer")
        return None


class ReleaseRung:
    """Try the same again, with caches empty and old gradients dropped before the forward.

    Bit-equal to the unbroken step. Declines where the counters show that nothing was freed and
    that what the device still had was less than what was asked for: the attempt would fail alike.
    """

    name = "release"

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return the failed plan again, once."""
        if any(failure.plan.rung == self.name for failure in trial.failures):
            trial.decline(self.name, "the same attempt failed again with caches empty")
            return None
        if _is_hopeless(trial):
            trial.decline(self.name, "nothing could be freed")
            return None
        return replace(trial.last.plan, rung=self.name)


def _is_hopeless(trial: Trial) -> bool:
    failure = trial.last
    reading = failure.reading
    if trial.gradients_droppable or failure.garbage_bytes is None or failure.garbage_bytes > 0:
        return False
    if reading is None or reading.allocated_bytes is None or reading.limit_bytes is None:
        return False
    requested = failure.cause.requested_bytes
    return requested is not None and requested > reading.limit_bytes - reading.allocated_bytes


class ChunkRung:
    """Run the module's children row-chunk by row-chunk; loss, logs and metrics see the whole batch.

    Args:
        num_tries: Sizes tried before declining: what the policy proposes, then ever a quarter.
        most_kept_fraction: Chunks are not tried where even chunks of one row would keep more than
            this fraction, in (0, 1], of what the step keeps for its backward.
    """

    name = "chunk"

    def __init__(self, *, num_tries: int = 4, most_kept_fraction: float = 0.6) -> None:
        self.num_tries = num_tries
        self.most_kept_fraction = most_kept_fraction

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return a chunked attempt with fewer rows per chunk than before."""
        tried = len({f.plan.rows_together for f in trial.failures if f.plan.mode == "chunk"})
        if not trial.can_chunk:
            trial.decline(self.name, "no child of the module can be run in chunks")
        elif trial.rows is None or trial.rows < 2:  # noqa: PLR2004 - two rows make a chunk possible
            trial.decline(self.name, "the batch has fewer than two rows")
        elif tried >= self.num_tries:
            trial.decline(self.name, "chunks did not lower the peak enough")
        elif not tried and (kept := self._kept(trial)) > self.most_kept_fraction:
            trial.decline(self.name, f"chunks of one row would keep {kept:.0%} of the activations")
        else:
            rows = self._fewer(trial)
            if rows is not None:
                return AttemptPlan(rung=self.name, mode="chunk", rows_together=rows)
            trial.decline(self.name, "chunks of one row do not fit")
        return None

    @staticmethod
    def _fewer(trial: Trial) -> int | None:
        failed = trial.failed_rows("chunk")
        if failed is None:
            return _smaller(trial, "chunk")
        return max(1, failed // 4) if failed > 1 else None

    @staticmethod
    def _kept(trial: Trial) -> float:
        gain = trial.chunk_gain()
        return 0.0 if gain is None or trial.rows is None else gain.kept_fraction(trial.rows, 1)


class SplitRung:
    """Run the batch as micro-batches and weight their losses so that the gradient is the batch's.

    Args:
        split_inseparable: Split also where the gradients of the parts do not add up to those of
            the whole. Otherwise the rung declines there and says by how much they differ.
        on_inseparable: Called with the reason, before an inseparable step is split.
    """

    name = "split"

    def __init__(
        self,
        *,
        split_inseparable: bool = False,
        on_inseparable: Callable[[str], None] | None = None,
    ) -> None:
        self.split_inseparable = split_inseparable
        self.on_inseparable = on_inseparable

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return a split attempt with fewer rows per micro-batch than before."""
        if not trial.can_split:
            trial.decline(self.name, "this step cannot be split")
        elif trial.split_refused is not None:
            trial.decline(self.name, trial.split_refused)
        elif trial.rows is None:
            trial.decline(self.name, "the batch has no rows")
        elif trial.rows < 2:  # noqa: PLR2004 - two rows make a split possible
            trial.decline(self.name, "the batch has one row")
        else:
            return self._split(trial)
        return None

    def _split(self, trial: Trial) -> AttemptPlan | None:
        rows = _smaller(trial, "split")
        if rows is None:
            trial.decline(self.name, "a single row does not fit")
            return None
        verdict = trial.separability()
        if not verdict.separable:
            if not self.split_inseparable:
                trial.decline(self.name, verdict.reason)
                return None
            if self.on_inseparable is not None:
                self.on_inseparable(verdict.reason)
        return AttemptPlan(
            rung=self.name, mode="split", rows_together=rows, exact=verdict.separable
        )


def _smaller(trial: Trial, mode: Mode) -> int | None:
    """Return fewer rows than failed: the policy's choice at first, then ever smaller ones."""
    failed = trial.failed_rows(mode)
    if failed is not None:
        return trial.shrink(mode, failed)
    rows = trial.rows or 1
    proposed = trial.propose(mode)
    return proposed if proposed < rows else trial.shrink(mode, rows)
