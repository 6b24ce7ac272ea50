"""Metrics that saw micro-batches are as if they had seen the batch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError

from lightning_oom.recovery.metric_merge import MetricMerge
from lightning_oom.recovery.snapshot.metrics import find_metrics

# A micro-batch may lack a class that its batch has
pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples:UserWarning")

ROWS = [4, 3]


class MeanOfMeans(Metric):
    """Averages its batches with equal weight, as ``dist_reduce_fx="mean"`` means it."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, x: Tensor) -> None:
        """Take the mean of a batch."""
        self.level = x.mean()

    def compute(self) -> Tensor:
        """Return it."""
        return self.level


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Seven rows."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(7, 3, generator=generator).softmax(-1)
    return scores, torch.randint(0, 3, (7,), generator=generator)


def numbers(seed: int) -> tuple[Tensor]:
    """Seven rows of one number each."""
    return (batch(seed)[0][:, 0],)


KINDS: dict[str, tuple[Any, Any]] = {
    "f1": (lambda: MulticlassF1Score(3), batch),
    "auroc": (lambda: MulticlassAUROC(3), batch),
    "mse": (MeanSquaredError, lambda seed: (numbers(seed)[0], numbers(seed + 50)[0])),
    "mean": (MeanMetric, numbers),
    "sum": (SumMetric, numbers),
    "cat": (CatMetric, numbers),
    "mean of means": (MeanOfMeans, numbers),
}


def state(metric: Metric) -> dict[str, Any]:
    """Return state and count."""
    return {**metric.metric_state, "count": metric.update_count}


def run_parts(metric: Metric, data: tuple[Tensor, ...], calls: int = 1) -> MetricMerge:
    """Call ``forward`` per micro-batch."""
    merge = MetricMerge(find_metrics(metric), rows=ROWS)
    with merge:
        for index, part in enumerate(zip(*(t.split(ROWS) for t in data), strict=True)):
            merge.index = index
            for _ in range(calls):
                metric(*part)
    merge.finish()
    return merge


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_value_state_and_count_are_those_of_the_batch(
    kind: str, steps_before: int, calls: int
) -> None:
    """In the first step too, and where a step calls the metric twice."""
    make, data = KINDS[kind]
    whole, split = make(), make()
    for seed in range(steps_before):
        whole(*data(seed))
        split(*data(seed))

    for _ in range(calls):
        expected = whole(*data(9))
    merge = run_parts(split, data(9), calls)

    torch.testing.assert_close(merge.value_of(split), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state(split), state(whole), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(split.compute(), whole.compute(), rtol=1e-6, atol=1e-7)


def test_counting_states_are_equal_bit_for_bit() -> None:
    """Integers add up the same in any order."""
    whole, split = MulticlassF1Score(3), MulticlassF1Score(3)
    value = whole(*batch(1))

    merge = run_parts(split, batch(1))

    assert torch.equal(merge.value_of(split), value)


def test_updates_count_once_per_step() -> None:
    """Of metrics that are only updated, and of those whose states cannot be merged."""
    metric, peak = SumMetric(), MaxMetric()
    merge = MetricMerge([("metric", metric), ("peak", peak)], rows=ROWS)
    with merge:
        for index, value in enumerate((1.0, 3.0)):
            merge.index = index
            metric.update(value)
            peak(value)
    merge.finish()

    assert metric.update_count == peak.update_count == 1
    assert float(metric.compute()) == 4.0
    assert float(peak.compute()) == 3.0
    assert merge.value_of(peak) is None


def test_a_metric_that_is_also_updated_keeps_what_it_has() -> None:
    """Only the value of the batch is merged then: nothing that was counted is lost."""
    metric = SumMetric()
    merge = MetricMerge([("metric", metric)], rows=ROWS)
    with merge:
        for index, value in enumerate((1.0, 3.0)):
            merge.index = index
            metric(value)
            metric.update(10.0)
    merge.finish()

    assert float(metric.compute()) == 24.0
    assert float(merge.value_of(metric)) == 4.0


def test_a_metric_called_in_some_micro_batches_only() -> None:
    """The rows of the others do not count."""
    metric = MeanMetric()
    merge = MetricMerge([("metric", metric)], rows=ROWS)
    with merge:
        merge.index = 1
        metric(torch.tensor([1.0, 2.0, 6.0]))
    merge.finish()

    assert float(merge.value_of(metric)) == 3.0
    assert metric.update_count == 1


def test_collections_are_merged_member_by_member() -> None:
    """Values and states, whether members share states or not."""
    make = lambda: MetricCollection({"f": MulticlassF1Score(3), "a": MulticlassAUROC(3)})  # noqa: E731
    whole, split = make(), make()
    whole.update(*batch(0))
    split.update(*batch(0))
    expected = whole(*batch(1))

    merge = MetricMerge(find_metrics(split), rows=ROWS)
    with merge:
        for index, part in enumerate(zip(*(t.split(ROWS) for t in batch(1)), strict=True)):
            merge.index = index
            split(*part)
    merge.finish()

    members = dict(split.items(keep_base=True, copy_state=False))
    torch.testing.assert_close({k: merge.value_of(m) for k, m in members.items()}, expected)
    torch.testing.assert_close(split.compute(), whole.compute())


def test_nothing_is_left_on_the_metric() -> None:
    """Also after an error."""
    metric = SumMetric()
    before = set(vars(metric))
    with contextlib.suppress(ValueError), MetricMerge([("metric", metric)], rows=ROWS):
        metric(1.0)
        raise ValueError("stop")

    assert set(vars(metric)) == before
