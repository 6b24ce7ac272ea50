"""Choices of blocks to checkpoint, from few to all, whatever the limit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.checkpoint_plan import plan_checkpoints
from lightning_oom.planning.checkpoint_profile import profile_step, recomputation_costs
from lightning_oom.planning.checkpoint_search import cheapest_choice, least_peak_bytes
from lightning_oom.reduction.checkpointing import install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_oom.planning.fake_step import FakeStep
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["choices_of_blocks"]

_NUM_BUDGETS = 12


def choices_of_blocks(
    step: FakeStep, operators: MemoryTrace, paths: Sequence[str], **how: Any
) -> list[tuple[str, ...]]:
    """Return the cheapest choices of blocks for peaks from the plain one down to the lowest.

    They depend on the step alone, not on a limit: plans that choose among them are monotone in it.
    Peaks are predicted here (:class:`~lightning_oom.planning.checkpoint_profile.StepProfile`); each
    choice is to be run before it is relied upon.

    Args:
        step: The training step.
        operators: One step of it with its operators, for what blocks cost.
        paths: The candidates, none inside another.
        **how: What :meth:`~lightning_oom.planning.fake_step.FakeStep.run` takes.

    Returns:
        Up to 13 choices, those with less recomputation first, all blocks last; none where no block
        can be checkpointed.

    Note:
        Cost: two dry runs, more where a block cannot be checkpointed.
    """
    plain = step.run(**how)
    try:
        everything = step.run(**how, transform=partial(install, paths=paths))
    except StepNotTracedError:
        paths = plan_checkpoints(step, [paths], **how).paths
        if not paths:
            return []
        everything = step.run(**how, transform=partial(install, paths=paths))
    costs, _ = recomputation_costs(operators, paths)
    profile = profile_step(plain, everything, paths)
    chosen: set[frozenset[int]] = {frozenset(range(len(paths)))}
    if profile is None:
        chosen |= set(_prefixes(len(paths)))
    else:
        low, high = least_peak_bytes(profile), profile.peak_bytes(())
        for number in range(_NUM_BUDGETS):
            budget = low + (high - low) * number // _NUM_BUDGETS
            choice = cheapest_choice(profile, costs, budget)
            chosen |= {choice} if choice else set()
    ordered = sorted(chosen, key=lambda choice: (sum(costs[i] for i in choice), sorted(choice)))
    return [tuple(paths[index] for index in sorted(choice)) for choice in ordered]


def _prefixes(num_blocks: int) -> Iterator[frozenset[int]]:
    """Give the first blocks, in as many steps as there are budgets."""
    for number in range(1, _NUM_BUDGETS):
        yield frozenset(range(max(num_blocks * number // _NUM_BUDGETS, 1)))
