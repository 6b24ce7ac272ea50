"""Plans stay in their budget by simulated peak, and no cheaper choice of blocks does."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.checkpoint_plan import plan_checkpoints
from lightning_oom.planning.checkpoint_profile import (
    BlockCall,
    StepProfile,
    profile_step,
    recomputation_costs,
)
from lightning_oom.planning.checkpoint_search import cheapest_choice, least_peak_bytes
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.reduction.checkpointing import install


class Stack(nn.Module):
    """Blocks of several widths, one after another."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths
        )

    def forward(self, x):
        """The loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def paths_of(model: Stack) -> list[str]:
    """Names of the blocks."""
    return [f"blocks.{index}" for index in range(len(model.blocks))]


def random_profile(draw: random.Random, blocks: int, calls: int) -> StepProfile:
    """A profile whose blocks differ in all that matters."""
    order = [*range(blocks), *draw.choices(range(blocks), k=calls - blocks)]
    return StepProfile(
        calls=tuple(
            BlockCall(
                block=block,
                kept_bytes=draw.randint(1, 100),
                plain_bytes=draw.randint(50, 250),
                checkpointed_bytes=draw.randint(50, 250),
            )
            for block in order
        ),
        between_bytes=tuple(draw.randint(0, 200) for _ in range(calls + 1)),
        fixed_bytes=60,
    )


@pytest.mark.parametrize(("blocks", "calls"), [(8, 8), (12, 12), (5, 8)])
def test_the_search_is_exact(blocks: int, calls: int) -> None:
    """For any budget it finds what looking at every choice finds; repeated blocks included."""
    draw = random.Random(blocks + calls)  # noqa: S311 - not for secrets
    for _ in range(3):
        profile = random_profile(draw, blocks, calls)
        costs = [draw.uniform(1, 10) for _ in range(blocks)]
        choices = [
            (profile.peak_bytes(choice), sum(costs[index] for index in choice))
            for size in range(blocks + 1)
            for choice in itertools.combinations(range(blocks), size)
        ]
        lowest, highest = min(peak for peak, _ in choices), max(peak for peak, _ in choices)
        for budget_bytes in (lowest - 1, lowest, (2 * lowest + highest) // 3, highest):
            found = cheapest_choice(profile, costs, budget_bytes)
            fitting = [cost for peak, cost in choices if peak <= budget_bytes]
            if not fitting:
                assert found is None
                continue
            assert profile.peak_bytes(found) <= budget_bytes
            assert sum(costs[index] for index in found) == pytest.approx(min(fitting))
        assert least_peak_bytes(profile) == pytest.approx(lowest, abs=1)


def test_predicted_peaks_are_the_simulated_ones() -> None:
    """For every choice of the blocks, from two simulated steps."""
    model = Stack(8, 64, 16, 40)
    step, paths = FakeStep(model, torch.zeros(100, 4)), paths_of(model)

    def run(chosen):
        return step.run(transform=lambda clone: install(clone, chosen), optimizer=torch.optim.SGD)

    profile = profile_step(run([]), run(paths), paths)
    for choice in [(0,), (3,), (1, 2), (0, 1, 3), (1, 2, 3)]:
        assert profile.peak_bytes(choice) == run([paths[index] for index in choice]).peak_bytes


def test_a_late_block_is_not_the_same_as_an_early_one() -> None:
    """It recomputes while all that the others keep is there: the first blocks are taken."""
    model = Stack(64, 64, 64, 64)
    plan = plan_checkpoints(
        FakeStep(model, torch.zeros(100, 4)), [paths_of(model)], budget_bytes=110_000
    )
    assert plan.is_feasible
    assert plan.paths == tuple(paths_of(model)[: len(plan.paths)])
    assert 0 < len(plan.paths) < 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_has_the_least_recomputation(accumulate: int) -> None:
    """No cheaper choice of blocks of different sizes has a simulated peak in the budget."""
    model = Stack(16, 80, 40)
    step, paths = FakeStep(model, torch.zeros(100, 4)), paths_of(model)
    how = {"optimizer": torch.optim.SGD, "accumulate": accumulate}
    costs, total = recomputation_costs(
        step.run(record_operators=True, **{**how, "accumulate": 1}), paths
    )
    peaks = {
        choice: step.run(
            transform=lambda clone, c=choice: install(clone, [paths[i] for i in c]), **how
        ).peak_bytes
        for size in range(4)
        for choice in itertools.combinations(range(3), size)
    }
    for budget_bytes in sorted(set(peaks.values()))[1:-1:2]:
        plan = plan_checkpoints(step, [paths], budget_bytes=budget_bytes, **how)
        least = min(
            sum(costs[i] for i in choice) for choice, peak in peaks.items() if peak <= budget_bytes
        )
        chosen = tuple(paths.index(path) for path in plan.paths)
        assert plan.peak_bytes == peaks[chosen] <= budget_bytes
        assert sum(costs[i] for i in chosen) == pytest.approx(least)
        assert total > sum(costs)


@pytest.mark.slow
def test_a_plan_of_eight_blocks_has_the_least_recomputation() -> None:
    """The same against 256 simulated steps."""
    model = Stack(16, 80, 40, 100, 24, 60, 32, 50)
    step, paths = FakeStep(model, torch.zeros(100, 4)), paths_of(model)
    how = {"optimizer": torch.optim.SGD, "num_steps": 1}
    costs, _ = recomputation_costs(step.run(record_operators=True, **how), paths)
    peaks = {
        choice: step.run(
            transform=lambda clone, c=choice: install(clone, [paths[i] for i in c]), **how
        ).peak_bytes
        for size in range(9)
        for choice in itertools.combinations(range(8), size)
    }
    for part in (0.9, 0.75, 0.6, 0.5, 0.4):
        budget_bytes = int(part * peaks[()])
        plan = plan_checkpoints(step, [paths], budget_bytes=budget_bytes, **how)
        fitting = [
            sum(costs[i] for i in choice) for choice, peak in peaks.items() if peak <= budget_bytes
        ]
        assert plan.is_feasible == bool(fitting)
        if fitting:
            cost = sum(costs[paths.index(path)] for path in plan.paths)
            assert cost <= 1.02 * min(fitting)


def test_everything_is_tried_before_a_budget_is_infeasible() -> None:
    """At the peak of everything the plan is everything; one byte below, there is none."""
    model = Stack(64, 64, 64)
    step, paths = FakeStep(model, torch.zeros(100, 4)), paths_of(model)
    lowest = plan_checkpoints(step, [paths])
    assert lowest.paths == tuple(paths)
    plan = plan_checkpoints(step, [paths], budget_bytes=lowest.peak_bytes)
    assert plan.is_feasible
    plan = plan_checkpoints(step, [paths], budget_bytes=lowest.peak_bytes // 2)
    assert not plan.is_feasible
    assert plan.peak_bytes == lowest.peak_bytes
    assert not plan.cannot_help


def test_a_step_that_fits_is_left_alone() -> None:
    """One dry run, no block."""
    model = Stack(8, 8)
    plan = plan_checkpoints(
        FakeStep(model, torch.zeros(10, 4)), [paths_of(model)], budget_bytes=10**6
    )
    assert (plan.paths, plan.num_dry_runs, plan.recomputed_fraction) == ((), 1, 0.0)


def test_blocks_that_break_the_dry_run_are_dropped() -> None:
    """A forward that is not the same the second time; the real model is not touched."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.cache = []

        def forward(self, x):
            self.cache.append(x)
            return self.linear(torch.cat(self.cache, 0)).exp()[: len(x)]

    model = Stack(64, 64)
    model.blocks.extend([Growing(), Growing()])
    paths = [f"blocks.{index}" for index in range(4)]
    places = {"early": ["blocks.0", "blocks.1"], "late": ["blocks.2", "blocks.3"]}
    plan = plan_checkpoints(FakeStep(model, torch.zeros(100, 4)), [paths], num_steps=1)
    assert plan.paths == tuple(places["early"])
    assert plan.dropped == tuple(places["late"])
    assert model.blocks[2].cache == []


def test_the_finer_level_is_taken_where_it_is_lower() -> None:
    """Stages against the blocks in them; parts of blocks, which save less, are not."""
    model = nn.Sequential(*(Stack(64, 64, 64).blocks for _ in range(2)))

    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in model)

        def forward(self, x):
            for stage in self.stages:
                x = stage(x)
            return x.sum()

    stages = [f"stages.{index}" for index in range(2)]
    blocks = [f"{stage}.{index}" for stage in stages for index in range(3)]
    parts = [f"{block}.{index}" for block in blocks for index in (0, 2)]
    plan = plan_checkpoints(FakeStep(Staged(), torch.zeros(100, 4)), [stages, blocks, parts])
    assert plan.paths == tuple(blocks)


def test_a_step_that_cannot_be_simulated_is_an_error() -> None:
    """As it is for the dry run itself."""
    model = Stack(8, 8)
    step = FakeStep(model, torch.zeros(10, 4), loss=lambda module, batch: batch.numpy())
    with pytest.raises(StepNotTracedError):
        plan_checkpoints(step, [paths_of(model)], budget_bytes=1)
