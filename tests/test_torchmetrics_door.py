"""Each private name of torchmetrics that the package uses exists and behaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric

from lightning_oom import _torchmetrics as door

PRIVATE_NAMES = (
    "_defaults",
    "_persistent",
    "_reductions",
    "_update_signature",
    "_update_count",
    "_forward_cache",
    "_computed",
    "_to_sync",
    "_reduce_states",
    "dist_sync_on_step",
    "full_state_update",
)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_name_exists(name: str) -> None:
    """On every metric."""
    assert hasattr(SumMetric(), name)


def test_constant_names_are_attributes_of_every_metric() -> None:
    """They stay what the constructor made of them."""
    assert vars(SumMetric()).keys() >= door.CONSTANT_NAMES


def test_metrics_are_told_from_modules() -> None:
    """Collections, wrappers and trackers are torchmetrics' own kind."""
    assert door.is_metric(SumMetric())
    assert door.is_metric(MetricCollection([SumMetric()]))
    assert door.is_metric(MetricTracker(SumMetric(), maximize=True))
    assert not door.is_metric(nn.Linear(1, 1))


def test_forward_adds_through_the_reduction() -> None:
    """A shadow of it hears the earlier state, while the metric holds the batch's alone."""
    metric, heard = SumMetric(), []
    metric.update(3.0)
    reduce = door.reduction(metric)
    door.shadow_reduction(
        metric, lambda earlier: (heard.append((earlier, door.state_of(metric))), reduce(earlier))[0]
    )
    metric(4.0)
    door.unshadow_reduction(metric)
    door.unshadow_reduction(metric)

    (earlier, present), *_ = heard
    assert float(earlier["sum_value"]) == 3.0
    assert float(present["sum_value"]) == 4.0
    assert float(metric.compute()) == 7.0
    assert "_reduce_states" not in vars(metric)


def test_batch_values_and_results_are_where_they_are_expected() -> None:
    """``forward`` keeps the value of its batch, ``compute`` its result."""
    metric = SumMetric()
    metric.update(1.0)

    assert float(metric(2.0)) == float(door.batch_value(metric)) == 2.0
    assert door.computed_value(metric) is None
    assert float(metric.compute()) == float(door.computed_value(metric)) == 3.0
    assert door.num_updates(metric) == metric.update_count == 2
    door.set_num_updates(metric, 5)
    assert metric.update_count == 5
    door.set_batch_value(metric, 9.0)
    assert door.batch_value(metric) == 9.0


def test_only_states_that_reduce_can_be_merged() -> None:
    """Extremes need their whole state, and ask for it."""
    assert door.can_merge_states(MeanMetric())
    assert door.can_merge_states(CatMetric())
    assert not door.can_merge_states(MaxMetric())
    assert not door.can_merge_states(SumMetric(dist_sync_on_step=True))
    assert door.extremum_of(MaxMetric()) == "max"
    assert door.extremum_of(MinMetric()) == "min"
    assert door.extremum_of(SumMetric()) is None


def test_list_states_join_as_one_batch_would_have_filled_them() -> None:
    """One tensor per call, of all rows."""
    metric = CatMetric()
    parts = [{"value": [torch.ones(2)]}, {"value": [torch.zeros(1)]}]

    door.merge_states(metric, parts, rows=[2, 1])

    assert len(metric.value) == 1
    assert metric.value[0].tolist() == [1.0, 1.0, 0.0]


def test_computing_locally_leaves_no_result_behind() -> None:
    """And the setting of ``sync_on_compute`` as it was."""
    metric = SumMetric()
    metric.update(1.0)

    assert float(door.compute_locally(metric)) == 1.0

    assert door.computed_value(metric) is None
    assert metric._to_sync is True
