"""The campaign finds what a recovery leaves wrong."""

from __future__ import annotations

import pytest
import torch
from campaign_model import Recipe
from fault_campaign import Scenario, fit_once, run_campaign
from naive import NaiveRetry
from scenarios import EXACT
from states import compare

PLAIN = Scenario(name="plain")


def test_two_undisturbed_runs_are_equal():
    """The reference is reproducible to the bit, so any difference is the recovery's."""
    first, second = fit_once(PLAIN), fit_once(PLAIN)

    assert first.state is not None
    assert compare(first.state, second.state) == []


@pytest.mark.parametrize("scenario", EXACT, ids=lambda s: s.name.replace(" ", "-"))
def test_counting_changes_nothing(scenario):
    """A run whose allocations are counted equals one in which nobody looks."""
    reference = fit_once(scenario, watched=False)
    watched = fit_once(scenario)

    assert watched.faults.count > 100
    assert compare(reference.state, watched.state) == []


def test_another_seed_would_be_seen():
    """Comparing with a run of another recipe reports weights, rows, metrics and random state."""
    first = fit_once(PLAIN)
    second = fit_once(Scenario(name="less dropout", recipe=Recipe(dropout=0.1)))

    paths = {
        difference.path.split(".")[1].split("[")[0]
        for difference in compare(first.state, second.state)
    }

    assert {
        "weights",
        "logged rows",
        "metrics",
        "buffers",
        "optimizers",
        "outputs of each step",
    } <= paths


def test_an_unguarded_fault_ends_the_run():
    """Without a callback the error reaches the caller and nothing has moved."""
    run = fit_once(PLAIN, fail_at=[40])

    assert run.error is not None
    assert run.error.startswith("CUDA out of memory")
    assert run.moved == []


def test_a_naive_retry_is_found_wrong():
    """Running the closure again without a rollback differs in what it counts and draws twice."""
    campaign = run_campaign(PLAIN, NaiveRetry, max_faults=25)

    wrong = campaign.of_kind("differ")
    seen = {d.path.split(".")[1].split("[")[0] for outcome in wrong for d in outcome.differences}

    assert campaign.idle_differences == []
    assert len(wrong) > len(campaign.outcomes) / 2
    assert {"weights", "buffers", "metrics", "logged rows", "random", "attributes", "loops"} <= seen


def test_a_naive_retry_counts_an_upper_layer_twice():
    """In an accumulation window a failed backward leaves gradients behind (PT#18853)."""
    scenario = Scenario(name="accumulate", accumulate=2, batch=1, recipe=Recipe().row_separable())

    campaign = run_campaign(scenario, NaiveRetry, max_faults=30)
    seen = {
        d.path.split(".")[1] for outcome in campaign.of_kind("differ") for d in outcome.differences
    }

    assert "gradients of each step" in seen


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1]), torch.tensor([2])),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        (1.0, 2.0),
        (None, 1),
    ],
    ids=["value", "shape", "dtype", "integer", "length", "keys", "float", "type"],
)
def test_compare_reports_each_kind_of_difference(expected, actual):
    """Values, shapes, dtypes, lengths, keys and types are all compared."""
    assert compare({"x": expected}, {"x": actual}, tolerance=1e-6) != []
    assert compare({"x": expected}, {"x": expected}) == []


def test_compare_accepts_what_is_within_the_tolerance():
    """The tolerance is relative to the largest element of a tensor."""
    expected = torch.tensor([100.0, 0.0])

    assert compare(expected, expected + 5e-4, tolerance=1e-5) == []
    assert compare(expected, expected + 2e-3, tolerance=1e-5) != []
