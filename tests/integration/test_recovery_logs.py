"""What ``self.log`` logs: 46 keys, compared one by one with the unlimited run.

The learning rate is 0, so that each batch has the same values in both runs whatever was split.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fits import fit, recovery
from lightning.pytorch import LightningModule
from states import user_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_oom.errors import NotSeparableWarning

BOTH: dict[str, Any] = {"on_step": True, "on_epoch": True}

# Logged as a mean, but no mean over rows: nothing in the call tells how pieces should be joined.
NEEDS_A_RULE = {
    "count_as_mean": "sum",
    "number_of_rows": "sum",
    "running": "last",
}
# Not linear in the rows and computed by the user for the batch: only the whole batch has it.
ONLY_OF_THE_WHOLE = {"by_batch_f1", "by_batch_accuracy"}
# A metric object logged on_step is known to be logged only from its second step on.
UNKNOWN_IN_THE_FIRST_STEP = {"f1_step"}


class ManyKeys(LightningModule):
    """Logs in every way that Lightning has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.f1 = MulticlassF1Score(4)
        self.collection = MetricCollection(
            {"by_batch_accuracy": MulticlassAccuracy(4), "by_batch_f1": MulticlassF1Score(4)}
        )
        self.counted = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log."""
        x, y = batch
        scores = self.layer(x)
        loss = functional.cross_entropy(scores, y)
        guessed, rows = scores.detach(), len(y)
        self._log_means(loss, rows)
        summed = functional.cross_entropy(guessed, y, reduction="sum")
        self.log("sum", summed, reduce_fx="sum", **BOTH)
        self.log("max", scores.max(), reduce_fx="max", **BOTH)
        self.log("min", scores.min(), reduce_fx=torch.min, **BOTH)
        self.log("count_as_mean", (guessed.argmax(-1) == y).float().sum(), **BOTH)
        self.log("number_of_rows", rows, **BOTH)
        self.log("constant", 3.3, **BOTH)
        self.accuracy(guessed, y)
        self.log("accuracy", self.accuracy, **BOTH)
        self.f1(guessed, y)
        self.log("f1", self.f1, **BOTH)
        self.log_dict(self.collection(guessed, y), **BOTH)
        self.counted.update(guessed, y)
        self.log("running", self.counted.compute(), **BOTH)
        self.log_dict({"first": loss, "second": loss * 2}, prog_bar=True, **BOTH)
        return loss

    def _log_means(self, loss: Tensor, rows: int) -> None:
        self.log("inferred", loss, **BOTH)
        self.log("given_rows", loss, batch_size=rows, **BOTH)
        self.log("given_constant", loss, batch_size=10, **BOTH)
        self.log("given_one", loss, batch_size=1, **BOTH)
        self.log("given_tokens", loss, batch_size=rows * 7, **BOTH)
        self.log("step_only", loss, on_step=True, on_epoch=False)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("with_graph", loss, enable_graph=True, **BOTH)

    def on_before_backward(self, loss: Tensor) -> None:
        """Log the loss that the backward sees."""
        self.log("before_backward", loss.detach(), **BOTH)

    def on_after_backward(self) -> None:
        """Log the norm of the gradient."""
        self.log("gradient_norm", self.layer.weight.grad.norm(), **BOTH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """No step moves anything."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows(batch_size: int = 10) -> DataLoader:
    """Thirty rows in batches of ten."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 12, generator=generator)
    y = torch.randint(0, 4, (30,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def logged(*callbacks: Any, **options: Any) -> list[tuple[int, dict[str, float]]]:
    """All rows of two epochs, without the guard's own keys."""
    trainer, _ = fit(ManyKeys, rows(), *callbacks, max_epochs=2, **options)
    return user_rows(trainer.logger)


def wrong_keys(expected: Any, actual: Any) -> set[str]:
    """Keys whose value differs by more than 1e-5; steps and keys of all rows must be the same."""
    assert [step for step, _ in expected] == [step for step, _ in actual]
    assert [row.keys() for _, row in expected] == [row.keys() for _, row in actual]
    return {
        key
        for (_, a), (_, b) in zip(expected, actual, strict=True)
        for key in a
        if abs(a[key] - b[key]) > 1e-5 * max(1.0, abs(a[key]))
    }


def base(key: str) -> str:
    """The name that the user logged."""
    return key.removesuffix("_step").removesuffix("_epoch")


def test_there_are_46_keys():
    """In a row of a step and a row of an epoch together."""
    first, *_, last = (row for _, row in logged())

    assert len(first) + len(last) == 46


def test_values_that_are_no_means_are_named():
    """A split that must guess says which logged names it guessed, and what helps."""
    with pytest.warns(NotSeparableWarning, match="count_as_mean.*log_merge"):
        logged(recovery(ladder=("split",), max_rows=5))


@pytest.mark.filterwarnings("ignore::lightning_oom.errors.NotSeparableWarning")  # shown above
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_rows", [5, 4, 3, 1])
def test_means_sums_maxima_and_minima_are_right_after_a_split(max_rows, accumulate):
    """All that ``reduce_fx`` tells; only values that are no means over rows differ."""
    options = {"accumulate_grad_batches": accumulate}
    guard = recovery(ladder=("split",), max_rows=max_rows)

    wrong = wrong_keys(logged(**options), logged(guard, **options))

    allowed = NEEDS_A_RULE.keys() | ONLY_OF_THE_WHOLE
    assert {key for key in wrong - UNKNOWN_IN_THE_FIRST_STEP if base(key) not in allowed} == set()


@pytest.mark.parametrize("max_rows", [5, 4, 3, 1])
def test_the_rest_is_right_with_a_rule(max_rows):
    """``log_merge`` says sum or last where a call cannot tell."""
    guard = recovery(ladder=("split",), max_rows=max_rows, log_merge=NEEDS_A_RULE)

    wrong = wrong_keys(logged(), logged(guard))

    assert {
        key for key in wrong - UNKNOWN_IN_THE_FIRST_STEP if base(key) not in ONLY_OF_THE_WHOLE
    } == set()


@pytest.mark.parametrize("fits", [5, 3, 2])
def test_every_key_is_right_in_chunks(fits):
    """``training_step`` sees the whole batch: no rule is needed."""

    class LimitedLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > fits and torch.is_grad_enabled():
                from fakes import cuda_oom

                raise cuda_oom()
            return super().forward(x)

    class Limited(ManyKeys):
        def __init__(self) -> None:
            super().__init__()
            self.layer.__class__ = LimitedLinear

    guard = recovery(ladder=("chunk",))
    expected = logged()
    trainer, _ = fit(Limited, rows(), guard, max_epochs=2)
    actual = user_rows(trainer.logger)

    assert guard.summary.num_recovered >= 1
    assert wrong_keys(expected, actual) == set()


def test_a_metric_updated_by_hand_sees_each_row_once():
    """A failed attempt and a split leave 40 values in a ``CatMetric``, not 56 (MC#485)."""
    from fakes import TinyRegressor, batches_of
    from torchmetrics.aggregation import CatMetric

    class Counting(TinyRegressor):
        def __init__(self) -> None:
            super().__init__(fits_rows=8)
            self.seen = CatMetric()
            self.values: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.update(batch[1])
            self.log("one", 1.0, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.values = self.seen.compute()

    loader = batches_of([8, 16, 16])
    guard = recovery()
    trainer, model = fit(Counting, loader, guard)

    assert guard.summary.num_recovered >= 1
    assert torch.equal(model.values, torch.cat([y for _, y in loader]))
    assert float(trainer.callback_metrics["one_epoch"]) == 1.0
    assert trainer.logger.values("one_step") == [1.0] * 3
