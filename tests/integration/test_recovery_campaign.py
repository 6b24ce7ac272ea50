"""OOMRecovery survives a fault at every allocation of a step and ends where the unbroken run ends.

The tests here fail a few allocations of each scenario, at offsets that differ between scenarios;
with ``-m slow`` every one. ``tests/benchmarks/campaign.py`` prints the whole table.
"""

from __future__ import annotations

from functools import partial

import pytest
from fault_campaign import Campaign, Scenario, run_campaign
from scenarios import EXACT, ON_SIMULATED_GPU, SEPARABLE

from lightning_oom import OOMRecovery

FAULTS_IN_CI = 4
SPLIT_IN_CI = ("accumulate", "clip", "adam single", "sgd foreach", "nadam foreach", "adamw fused")

release = partial(OOMRecovery, ladder=("release",), verbose=False)
chunk = partial(OOMRecovery, ladder=("chunk",), verbose=False)
split = partial(OOMRecovery, ladder=("split",), verbose=False)


def thin(scenario: Scenario, make_guard, *, rotate: int) -> Campaign:
    """About ``FAULTS_IN_CI`` faults, spread over the step."""
    return run_campaign(scenario, make_guard, max_faults=FAULTS_IN_CI, offset=rotate)


def check(campaign: Campaign) -> None:
    """Nothing differs, nothing moved, and all up to the optimizer's update was survived."""
    is_lbfgs = campaign.scenario.recipe.optimizer == "lbfgs"  # calls its closures while it updates

    assert campaign.idle_differences == [], campaign.explain()
    assert campaign.of_kind("differ") == [], campaign.explain()
    assert campaign.of_kind("moved") == [], campaign.explain()
    assert is_lbfgs or campaign.refused_too_early() == [], campaign.explain()
    assert campaign.of_kind("exact"), "no fault was survived"


def each(scenarios: list[Scenario]):
    """Parametrise over scenarios, with a running number that rotates the offset."""
    return pytest.mark.parametrize(
        ("scenario", "rotate"),
        [pytest.param(s, 7 * i, id=s.name.replace(" ", "-")) for i, s in enumerate(scenarios)],
    )


@each(EXACT)
def test_an_unsplit_retry_gives_the_same_bits(scenario, rotate):
    """Weights, optimizer, buffers, random state, metrics, rows and progress equal the reference."""
    check(thin(scenario, release, rotate=rotate))


@each(ON_SIMULATED_GPU)
def test_an_unsplit_retry_gives_the_same_bits_on_a_simulated_gpu(scenario, rotate):
    """The same where the device has memory of its own."""
    pytest.importorskip("lightning_oom.testing.simgpu")
    check(thin(scenario, release, rotate=rotate))


@each([s for s in SEPARABLE if any(word in s.name for word in SPLIT_IN_CI)])
def test_a_split_step_gives_the_same_up_to_rounding(scenario, rotate):
    """Micro-batches give every state and every logged mean, sum, max and min within 1e-5."""
    check(thin(scenario, split, rotate=rotate))


@each([s for s in SEPARABLE if "accumulate" in s.name or "adam single" in s.name])
def test_a_chunked_step_gives_the_same_up_to_rounding(scenario, rotate):
    """Chunked children give every state and every logged value within 1e-5."""
    check(thin(scenario, chunk, rotate=rotate))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", [*EXACT, *ON_SIMULATED_GPU], ids=lambda s: s.name)
def test_every_allocation_can_fail(scenario):
    """The full sweep of an unsplit retry."""
    check(run_campaign(scenario, release))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SEPARABLE, ids=lambda s: s.name)
@pytest.mark.parametrize("make_guard", [split, chunk], ids=["split", "chunk"])
def test_every_allocation_can_fail_in_a_separable_step(scenario, make_guard):
    """The full sweep of split and of chunk."""
    check(run_campaign(scenario, make_guard))
