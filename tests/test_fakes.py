"""The fakes do what they claim."""

from __future__ import annotations

import pytest
import torch
from fakes import (
    CUDA_MESSAGE,
    FailsAt,
    ListLogger,
    RowLimit,
    TinyRegressor,
    batches_of,
    cuda_oom,
    failing,
    regression_loader,
)
from lightning.pytorch import Trainer

from lightning_oom._torch import OutOfMemoryError


def small_trainer(**options) -> Trainer:
    """A quiet Trainer for a couple of steps."""
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def test_the_logger_keeps_every_row_in_order():
    """``rows`` holds (step, metrics), ``values`` one key."""
    logger = ListLogger()
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"b": 2.0}, step=1)
    logger.log_metrics({"a": 3.0}, step=2)

    assert logger.rows == [(0, {"a": 1.0}), (1, {"b": 2.0}), (2, {"a": 3.0})]
    assert logger.values("a") == [1.0, 3.0]
    assert logger.values("missing") == []


def test_a_logged_row_does_not_follow_later_changes():
    """A row is a copy of what was logged."""
    logger = ListLogger()
    metrics = {"a": 1.0}
    logger.log_metrics(metrics, step=0)
    metrics["a"] = 5.0

    assert logger.values("a") == [1.0]


def test_the_regressor_trains_and_logs():
    """Five batches make five rows, and the loss falls."""
    logger = ListLogger()
    model = TinyRegressor()

    small_trainer(logger=logger).fit(model, regression_loader(400, batch_size=8))

    losses = logger.values("train_loss_step")
    assert model.rows_seen.numbers == [8] * 50
    assert len(losses) == 50
    assert losses[-1] < losses[0]


def test_the_loss_of_the_regressor_is_a_mean_over_rows():
    """The gradient of a batch is the weighted sum of the gradients of its parts."""
    model = TinyRegressor().double()
    x, y = torch.randn(9, 8, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    parameters = list(model.parameters())

    whole = torch.autograd.grad(model.loss((x, y)), parameters)
    first = torch.autograd.grad(model.loss((x[:5], y[:5])), parameters)
    last = torch.autograd.grad(model.loss((x[5:], y[5:])), parameters)

    for expected, a, b in zip(whole, first, last, strict=True):
        torch.testing.assert_close(5 / 9 * a + 4 / 9 * b, expected)


def test_the_regressor_evaluates_and_predicts():
    """All four stages run, and a prediction has one value a row."""
    model = TinyRegressor()
    trainer = small_trainer(logger=False)
    loader = regression_loader(12, batch_size=8)

    assert "val_loss" in trainer.validate(model, loader, verbose=False)[0]
    assert "test_loss" in trainer.test(model, loader, verbose=False)[0]
    assert [len(part) for part in trainer.predict(model, loader)] == [8, 4]


def test_the_loader_gives_the_same_rows_whatever_the_global_seed():
    """Rows depend on ``seed`` alone."""
    torch.manual_seed(1)
    first = list(regression_loader(10))
    torch.manual_seed(2)
    second = list(regression_loader(10))

    assert [len(x) for x, _ in first] == [8, 2]
    for (a, b), (c, d) in zip(first, second, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_the_row_limit_fails_above_its_rows_only():
    """Exactly ``rows`` fit; one more does not, and is counted."""
    limit = RowLimit(4)
    x = torch.zeros(5, 2)

    assert limit(x[:4]) is not None
    with pytest.raises(OutOfMemoryError, match="Tried to allocate"):
        limit(x)
    assert limit.refused.numbers == [5]
    with torch.no_grad():
        assert limit(x) is x
    assert RowLimit(None)(x) is x


def test_the_cuda_error_has_the_class_and_text_of_torch():
    """``cuda_oom`` makes a new error each time."""
    first, second = cuda_oom(), cuda_oom()

    assert isinstance(first, OutOfMemoryError)
    assert str(first) == CUDA_MESSAGE
    assert first is not second


def test_a_limited_regressor_cannot_train_on_larger_batches():
    """``fits_rows`` is where training ends without a recovery."""
    model = TinyRegressor(fits_rows=8)

    with pytest.raises(OutOfMemoryError):
        small_trainer(logger=False).fit(model, batches_of([8, 9]))
    assert model.rows_seen.numbers == [8, 9]


def test_batches_have_the_asked_for_rows():
    """``batches_of`` keeps the order and repeats itself."""
    first, second = list(batches_of([3, 1, 5])), list(batches_of([3, 1, 5]))

    assert [len(x) for x, _ in first] == [3, 1, 5]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_chosen_calls_fail():
    """``FailsAt`` counts its calls from 0; without numbers every call fails."""
    layer, always = FailsAt(1), FailsAt()
    x = torch.zeros(3, 2)

    assert layer(x) is x
    with pytest.raises(OutOfMemoryError):
        layer(x)
    assert layer(x) is x
    assert layer.calls.numbers == [3, 3, 3]
    with pytest.raises(OutOfMemoryError):
        always(x)


def test_a_failing_model_fails_in_the_chosen_batch():
    """``failing(1)`` makes models that fail in their second forward, with the given error."""
    model = failing(1, make_error=lambda: ValueError("mine"))()

    with pytest.raises(ValueError, match="mine"):
        small_trainer(logger=False).fit(model, batches_of([8, 8, 8]))
    assert model.rows_seen.numbers == [8, 8]
