"""Rungs that keep the batch whole and lower what its step holds: checkpointing, offload, autocast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.plan import AttemptPlan, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["HoldingPolicy", "HoldingRung", "plan_again"]

_USES_BEFORE_A_PLAIN_TRY = 100


class HoldingRung:
    """Run the batch whole while an engine lowers what the step holds.

    When that is not enough, the rungs of this kind that stand before it are used as well from the
    start, and a batch that may be split is split below them, into halves, quarters and so on.

    Args:
        name: The word for it in ``ladder=[...]``.
        open_context: Makes the context manager that is entered around an attempt.
        unavailable: Says why it cannot be used here, or ``None``; asked before each use.
        exact: Whether the step computes the same with it, up to rounding.
        before: Rungs of this kind that stand earlier in the ladder.
    """

    def __init__(
        self,
        name: str,
        open_context: Callable[[], AbstractContextManager[Any]],
        *,
        unavailable: Callable[[], str | None],
        exact: bool = True,
        before: Sequence[HoldingRung] = (),
    ) -> None:
        self.name = name
        self.open_context = open_context
        self.unavailable = unavailable
        self.exact = exact
        self.before = tuple(before)

    def next_plan(self, trial: Trial) -> AttemptPlan | None:
        """Return the whole batch with the engine on, then ever smaller micro-batches with it."""
        tried = [f.plan for f in trial.failures if self.name in f.plan.holding[-1:]]
        reason = (
            self.unavailable() if trial.keeps_graph else "this stage keeps nothing for backward"
        )
        if reason is not None:
            trial.decline(self.name, reason)
            return None
        if not tried:
            return self.plan()
        rows = min((plan.rows_together or trial.rows or 1) for plan in tried) // 2
        if rows < 1 or not trial.can_split or trial.split_refused is not None or trial.rows is None:
            trial.decline(self.name, "was not enough")
            return None
        verdict = trial.separability()
        if not verdict.separable:
            trial.decline(
                self.name, f"was not enough, and the batch is not split: {verdict.reason}"
            )
            return None
        return self.plan(rows_together=rows)

    def plan(self, rows_together: int | None = None) -> AttemptPlan:
        """Return an attempt with this engine, and those before it that can be used, switched on."""
        used = [*(rung for rung in self.before if rung.unavailable() is None), self]
        return AttemptPlan(
            rung=self.name,
            mode="whole" if rows_together is None else "split",
            rows_together=rows_together,
            contexts=tuple(rung.open_context for rung in used),
            holding=tuple(rung.name for rung in used),
            exact=all(rung.exact for rung in used),
        )


@dataclass(slots=True)
class HoldingPolicy:
    """Remembers from which size on batches fitted only with such a rung.

    Sizes are elements of the batch. After 100 uses the plain step is tried once more, since another
    process may have given memory back; the pause doubles each time that fails.

    Attributes:
        needs: Smallest known size -> the last rung that was used, and the rows per micro-batch
            (``None``: whole).

    Example:
        >>> policy = HoldingPolicy()
        >>> policy.learn(4096, "checkpoint", None)
        >>> policy.propose(1024), policy.propose(8192)
        (None, ('checkpoint', None))
    """

    needs: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    _uses: int = 0
    _pause: int = _USES_BEFORE_A_PLAIN_TRY

    def propose(self, num_elements: int) -> tuple[str, int | None] | None:
        """Return rung and rows to start with, ``None`` for the plain step."""
        known = [size for size in self.needs if size <= num_elements]
        if not known:
            return None
        self._uses += 1
        if self._uses > self._pause:
            self._uses, self._pause = 0, self._pause * 2
            return None
        return self.needs[max(known)]

    def learn(self, num_elements: int, rung: str, rows_together: int | None) -> None:
        """Note that a batch of this size fitted only in this way."""
        self.needs[num_elements] = (rung, rows_together)

    def forget(self, num_elements: int) -> None:
        """Note that a batch of this size has fitted without."""
        if self.needs:
            self.needs = {size: need for size, need in self.needs.items() if size > num_elements}

    def state_dict(self) -> list[list[Any]]:
        """Return plain data."""
        return [[size, rung, rows] for size, (rung, rows) in sorted(self.needs.items())]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Take over what an earlier run has learnt."""
        self.needs = {int(size): (str(rung), rows) for size, rung, rows in state}


def plan_again(policy: HoldingPolicy, rungs: Sequence[Any], trial: Trial) -> AttemptPlan | None:
    """Return the attempt that a batch of this size needed before, ``None`` for the plain step."""
    if not policy.needs or trial.num_elements is None or not trial.keeps_graph:
        return None
    need = policy.propose(trial.num_elements)
    if need is None:
        return None
    name, rows = need
    for rung in rungs:
        if isinstance(rung, HoldingRung) and rung.name == name and rung.unavailable() is None:
            return rung.plan(None if rows is None or rows >= (trial.rows or 1) else rows)
    return None
