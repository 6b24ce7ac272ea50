"""How a batch is tried first: as the user wrote it, unless more is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.recovery.holding import plan_again
from lightning_oom.recovery.plan import AttemptPlan, Failure, Trial

if TYPE_CHECKING:
    from lightning_oom.recovery.knowledge import RowsPolicies
    from lightning_oom.recovery.ladder import Ladder

__all__ = ["Opening"]


class Opening:
    """Chooses the first attempt at a batch.

    Args:
        ladder: Its rungs are asked when the batch has failed already, on its way to the device.
        policies: What is known of rows and sizes.
        max_rows: Upper bound on rows that run together, or ``None``.
        split_inseparable: Split also where the gradients of the parts do not add up.
    """

    def __init__(
        self,
        ladder: Ladder,
        policies: RowsPolicies,
        *,
        max_rows: int | None,
        split_inseparable: bool,
    ) -> None:
        self.ladder = ladder
        self.policies = policies
        self.max_rows = max_rows
        self.split_inseparable = split_inseparable

    def plan(self, prior_failure: Failure | None, trial: Trial) -> AttemptPlan:
        """Return the first attempt; the whole batch when nothing speaks against it."""
        if prior_failure is not None:
            trial.failures.append(prior_failure)
            return self.ladder.next_plan(trial) or AttemptPlan()
        again = plan_again(self.policies.holding, self.ladder.rungs, trial)
        if again is not None:
            return again
        rows = trial.rows
        if rows is None or rows < 2 or trial.signature is None:  # noqa: PLR2004 - nothing to cut
            return AttemptPlan()
        together = rows if self.max_rows is None else min(rows, self.max_rows)
        together = min(together, trial.propose("split"))
        if together >= rows:
            return AttemptPlan()
        return self._in_parts(trial, together)

    def _in_parts(self, trial: Trial, together: int) -> AttemptPlan:
        mode = self.policies.preferred
        if mode == "chunk" and trial.can_chunk:
            rows = min(trial.propose("chunk"), self.max_rows or trial.rows or 1)
            if trial.rows is not None and rows < trial.rows:
                return AttemptPlan(rung="chunk", mode="chunk", rows_together=rows)
            return AttemptPlan()
        if not trial.can_split or trial.split_refused is not None:
            return AttemptPlan()
        verdict = trial.separability()
        if not verdict.separable and not self.split_inseparable:
            return AttemptPlan()
        return AttemptPlan(
            rung="split", mode="split", rows_together=together, exact=verdict.separable
        )
