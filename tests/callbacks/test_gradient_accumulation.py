"""Accumulated runs end where the run with the effective batch at once ends."""

from __future__ import annotations

import pytest
import torch
from accumulation_cases import CASES, TOLERANCE, accumulate, rows_of, run
from fakes import TinyRegressor
from fits import AtBatch, end_state, fit, quiet, weights
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from states import compare
from torch.utils.data import DataLoader

from lightning_oom import GradientAccumulation
from lightning_oom.errors import BatchSplitError


def scaled():
    """Mixed precision with a scaler that grows on the way, on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}


class Watching(Callback):
    """What the trainer says at each batch."""

    def __init__(self) -> None:
        self.batches = []
        self.norms = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Note the number of batches, and the losses as Lightning gives them out."""
        self.batches.append(trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        """Note the gradient, which others clip or log here."""
        parts = [p.grad.flatten() for p in pl_module.parameters()]
        self.norms.append(float(torch.cat(parts).norm()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.3}], ids=["plain", "clipping"])
def test_weights_are_those_of_the_effective_batch(case, options) -> None:
    """Whatever the batches are; so are the gradients that hooks see, and the number of steps."""
    sizes, rows, merged = CASES[case]
    ours, theirs = Watching(), Watching()
    trainer = run(sizes, accumulate(rows), ours, **options)
    plain = run(merged, theirs, **options)

    assert trainer.global_step == plain.global_step == 2 * len(merged)
    assert (
        compare(
            weights(plain.lightning_module), weights(trainer.lightning_module), tolerance=TOLERANCE
        )
        == []
    )
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@pytest.mark.parametrize("case", ["last window", "ragged"])
def test_with_a_gradient_scaler(case) -> None:
    """Correction meets scaled gradients and unscaling follows; half-precision products differ more."""
    sizes, rows, merged = CASES[case]
    ours = run(sizes, accumulate(rows), gradient_clip_val=0.5, **scaled())
    plain = run(merged, gradient_clip_val=0.5, **scaled())

    scale = ours.precision_plugin.scaler.get_scale()
    assert scale == plain.precision_plugin.scaler.get_scale() > 64
    assert (
        compare(weights(plain.lightning_module), weights(ours.lightning_module), tolerance=2e-3)
        == []
    )


def test_lightning_alone_differs_in_the_last_window() -> None:
    """What the callback is for: the comparison can fail."""
    plain = run([8, 8, 4])
    theirs = run([4] * 5, accumulate_grad_batches=2)

    assert compare(
        weights(plain.lightning_module), weights(theirs.lightning_module), tolerance=1e-3
    )


def test_full_windows_are_lightnings_own_to_the_bit() -> None:
    """Equal batches: weights, logs, momentum, progress and schedules as with the Trainer's option."""

    class Scheduled(TinyRegressor):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    ours = run([4] * 6, accumulate(12), make=Scheduled)
    theirs = run([4] * 6, accumulate_grad_batches=3, make=Scheduled)

    assert compare(end_state(theirs), end_state(ours)) == []


def test_logged_values_are_not_touched() -> None:
    """What ``self.log`` got is the loss of the batch, one row a step, also in the last window."""
    ours = run([4, 4, 3, 1], accumulate(8), max_epochs=1).logger
    theirs = run([4, 4, 3, 1], accumulate_grad_batches=2, max_epochs=1).logger

    assert ours.values("train_loss_step") == theirs.values("train_loss_step")
    assert len(ours.values("train_loss_step")) == 2


def test_the_trainer_says_how_many_and_gets_its_own_back() -> None:
    """``accumulate_grad_batches`` follows the batch size and is 1 again afterwards."""
    watching = Watching()
    trainer = run([2] * 4 + [4] * 2, accumulate(8), watching, max_epochs=1)

    assert watching.batches == [4] * 4 + [2] * 2
    assert trainer.accumulate_grad_batches == 1
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "backward" not in vars(trainer.strategy)
    assert not {"_accumulated_batches_reached"} & set(vars(trainer.fit_loop.epoch_loop))
    trainer.fit_loop.epoch_loop.reset()


def test_everything_is_put_back_after_an_exception() -> None:
    """The next fit of the same trainer is Lightning's own."""

    class Breaks(TinyRegressor):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    trainer = quiet(accumulate(8))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Breaks(), rows_of(4, 4, 4, 4))

    assert trainer.accumulate_grad_batches == 1
    assert "backward" not in vars(trainer.strategy)


@pytest.mark.parametrize(
    ("options", "merged", "epochs"),
    [
        ({"limit_train_batches": 3}, [8, 4], 2),
        ({"max_steps": 3, "max_epochs": None}, [8, 8, 8], 1),
    ],
)
def test_limits_end_windows(options, merged, epochs) -> None:
    """The last batch that is used closes its window; the number of steps is counted in windows."""
    ours = run([4] * 6, accumulate(8), **options)
    plain = run(merged, max_epochs=epochs)

    assert ours.global_step == plain.global_step
    assert (
        compare(
            weights(plain.lightning_module), weights(ours.lightning_module), tolerance=TOLERANCE
        )
        == []
    )


def test_schedules_can_ask_for_the_length_of_the_run() -> None:
    """``estimated_stepping_batches`` in ``configure_optimizers`` counts windows."""
    asked = []

    class Asks(TinyRegressor):
        def configure_optimizers(self):
            asked.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    dataset = list(zip(torch.randn(20, 8), torch.randn(20), strict=True))
    trainer, _ = fit(Asks, DataLoader(dataset, batch_size=4), accumulate(8), max_epochs=2)

    assert asked == [6] == [trainer.global_step]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_counts_for_nothing() -> None:
    """In the middle and at the end of a window; the last of an epoch too."""

    class Skips(TinyRegressor):
        def training_step(self, batch, batch_idx):
            return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)

    ours = run([4, 1, 4, 4, 1], accumulate(9), make=Skips)
    first, _, second, third, _ = rows_of(4, 1, 4, 4, 1).dataset
    merged = [tuple(map(torch.cat, zip(first, second, strict=True))), third]
    plain, _ = fit(TinyRegressor, DataLoader(merged, batch_size=None), max_epochs=2)

    assert (
        compare(
            weights(plain.lightning_module), weights(ours.lightning_module), tolerance=TOLERANCE
        )
        == []
    )


class Manual(TinyRegressor):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        """One step by hand."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ByLBFGS(TinyRegressor):
    """An optimizer that calls the closure itself."""

    def configure_optimizers(self):
        """One iteration."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=1)


@pytest.mark.parametrize(("make", "reason"), [(Manual, "manual optimization"), (ByLBFGS, "LBFGS")])
def test_it_stands_aside_with_one_line(make, reason, monkeypatch) -> None:
    """The run is as without it."""
    lines = []
    monkeypatch.setattr(
        "lightning_oom.callbacks.gradient_accumulation.rank_zero_info", lines.append
    )
    callback = GradientAccumulation(effective_batch_size=8)
    ours, plain = run([4] * 3, callback, make=make), run([4] * 3, make=make)

    assert reason in callback.declined
    assert len(lines) == 1
    assert compare(end_state(plain), end_state(ours)) == []


def test_the_choice_is_said_once_and_when_an_epoch_changes_it(monkeypatch) -> None:
    """One line, not one an epoch."""
    lines = []
    monkeypatch.setattr(
        "lightning_oom.callbacks.gradient_accumulation.rank_zero_info", lines.append
    )
    run([4] * 4, GradientAccumulation(effective_batch_size=8))

    assert lines == ["GradientAccumulation: 2 x 4 rows make a step of 8 rows."]

    lines.clear()
    run([0, 4, 4], GradientAccumulation(effective_batch_size=8))
    assert lines == []  # an epoch that begins with a batch without rows tells nothing


def test_windows_set_elsewhere_are_an_error() -> None:
    """Two masters: the message names both."""
    with pytest.raises(ValueError, match="remove it from the Trainer"):
        run([4] * 2, accumulate(8), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="GradientAccumulationScheduler"):
        run([4] * 2, accumulate(8), GradientAccumulationScheduler({0: 1}))


def test_rows_that_cannot_be_counted_are_an_error() -> None:
    """The message names the way out, which works."""

    class Odd:
        def __init__(self, pair):
            self.pair = pair

    class Unpacks(TinyRegressor):
        def training_step(self, batch, batch_idx):
            return self.loss(batch.pair)

    loader = DataLoader([Odd(pair) for pair in rows_of(4, 4, 3).dataset], batch_size=None)
    with pytest.raises(BatchSplitError, match="rows_fn"):
        fit(Unpacks, loader, accumulate(8))
    ours, _ = fit(Unpacks, loader, accumulate(8, rows_fn=lambda batch: len(batch.pair[0])))
    assert ours.global_step == 2


def test_weights_of_the_users_own() -> None:
    """``rows_fn`` may count anything that the loss is a mean over."""
    ours = run([4] * 4, accumulate(4, rows_fn=lambda batch: len(batch[0]) // 2), max_epochs=1)

    assert ours.global_step == 2


def test_memory_of_the_window_is_not_kept() -> None:
    """Nothing of a batch is held between batches."""
    callback, seen = accumulate(8), []
    run([4] * 4, callback, AtBatch(lambda *_: seen.append(callback._control.factor)))

    assert seen == [None] * 8


@pytest.mark.parametrize(
    ("option", "value"),
    [("effective_batch_size", 0), ("effective_batch_size", 1.5), ("rows_fn", 3)],
)
def test_arguments_are_checked_at_once(option, value) -> None:
    """The constructor names the argument and its range."""
    with pytest.raises(ValueError, match=option):
        GradientAccumulation(**{"effective_batch_size": 8, option: value})
