"""Validation, test and predict steps are split and joined again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from fakes import TinyRegressor, batches_of, cuda_oom
from fits import end_state, fit, notes_of, quiet, recovery
from lightning.pytorch.callbacks import BasePredictionWriter
from states import compare
from torch import Tensor
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

from lightning_oom._torch import OutOfMemoryError

ROUNDING = 1e-5
ROWS = [8, 21, 32, 5]


class Evaluated(TinyRegressor):
    """Logs numbers and metrics in every evaluation step; more than ``fits`` rows do not fit."""

    def __init__(self, fits: int | None = None) -> None:
        super().__init__()
        self.fits = fits
        self.error = MeanSquaredError()
        self.auroc = BinaryAUROC()
        self.seen = CatMetric()
        self.both = MetricCollection({"f1": BinaryF1Score(), "auroc": BinaryAUROC()})

    def evaluate(self, batch: Any, name: str) -> Tensor:
        """Check the rows, then log."""
        x, y = batch
        if self.fits is not None and len(x) > self.fits:
            raise cuda_oom()
        predicted = self(x)
        positive = (y > 0).long()
        self.error.update(predicted, y)
        self.auroc.update(predicted.sigmoid(), positive)
        self.seen.update(predicted)
        self.both.update(predicted.sigmoid(), positive)
        self.log(f"{name}_loss", (predicted - y).square().mean())
        self.log(f"{name}_largest", predicted.max(), reduce_fx="max")
        self.log(f"{name}_count", float(len(y)), reduce_fx="sum")
        self.log(f"{name}_error", self.error)
        self.log(f"{name}_auroc", self.auroc)
        self.log_dict(self.both)
        return predicted

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log and return."""
        return self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return."""
        return self.evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """What was seen by hand."""
        self.log("val_seen", self.seen.compute().sum())
        self.seen.reset()


def make(fits: int | None = None) -> Evaluated:
    """The same weights each time."""
    torch.manual_seed(4)
    return Evaluated(fits)


@pytest.mark.parametrize("fits", [8, 3, 1])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_gives_the_same_numbers(stage, fits):
    """Losses, sums, maxima, AUROC and collections are those of the unlimited run."""
    guard = recovery()

    expected = getattr(quiet(), stage)(make(), batches_of(ROWS), verbose=False)
    actual = getattr(quiet(guard), stage)(make(fits), batches_of(ROWS), verbose=False)

    assert guard.summary.num_recovered >= 1
    assert compare(expected, actual, tolerance=ROUNDING) == []


def test_two_dataloaders_keep_their_keys():
    """Rows of the second loader are logged under its own name."""
    loaders = [batches_of(ROWS), batches_of([16, 4], seed=3)]

    expected = quiet().validate(make(), loaders, verbose=False)
    actual = quiet(recovery()).validate(make(8), loaders, verbose=False)

    assert compare(expected, actual, tolerance=ROUNDING) == []


def test_validation_inside_of_a_fit_is_guarded():
    """Training goes on as if nothing had happened."""

    class Limited(Evaluated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

    guard = recovery()
    loaders = (batches_of([8, 8]), batches_of(ROWS))

    expected, _ = fit(make, loaders, max_epochs=2)
    actual, _ = fit(lambda: make(8), loaders, guard, max_epochs=2)

    assert guard.summary.num_recovered >= 1
    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []


def test_a_sanity_check_is_guarded():
    """The two batches before the first epoch may run out of memory too."""
    guard = recovery()

    trainer, _ = fit(
        lambda: make(8), (batches_of([8]), batches_of(ROWS)), guard, num_sanity_val_steps=2
    )

    assert trainer.global_step == 1
    assert guard.summary.num_recovered >= 1


class Prediction(NamedTuple):
    """Two values a row."""

    value: Tensor
    sign: Tensor


OUTPUTS = {
    "tensor": lambda p: p,
    "dict": lambda p: {"value": p, "rows": len(p), "word": "x", "none": None},
    "namedtuple": lambda p: Prediction(p, p.sign()),
    "tuple": lambda p: (p, [p * 2]),
    "list of text": lambda p: [f"{value:.3f}" for value in p.tolist()],
    "nothing": lambda p: None,
}


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.parametrize("form", OUTPUTS)
def test_predictions_are_joined(form):
    """Each form of output is that of the whole batch, in the order of its rows."""

    class Predicting(TinyRegressor):
        def __init__(self, fits: int | None = None) -> None:
            super().__init__()
            self.fits = fits

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fits is not None and len(batch[0]) > self.fits:
                raise cuda_oom()
            return OUTPUTS[form](self(batch[0]))

    def predict(fits: int | None, *callbacks: Any) -> Any:
        torch.manual_seed(4)
        return quiet(*callbacks).predict(Predicting(fits), batches_of(ROWS))

    assert compare(predict(None), predict(8, recovery()), tolerance=ROUNDING) == []


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_a_prediction_writer_sees_whole_batches():
    """One call a batch, with the joined prediction."""

    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch")
            self.rows: list[int] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, *rest: Any
        ) -> None:
            self.rows.append(len(prediction))

    class Predicting(TinyRegressor):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 8:
                raise cuda_oom()
            return self(batch[0])

    writer = Writer()
    quiet(recovery(), writer).predict(Predicting(), batches_of(ROWS), return_predictions=False)

    assert writer.rows == ROWS


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_row_that_does_not_fit_ends_the_evaluation(stage):
    """The original error, with a note."""
    with pytest.raises(OutOfMemoryError, match="Tried to allocate") as caught:
        getattr(quiet(recovery()), stage)(make(0), batches_of([4]), verbose=False)

    assert "lightning_oom" in notes_of(caught.value)
