"""torchmetrics: every kind of state comes back, also when forward was interrupted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

from lightning_oom.recovery.snapshot import Metrics

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")

CLASSES = 3


def scores_and_labels(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(8, CLASSES, generator=generator).softmax(-1)
    return scores, torch.randint(0, CLASSES, (8,), generator=generator)


def values(seed: int) -> tuple[torch.Tensor]:
    """Eight numbers."""
    return (scores_and_labels(seed)[0][:, 0],)


def collection() -> MetricCollection:
    """Two metrics that share their state and one that does not."""
    return MetricCollection(
        {
            "a": MulticlassAccuracy(CLASSES),
            "f": MulticlassF1Score(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
        }
    )


KINDS: dict[str, tuple[Any, Any]] = {
    "accuracy": (lambda: MulticlassAccuracy(CLASSES), scores_and_labels),
    "f1": (lambda: MulticlassF1Score(CLASSES), scores_and_labels),
    "auroc with lists": (lambda: MulticlassAUROC(CLASSES), scores_and_labels),
    "auroc binned": (lambda: MulticlassAUROC(CLASSES, thresholds=5), scores_and_labels),
    "confusion matrix": (lambda: MulticlassConfusionMatrix(CLASSES), scores_and_labels),
    "mean squared error": (
        MeanSquaredError,
        lambda seed: (values(seed)[0], values(seed + 100)[0]),
    ),
    "cat": (CatMetric, values),
    "mean": (MeanMetric, values),
    "sum": (SumMetric, values),
    "max": (MaxMetric, values),
    "collection": (collection, scores_and_labels),
    "min and max": (lambda: MinMaxMetric(MulticlassAccuracy(CLASSES)), scores_and_labels),
    "bootstrap": (lambda: BootStrapper(MulticlassAccuracy(CLASSES), 3), scores_and_labels),
    "classwise": (
        lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
        scores_and_labels,
    ),
    "running": (lambda: Running(SumMetric(), window=3), values),
    "multioutput": (
        lambda: MultioutputWrapper(MeanSquaredError(), CLASSES),
        lambda seed: (scores_and_labels(seed)[0], scores_and_labels(seed + 100)[0]),
    ),
}


def state(metric: nn.Module) -> dict[str, Any]:
    """Everything in plain attributes, copied, without what a constructor sets."""
    return {
        f"{name}.{key}": copy.deepcopy(value)
        for name, module in metric.named_modules()
        for key, value in vars(module).items()
        if not callable(value) and key not in ("_modules", "_update_signature", "_reductions")
    }


def same(one: Any, other: Any) -> bool:
    """Compare nested states exactly."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("how", ["update", "forward", "both", "compute"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_comes_back(kind: str, how: str) -> None:
    """Whatever an attempt calls, several attempts in a row, the metric is as before."""
    make, batch = KINDS[kind]
    holder = nn.ModuleDict({"metric": make()})
    metric = holder["metric"]
    metric.update(*batch(0))
    metric.update(*batch(1))
    before = state(metric)
    saved = Metrics(holder).take()

    for attempt in range(2, 4):
        if how in ("update", "both"):
            metric.update(*batch(attempt))
        if how in ("forward", "both"):
            metric(*batch(attempt))
        if how == "compute":
            metric.compute()
        assert saved.restore() == ()
        assert same(before, state(metric))


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_that_was_never_used_is_new_again(kind: str) -> None:
    """The first step may fail: compute groups, lists and counters are those of the constructor."""
    make, batch = KINDS[kind]
    holder = nn.ModuleDict({"metric": make()})
    before = state(holder)
    saved = Metrics(holder).take()
    holder["metric"].update(*batch(0))

    assert saved.restore() == ()

    assert same(before, state(holder))


def test_a_metric_interrupted_in_forward_gets_its_state_back() -> None:
    """``forward`` sets the accumulated state aside; after an error only the snapshot has it."""

    class Fails(SumMetric):
        def compute(self) -> torch.Tensor:
            if failing:
                raise RuntimeError("out of memory")
            return super().compute()

    failing = False
    holder = nn.ModuleDict({"metric": Fails()})
    holder["metric"].update(5.0)
    saved = Metrics(holder).take()
    failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        holder["metric"](1.0)
    failing = False

    assert saved.restore() == ()

    assert float(holder["metric"].compute()) == 5.0
    assert holder["metric"].update_count == 1
    assert float(holder["metric"](1.0)) == 1.0


def test_groups_still_share_their_state_after_restore() -> None:
    """Metrics of one compute group hold the same tensor, and it is copied once."""
    holder = nn.ModuleDict({"metrics": collection()})
    metrics = holder["metrics"]
    metrics.update(*scores_and_labels(0))
    part = Metrics(holder)
    saved = part.take()
    metrics.update(*scores_and_labels(1))
    saved.restore()

    members = dict(metrics.items(keep_base=True, copy_state=False))
    assert members["a"].tp is members["f"].tp
    metrics.update(*scores_and_labels(1))
    expected = collection()
    expected.update(*scores_and_labels(0))
    expected.update(*scores_and_labels(1))
    assert same(metrics.compute(), expected.compute())


def test_metrics_in_plain_lists_and_dictionaries_count() -> None:
    """Torch does not register these, users keep metrics there all the same."""
    module = nn.Module()
    module.listed = [SumMetric(), [1, 2]]
    module.named = {"total": SumMetric(), "none": None}
    saved = Metrics(module).take()
    module.listed[0].update(1.0)
    module.named["total"].update(1.0)

    saved.restore()

    assert module.listed[0].update_count == module.named["total"].update_count == 0


def test_a_tracker_forgets_the_increment_of_a_failed_attempt() -> None:
    """Its children are part of its state."""
    holder = nn.ModuleDict({"tracker": MetricTracker(SumMetric(), maximize=True)})
    tracker = holder["tracker"]
    tracker.increment()
    tracker.update(2.0)
    saved = Metrics(holder).take()
    tracker.increment()
    tracker.update(40.0)

    saved.restore()

    assert tracker.n_steps == 1
    assert float(tracker.compute()) == 2.0


def test_states_are_copied_into_memory_that_is_held() -> None:
    """The copies are counted, and counted once."""
    holder = nn.ModuleDict({"matrix": MulticlassConfusionMatrix(100)})
    part = Metrics(holder)
    part.take()
    part.take()

    assert part.held_bytes == 100 * 100 * 8
