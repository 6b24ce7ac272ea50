"""The guard works with what Trainers are used for: checkpoints, stopping, scaling, resuming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import Tally, TinyRegressor, batches_of, cuda_oom, failing, regression_loader
from fits import end_state, fit, quiet, recovery, weights
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from states import compare
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDING = 1e-5


def limited() -> TinyRegressor:
    """A model that trains on at most 8 rows at once."""
    return TinyRegressor(fits_rows=8)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_learned_limits_survive_a_resume(tmp_path):
    """A checkpoint written in mid-epoch carries them: the resumed run never tries the whole."""
    rows = [32, 8, 32, 8]

    def stop_and_resume(make: Callable[[], Any], folder: Path, *guards: Any) -> Any:
        """Write a checkpoint after two batches, then go on from it with another trainer."""
        saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        fit(make, batches_of(rows), *guards[:1], saving, enable_checkpointing=True)
        torch.manual_seed(12)
        model, trainer = make(), quiet(*guards[1:])
        trainer.fit(model, batches_of(rows), ckpt_path=folder / "step=2.ckpt")
        return trainer, model

    first, second = recovery(ladder=("split",)), recovery(ladder=("split",))
    expected, reference = stop_and_resume(TinyRegressor, tmp_path / "unlimited")
    actual, model = stop_and_resume(limited, tmp_path / "limited", first, second)

    assert 32 not in model.limit.refused.numbers
    assert second.summary.num_failed_attempts < first.summary.num_failed_attempts
    assert actual.global_step == expected.global_step
    assert compare(weights(reference), weights(model), tolerance=ROUNDING) == []


def test_what_a_checkpoint_holds_is_plain(tmp_path):
    """The learned limits load with ``weights_only=True``: numbers, strings, lists and dicts."""
    path = tmp_path / "last.ckpt"

    trainer, _ = fit(limited, batches_of([32, 8]), recovery(ladder=("split",)))
    trainer.save_checkpoint(path)
    loaded = torch.load(path, weights_only=True)

    (state,) = (v for k, v in loaded["callbacks"].items() if k.startswith("OOMRecovery"))
    assert state


def test_a_checkpoint_of_a_guarded_run_loads_without_the_guard(tmp_path):
    """Loop state and weights have the keys that Lightning knows."""
    path = tmp_path / "last.ckpt"

    guarded, _ = fit(limited, batches_of([8, 32]), recovery(ladder=("split",)), max_epochs=1)
    guarded.save_checkpoint(path)
    plain, _ = fit(TinyRegressor, batches_of([8, 32]))
    reference = tmp_path / "reference.ckpt"
    plain.save_checkpoint(reference)
    a, b = (torch.load(p, weights_only=False) for p in (reference, path))

    assert a.keys() == b.keys()
    assert a["state_dict"].keys() == b["state_dict"].keys()
    assert compare(a["loops"], b["loops"]) == []


@pytest.mark.parametrize(
    "options",
    [{"fast_dev_run": True}, {"fast_dev_run": 2}, {"overfit_batches": 2, "max_epochs": 3}],
    ids=["fast_dev_run", "fast_dev_run 2", "overfit_batches"],
)
def test_short_runs_are_guarded_too(options):
    """``fast_dev_run`` and ``overfit_batches`` end as they do with enough memory."""
    rows, guard = [32, 8, 8], recovery(ladder=("split",))
    # fast_dev_run takes the loggers away
    expected, _ = fit(TinyRegressor, batches_of(rows), **options)
    actual, _ = fit(limited, batches_of(rows), guard, **options)

    assert guard.summary.num_recovered == guard.summary.num_oom >= 1
    assert (
        compare(end_state(expected)["weights"], end_state(actual)["weights"], tolerance=ROUNDING)
        == []
    )


def test_early_stopping_sees_the_same_metric():
    """A run with splits stops in the epoch in which the unlimited run stops."""

    def stopping() -> EarlyStopping:
        return EarlyStopping("train_loss_epoch", patience=1, min_delta=3.0)

    rows = [32, 8, 8]
    expected, _ = fit(TinyRegressor, batches_of(rows), stopping(), max_epochs=20)
    actual, _ = fit(
        limited, batches_of(rows), recovery(ladder=("split",)), stopping(), max_epochs=20
    )

    assert expected.current_epoch < 20
    assert expected.current_epoch == actual.current_epoch
    assert expected.global_step == actual.global_step


class Skipping(TinyRegressor):
    """Leaves every second batch out by returning ``None``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Compute, then perhaps skip."""
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("ladder", [("release",), ("chunk",), ("split",)])
def test_a_step_may_return_none(ladder):
    """A skipped batch stays skipped, also when it ran out of memory first."""
    rows = [8, 32, 8, 32]

    def make(limit: int | None = None) -> Skipping:
        return Skipping(fits_rows=limit)

    if ladder == ("release",):

        def make_limited() -> Skipping:
            model = Skipping()
            model.body.insert(1, failing(1)().body[1])
            return model
    else:

        def make_limited() -> Skipping:
            return make(8)

    guard = recovery(ladder=ladder)
    expected, _ = fit(make, batches_of(rows))
    actual, _ = fit(make_limited, batches_of(rows), guard)

    assert guard.summary.num_recovered >= 1
    a, b = end_state(expected), end_state(actual)
    assert (
        compare(list(a["weights"].values()), list(b["weights"].values()), tolerance=ROUNDING) == []
    )
    assert compare(a["rows"], b["rows"], tolerance=ROUNDING) == []


class WithExtras(TinyRegressor):
    """Returns a dict with more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Loss, per-row values, a scalar and a word."""
        x, y = batch
        predicted = self(x)
        loss = (predicted - y).square().mean()
        return {"loss": loss, "predicted": predicted.detach(), "rows": len(y), "word": "a"}


@pytest.mark.parametrize("rung", ["chunk", "split"])
def test_extras_of_a_step_are_joined(rung):
    """``on_train_batch_end`` sees one dict for the whole batch, in the order of its rows."""
    seen: dict[str, list[Any]] = {"expected": [], "actual": []}

    class Collecting(WithExtras):
        into = "expected"

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen[self.into].append({k: v for k, v in outputs.items() if k != "loss"})

    class Limited(Collecting):
        into = "actual"

    fit(Collecting, batches_of([8, 19, 8]))
    fit(lambda: Limited(fits_rows=8), batches_of([8, 19, 8]), recovery(ladder=(rung,)))

    assert compare(seen["expected"], seen["actual"], tolerance=ROUNDING) == []


class BySize(LightningModule):
    """Has a ``batch_size`` for the finder; more than 20 rows do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layer = torch.nn.Linear(4, 1)
        self.seen = Tally()

    def train_dataloader(self) -> DataLoader:
        """Fixed rows in batches of the current size."""
        return DataLoader(TensorDataset(torch.ones(200, 4)), batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Fail on more than 20 rows."""
        self.seen.add(len(batch[0]))
        if len(batch[0]) > 20:
            raise cuda_oom()
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_batch_size_finder_sees_errors_of_its_trials(tmp_path):
    """During a search an OOM means "too large": the guard lets it through."""
    model, guard = BySize(), recovery()
    finder = BatchSizeFinder("power", steps_per_trial=1, init_val=4)

    quiet(guard, finder, default_root_dir=tmp_path, max_steps=2).fit(model)

    assert model.batch_size == 16
    assert guard.summary.num_oom == 0


def test_the_batch_size_finder_may_come_after_or_before(tmp_path):
    """The order of the two callbacks does not matter."""
    sizes = []
    for first in (True, False):
        model, guard = BySize(), recovery()
        finder = BatchSizeFinder("power", steps_per_trial=1, init_val=4)
        callbacks = [guard, finder] if first else [finder, guard]
        quiet(*callbacks, default_root_dir=tmp_path, max_steps=2).fit(model)
        sizes.append(model.batch_size)

    assert sizes == [16, 16]


def test_a_run_without_a_logger_is_fine():
    """``logger=False`` loses only the rows."""
    guard = recovery(ladder=("split",))

    trainer, _ = fit(limited, batches_of([8, 32]), guard, logger=False)

    assert trainer.global_step == 2
    assert guard.summary.num_recovered == 1


def test_an_idle_guard_changes_nothing():
    """Without an OOM every bit is that of the bare Trainer, validation included."""
    loaders = (regression_loader(40, shuffle=True), regression_loader(16, seed=2))

    expected, _ = fit(TinyRegressor, loaders, max_epochs=2)
    actual, _ = fit(TinyRegressor, loaders, recovery(), max_epochs=2)

    assert compare(end_state(expected), end_state(actual)) == []


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_short_accumulation_window_keeps_its_factor(accumulate):
    """Lightning's factor for the last, shorter window is left alone (PL#19987)."""
    rows = [12] * 4
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2}

    expected, _ = fit(TinyRegressor, batches_of(rows), **options)
    actual, _ = fit(limited, batches_of(rows), recovery(ladder=("split",)), **options)

    assert compare(end_state(expected), end_state(actual), tolerance=ROUNDING) == []


def test_gradients_of_ones_get_the_window_factor():
    """Three batches of ones in windows of two: 1.0 at the first step, 0.5 at the last (PL#19987)."""

    class Ones(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (batch[0] * self.weight).mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(float(self.weight.grad))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=4)
    _, model = fit(Ones, loader, recovery(ladder=("split",), max_rows=3), accumulate_grad_batches=2)

    assert model.seen == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_gradient_scaler_is_as_without_the_failure(fail_at):
    """Scale, growth counter and weights of 16-bit training are equal after an unsplit retry."""

    def precision() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return MixedPrecision("16-mixed", "cpu", scaler=scaler)

    expected, _ = fit(failing(99), batches_of([8] * 4), plugins=precision())
    actual, _ = fit(
        failing(fail_at), batches_of([8] * 4), recovery(ladder=("release",)), plugins=precision()
    )

    assert compare(end_state(expected), end_state(actual)) == []
    assert expected.precision_plugin.state_dict() == actual.precision_plugin.state_dict()
