"""Whatever happens, every replaced object is put back, and runs do not see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes import TinyRegressor, batches_of, failing, regression_loader
from fits import AtBatch, end_state, fit, quiet, recovery, weights
from lightning.pytorch import Callback
from states import compare
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "teardown",
)


def owners(trainer: Any, model: Any) -> dict[str, Any]:
    """Every object on which the guard may shadow something."""
    loop = trainer.fit_loop.epoch_loop
    return {
        "loop": loop.automatic_optimization,
        "manual loop": loop.manual_optimization,
        "epoch loop": loop,
        "fit loop": trainer.fit_loop,
        "strategy": trainer.strategy,
        "precision": trainer.strategy.precision_plugin,
        "trainer": trainer,
        "model": model,
        **{f"child {name}": child for name, child in model.named_modules()},
        "results": trainer._results,
        **{f"optimizer {i}": optimizer for i, optimizer in enumerate(trainer.optimizers)},
    }


def callables(trainer: Any, model: Any) -> dict[str, Any]:
    """Functions and classes that sit on instances, by place."""
    return {
        f"{name}.{key}": value
        for name, owner in owners(trainer, model).items()
        if owner is not None
        for key, value in vars(owner).items()
        if callable(value) and not isinstance(value, nn.Module)
    }


def assert_as_before(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Only what Lightning itself adds during a fit may be new; all else is the same object."""
    lightning_owns = ("optimizer ", "trainer.", "results.")
    new = {key for key in after.keys() - before.keys() if not key.startswith(lightning_owns)}

    assert not new
    assert before.keys() <= after.keys()
    for key, value in before.items():
        if not key.startswith(lightning_owns):
            assert after[key] is value, key


class Interruption(Exception):  # noqa: N818 stands for any exception of a user
    """Raised by a hook."""


class RaisesIn(Callback):
    """Raise in one hook."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        def raising(*args: Any, **kwargs: Any) -> None:
            raise error

        setattr(self, hook, raising)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [Interruption, KeyboardInterrupt])
def test_a_hook_that_raises_leaves_nothing_shadowed(hook, error):
    """After any exception, at any hook, each object has the attributes that it had (``is``)."""
    model, guard = TinyRegressor(fits_rows=8), recovery(max_rows=4)
    trainer = quiet(guard, RaisesIn(hook, error))
    before = callables(trainer, model)

    with pytest.raises((error, SystemExit)):
        trainer.fit(model, batches_of([8, 16]), regression_loader(8))

    assert_as_before(before, callables(trainer, model))


def test_a_finished_fit_leaves_nothing_shadowed():
    """Setup and teardown are symmetric, with recoveries in between."""
    model = TinyRegressor(fits_rows=8)
    trainer = quiet(recovery())
    before = callables(trainer, model)

    trainer.fit(model, batches_of([8, 16]), regression_loader(8))

    assert_as_before(before, callables(trainer, model))


def test_an_optimizer_keeps_no_trace_of_the_guard():
    """What sits on the optimizer after a guarded fit is what sits there after a bare one."""
    plain, model = fit(TinyRegressor, batches_of([8, 8]))
    guarded, other = fit(TinyRegressor, batches_of([8, 8]), recovery())

    assert callables(plain, model).keys() == callables(guarded, other).keys()


def test_the_same_callback_can_be_used_for_a_second_fit():
    """A second fit is guarded as the first, and starts with what was learned."""
    guard = recovery(ladder=("split",))

    fit(lambda: TinyRegressor(fits_rows=8), batches_of([8, 16]), guard)
    after_first = guard.summary.num_oom
    expected, _ = fit(TinyRegressor, batches_of([8, 16, 16]))
    actual, _ = fit(lambda: TinyRegressor(fits_rows=8), batches_of([8, 16, 16]), guard)

    assert after_first == 1
    assert guard.summary.num_oom == 1
    assert compare(end_state(expected), end_state(actual), tolerance=1e-5) == []


def test_fit_may_be_called_again_on_the_same_trainer():
    """Two fits of one trainer are guarded both."""
    guard = recovery(ladder=("release",))
    model = failing(1, 3)()
    trainer = quiet(guard)

    trainer.fit(model, batches_of([8, 8]))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches_of([8, 8]))

    assert guard.summary.num_recovered == 2
    assert trainer.global_step == 4


def test_a_fit_inside_of_a_fit_has_its_own_guard():
    """Two trainers with two callbacks, one run from a hook of the other, do not meet."""
    inner_guard, outer_guard = recovery(ladder=("split",)), recovery(ladder=("split",))
    inner: dict[str, Any] = {}

    def run_inner(trainer: Any, model: Any) -> None:
        inner["model"] = TinyRegressor(fits_rows=4)
        quiet(inner_guard).fit(inner["model"], batches_of([4, 12]))

    expected, _ = fit(TinyRegressor, batches_of([8, 16, 8]))
    actual, _ = fit(
        lambda: TinyRegressor(fits_rows=8),
        batches_of([8, 16, 8]),
        outer_guard,
        AtBatch(run_inner, 0),
    )

    assert inner_guard.summary.num_recovered == 1
    assert outer_guard.summary.num_recovered == 1
    assert (
        compare(
            weights(expected.lightning_module), weights(actual.lightning_module), tolerance=1e-5
        )
        == []
    )


def test_two_trainers_in_turn_do_not_meet():
    """Fitting A, then B, then A again gives what A gives alone."""
    rows = [8, 16]

    def fit_twice(between: Callable[[], Any], make: Callable[[], Any], *guards: Callback) -> Any:
        trainer, model = fit(make, batches_of(rows), *guards)
        between()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches_of(rows))
        return weights(model)

    def limited(fits_rows: int) -> Callable[[], TinyRegressor]:
        return lambda: TinyRegressor(fits_rows=fits_rows)

    def another() -> None:
        fit(limited(4), batches_of([4, 12]), recovery(ladder=("split",)))

    alone = fit_twice(lambda: None, TinyRegressor)
    beside = fit_twice(another, limited(8), recovery(ladder=("split",)))

    assert compare(alone, beside, tolerance=1e-5) == []


def test_validation_alone_leaves_nothing_shadowed():
    """``validate``, ``test`` and ``predict`` undo what they set up."""
    model = TinyRegressor(fits_rows=8)
    trainer = quiet(recovery())
    before = callables(trainer, model)

    trainer.validate(model, batches_of([16]), verbose=False)
    trainer.test(model, batches_of([16]), verbose=False)
    trainer.predict(model, batches_of([16]))

    assert_as_before(before, callables(trainer, model))
