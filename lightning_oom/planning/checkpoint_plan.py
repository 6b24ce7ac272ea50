"""Which blocks to checkpoint so that a step stays in a budget, with the least recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_oom.errors import StepNotTracedError
from lightning_oom.memory.allocator import CachingAllocator
from lightning_oom.planning.checkpoint_profile import (
    StepProfile,
    profile_step,
    recomputation_costs,
)
from lightning_oom.planning.checkpoint_search import cheapest_choice, least_peak_bytes
from lightning_oom.reduction.checkpointing import install

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_oom.planning.fake_step import FakeStep
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["CheckpointPlan", "plan_checkpoints"]

_MAX_TRIES = 6
_NO_HELP = 0.01


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Blocks to checkpoint, with what a dry run says of the step.

    Attributes:
        paths: The blocks, in the order of the candidates.
        candidates: Every block that was considered and can be checkpointed.
        dropped: Blocks that cannot be: a dry run broke on them.
        budget_bytes: What was allowed; ``None`` for as little as possible.
        plain_peak_bytes: Simulated peak of the step without checkpointing.
        peak_bytes: Simulated peak with ``paths`` checkpointed.
        peak_kinds: What is held at that peak, by kind.
        recomputed_fraction: Estimated work of the recomputations over that of the plain step.
        num_dry_runs: Steps that were simulated to find the plan.
    """

    paths: tuple[str, ...]
    candidates: tuple[str, ...]
    dropped: tuple[str, ...]
    budget_bytes: int | None
    plain_peak_bytes: int
    peak_bytes: int
    peak_kinds: dict[str, int]
    recomputed_fraction: float
    num_dry_runs: int

    @property
    def is_feasible(self) -> bool:
        """Whether the simulated peak is in the budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def cannot_help(self) -> bool:
        """Whether no choice lowers the peak by 1 %: parameters, gradients and the like set it."""
        return not self.is_feasible and (self.peak_bytes > (1 - _NO_HELP) * self.plain_peak_bytes)


def plan_checkpoints(
    step: FakeStep,
    levels: Sequence[Sequence[str]],
    *,
    budget_bytes: int | None = None,
    counts_blocks: bool = False,
    **how: Any,
) -> CheckpointPlan:
    """Choose the blocks to checkpoint by simulated true peak.

    The step is simulated without checkpointing and with all blocks of a level. From the two, the
    peak of every other choice is predicted, where in the model a block stands included, and the
    cheapest one in the budget is simulated in turn; where that shows the prediction to be off, the
    search is repeated with what was learnt. "Everything" has been simulated before a budget is
    called infeasible.

    Blocks on which the simulated step breaks (a forward that cannot be repeated) are dropped, with
    those of the same place: what differs in their paths by numbers only.

    Args:
        step: The training step, as often as needed.
        levels: Paths of the candidates at each granularity, outermost first, none inside another.
        budget_bytes: The peak that is allowed; ``None`` takes all blocks of the best level.
        counts_blocks: Count bytes in blocks of a caching allocator, as ``memory_allocated`` does.
        **how: What :meth:`~lightning_oom.planning.fake_step.FakeStep.run` takes: precision,
            optimizer, accumulation.

    Returns:
        The plan. Where no choice is in the budget, the one with the lowest peak.

    Raises:
        StepNotTracedError: The step cannot be simulated at all.
        ValueError: There is no candidate.

    Note:
        Cost: 4 to 8 simulated steps a level, of 1 to 4 s each for BERT-base.

    Example:
        >>> import torch
        >>> from lightning_oom.planning.fake_step import FakeStep
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        >>> model = torch.nn.Sequential(*(block() for _ in range(4)))
        >>> step = FakeStep(model, torch.zeros(500, 4))
        >>> plan = plan_checkpoints(step, [["0", "1", "2", "3"]], budget_bytes=250_000)
        >>> plan.is_feasible, plan.plain_peak_bytes, plan.peak_bytes, plan.paths
        (True, 421212, 229212, ('0', '1', '2'))
    """
    if not any(levels):
        raise ValueError("there is no block to choose from")
    simulation = _Simulation(step, counts_blocks=counts_blocks, how=how)
    plans: list[CheckpointPlan] = []
    for paths in levels:
        planner = _LevelPlanner(simulation, paths, budget_bytes)
        plans.append(planner.plan())
        if plans[-1].is_feasible and not plans[-1].paths:
            break
    if budget_bytes is None:
        best = min(plans, key=lambda plan: plan.peak_bytes)
        # A finer level has more to keep track of: it must be worth it.
        return next(plan for plan in plans if plan.peak_bytes <= (1 + _NO_HELP) * best.peak_bytes)
    feasible = [plan for plan in plans if plan.is_feasible]
    if feasible:
        return min(feasible, key=lambda plan: plan.recomputed_fraction)
    return min(plans, key=lambda plan: plan.peak_bytes)


class _Simulation:
    """Simulates the step with choices of blocks, each one once."""

    def __init__(self, step: FakeStep, *, counts_blocks: bool, how: dict[str, Any]) -> None:
        self._step = step
        self._counts_blocks = counts_blocks
        self._how = how
        self._traces: dict[frozenset[str], MemoryTrace] = {}
        self._operators: MemoryTrace | None = None
        self._peaks: dict[frozenset[str], int] = {}
        self.num_runs = 0

    def trace(self, paths: Iterable[str]) -> MemoryTrace:
        """Simulate the step with these blocks checkpointed."""
        key = frozenset(paths)
        if key not in self._traces:
            self.num_runs += 1
            self._traces[key] = self._step.run(
                transform=lambda clone: install(clone, sorted(key)), **self._how
            )
        return self._traces[key]

    def operators(self) -> MemoryTrace:
        """Simulate one step without checkpointing and with its operators, which hold memory."""
        if self._operators is None:
            self.num_runs += 1
            self._operators = self._step.run(record_operators=True, **{**self._how, "num_steps": 1})
        return self._operators

    def peak_bytes(self, paths: Iterable[str]) -> int:
        """Return the simulated peak with these blocks checkpointed."""
        key = frozenset(paths)
        if key not in self._peaks:
            trace = self.trace(key)
            self._peaks[key] = trace.peak_bytes
            if self._counts_blocks:
                allocator = CachingAllocator()
                allocator.replay(trace.requests())
                self._peaks[key] = allocator.peak_allocated_bytes
        return self._peaks[key]

    def breaks_on(self, paths: Iterable[str]) -> bool:
        """Say whether the step breaks with these blocks checkpointed, though not without."""
        try:
            self.trace(paths)
        except StepNotTracedError:
            return True
        return False


class _LevelPlanner:
    """Plans with the blocks of one granularity."""

    def __init__(
        self, simulation: _Simulation, paths: Sequence[str], budget_bytes: int | None
    ) -> None:
        self._simulation = simulation
        self._all_paths = list(paths)
        self._budget_bytes = budget_bytes
        self._plain_bytes = simulation.peak_bytes(())
        self._paths: list[str] = []
        self._costs: tuple[float, ...] = ()
        self._total_cost = 1.0

    def plan(self) -> CheckpointPlan:
        """Return the plan of this level."""
        if self._budget_bytes is not None and self._plain_bytes <= self._budget_bytes:
            self._paths = self._all_paths
            return self._result(frozenset())
        self._paths = _usable(self._simulation, self._all_paths)
        operators = self._simulation.operators()
        self._costs, self._total_cost = recomputation_costs(operators, self._paths)
        everything = frozenset(range(len(self._paths)))
        if self._budget_bytes is None or not self._paths:
            return self._result(everything)
        plain, checkpointed = self._simulation.trace(()), self._simulation.trace(self._paths)
        profile = profile_step(plain, checkpointed, self._paths)
        tried = {everything, frozenset()}
        if profile is None:
            tried |= self._try_prefixes(self._budget_bytes)
        else:
            tried |= self._try_cheapest(profile, self._budget_bytes)
        fitting = [choice for choice in tried if self._peak(choice) <= self._budget_bytes]
        if fitting:
            return self._result(min(fitting, key=lambda choice: (self._cost(choice), len(choice))))
        return self._result(min(tried, key=lambda choice: (self._peak(choice), self._cost(choice))))

    def _try_cheapest(self, profile: StepProfile, budget_bytes: int) -> set[frozenset[int]]:
        """Search by prediction, simulate what was found, and correct the prediction by that."""
        tried: set[frozenset[int]] = set()
        allowed_bytes = budget_bytes
        for _ in range(_MAX_TRIES):
            choice = cheapest_choice(profile, self._costs, allowed_bytes)
            if choice is None:  # at least the lowest peak there is
                choice = cheapest_choice(profile, self._costs, least_peak_bytes(profile))
            if choice is None or choice in tried:
                break
            tried.add(choice)
            # What may be predicted is the budget plus what predictions are too high by.
            allowed_bytes = budget_bytes + profile.peak_bytes(choice) - self._peak(choice)
        return tried

    def _try_prefixes(self, budget_bytes: int) -> set[frozenset[int]]:
        """Where nothing can be predicted: as few of the first blocks as fit, by bisection."""
        tried = set()
        low, high = 1, len(self._paths)
        while low < high:
            middle = (low + high) // 2
            choice = frozenset(range(middle))
            tried.add(choice)
            if self._peak(choice) <= budget_bytes:
                high = middle
            else:
                low = middle + 1
        return tried

    def _peak(self, choice: frozenset[int]) -> int:
        return self._simulation.peak_bytes(self._paths[index] for index in choice)

    def _cost(self, choice: frozenset[int]) -> float:
        return sum(self._costs[index] for index in choice)

    def _result(self, choice: frozenset[int]) -> CheckpointPlan:
        paths = tuple(self._paths[index] for index in sorted(choice))
        return CheckpointPlan(
            paths=paths,
            candidates=tuple(self._paths),
            dropped=tuple(path for path in self._all_paths if path not in self._paths),
            budget_bytes=self._budget_bytes,
            plain_peak_bytes=self._plain_bytes,
            peak_bytes=self._peak(choice),
            peak_kinds=self._simulation.trace(paths).by_kind(),
            recomputed_fraction=self._cost(choice) / (self._total_cost or 1.0),
            num_dry_runs=self._simulation.num_runs,
        )


def _usable(simulation: _Simulation, paths: Sequence[str]) -> list[str]:
    """Leave out blocks on which the simulated step breaks."""
    if not simulation.breaks_on(paths):
        return list(paths)
    places: dict[str, list[str]] = {}
    for path in paths:
        place = ".".join("*" if part.isdigit() else part for part in path.split("."))
        places.setdefault(place, []).append(path)
    usable: list[str] = []
    for members in places.values():
        if not simulation.breaks_on(members[:1]) and not simulation.breaks_on([*usable, *members]):
            usable += members
        elif len(members) > 1:
            for member in members:
                if simulation.breaks_on([*usable, member]):
                    break
                usable.append(member)
    return sorted(usable, key=list(paths).index)
