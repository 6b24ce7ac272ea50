"""Monitor, profiler, cleaner, reporter and recovery in one trainer: odd runs, and no trace after them."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings

import psutil
import pytest
import torch
from fakes import FailsAt, ListLogger, TinyRegressor, regression_loader
from fits import quiet, recovery
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader, IterableDataset

from lightning_oom import CacheCleaner, MemoryMonitor, MemoryProfiler, OOMReporter
from lightning_oom.testing import SimulatedGPUStrategy

GPU = {"accelerator": "auto"}


def team(folder, **monitor):
    """All of them, doing all that they can."""
    options = {"breakdown": True, "find_leaks": True, "warn_above": 0.999, "progress_bar": True}
    return [
        MemoryMonitor(every_n_steps=1, sample_seconds=60, **{**options, **monitor}),
        MemoryProfiler(steps=(0, 3), folder=folder / "profile"),
        CacheCleaner(at=["validation_start"], verbose=False),
        OOMReporter(dirpath=folder / "reports"),
        recovery(),
    ]


def traces():
    """What a run must leave as it was."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(file.path for file in psutil.Process().open_files()),
        "profiler": torch.autograd._profiler_enabled(),
        "gc callbacks": list(gc.callbacks),
        "forward hooks": len(torch.nn.modules.module._global_forward_hooks),
    }


def patched(trainer):
    """Names of methods that are still replaced on objects of the run."""
    owners = [
        trainer.strategy,
        trainer.progress_bar_callback,
        trainer.fit_loop.epoch_loop.automatic_optimization,
        *trainer.loggers,
    ]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        if owner is not None
        for name, value in vars(owner).items()
        if callable(value) and callable(getattr(type(owner), name, None))
    ]


def trainer_of(callbacks, **options):
    """A trainer on a simulated GPU that holds everything."""
    where = {"strategy": SimulatedGPUStrategy("64 MiB"), **GPU}
    return quiet(
        *callbacks, **{**where, "limit_train_batches": 3, "limit_val_batches": 1, **options}
    )


def loaders():
    """For training and validation."""
    return regression_loader(32, batch_size=8), regression_loader(16, batch_size=8)


class Manual(TinyRegressor):
    """Steps its optimizer itself, in every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """Two backward passes before a step."""
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Odd(TinyRegressor):
    """Batches with text, ``None`` and no tensor at the top."""

    def training_step(self, batch, batch_idx):
        """Use what is in them."""
        return self.loss((batch["x"][0], batch["y"]))


def odd_batches():
    """Of changing size, the last of one row."""
    return [
        {"x": [torch.ones(rows, 8), None], "y": torch.ones(rows), "text": ["a"] * rows, "n": rows}
        for rows in (4, 7, 1)
    ]


CASES = {
    "fast_dev_run": ({"fast_dev_run": 2}, TinyRegressor),
    "overfit_batches": ({"overfit_batches": 2}, TinyRegressor),
    "no validation": ({"limit_val_batches": 0}, TinyRegressor),
    "sanity check": ({"num_sanity_val_steps": 1}, TinyRegressor),
    "no logger": ({"logger": False}, TinyRegressor),
    "loggers": ({"logger": [ListLogger(), ListLogger()]}, TinyRegressor),
    "accumulation": ({"accumulate_grad_batches": 2}, TinyRegressor),
    "manual": ({}, Manual),
    "odd": ({}, Odd),
}


@pytest.mark.filterwarnings("ignore:OOMRecovery")
@pytest.mark.parametrize("case", CASES)
def test_odd_runs_end_and_leave_no_trace(case, tmp_path) -> None:
    """Each runs to its end with a reading, and everything is as it was."""
    options, model = CASES[case]
    callbacks = team(tmp_path)
    before = traces()
    trainer = trainer_of(callbacks, **options)
    data = (DataLoader(odd_batches(), batch_size=None),) if case == "odd" else loaders()
    trainer.fit(model(), *data)

    assert trainer.state.finished
    assert callbacks[0].readings
    assert traces() == before
    assert patched(trainer) == []


class Raises(Callback):
    """Raise in one hook."""

    def __init__(self, hook, error) -> None:
        def act(*_, **__):
            raise error("user")  # a new one: an exception keeps the frames that it went through

        setattr(self, hook, act)


HOOKS = ["on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_validation_end"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("hook", [*HOOKS, "setup", "on_train_start"])
def test_an_error_in_a_hook_of_user_code_leaves_no_trace(hook, error, tmp_path) -> None:
    """Whatever was on when it was raised is off."""
    before = traces()
    trainer = trainer_of([*team(tmp_path), Raises(hook, error)])
    with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
        trainer.fit(TinyRegressor(), *loaders())

    assert traces() == before
    assert patched(trainer) == []


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_evaluation_alone_leaves_no_trace(call, tmp_path) -> None:
    """The same beside fit, twice, with data that has no length."""

    class Stream(IterableDataset):
        def __iter__(self):
            return ((torch.ones(8), torch.ones(())) for _ in range(16))

    before = traces()
    callbacks = team(tmp_path)
    trainer = trainer_of(callbacks)
    loader = DataLoader(Stream(), batch_size=8)
    for _ in range(2):
        options = {} if call == "predict" else {"verbose": False}
        getattr(trainer, call)(TinyRegressor(), loader, **options)

    assert traces() == before
    assert patched(trainer) == []
    assert {reading.stage for reading in callbacks[0].readings} == {call}


def test_two_fits_of_one_trainer_and_two_trainers_of_one_callback(tmp_path) -> None:
    """A callback starts anew with each."""
    before = traces()
    callbacks = team(tmp_path, find_leaks=False)
    steps = []
    for _ in range(2):
        trainer = trainer_of(callbacks, limit_train_batches=1, limit_val_batches=0)
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(TinyRegressor(), *loaders())
            steps.append(callbacks[0].readings[-1].step)

    assert traces() == before
    assert patched(trainer) == []
    assert steps == [1, 2, 1, 2]


def test_a_run_goes_on_from_a_checkpoint(tmp_path) -> None:
    """Steps go on where they were."""
    first = trainer_of(team(tmp_path))
    first.fit(TinyRegressor(), *loaders())
    first.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    callbacks = team(tmp_path)
    second = trainer_of(callbacks, max_epochs=2)
    second.fit(TinyRegressor(), *loaders(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)

    assert [reading.step for reading in callbacks[0].readings] == [
        4,
        5,
        6,
        6,
    ]  # the last: validation


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_they_can_be_copied_before_and_after_a_run(copied, tmp_path) -> None:
    """As sweeps and started processes do."""
    callbacks = copied(team(tmp_path, find_leaks=False)[:4])
    trainer_of(callbacks).fit(TinyRegressor(), *loaders())
    again = copied(callbacks)
    trainer_of(again).fit(TinyRegressor(), *loaders())

    assert len(again[0].readings) == 2 * len(callbacks[0].readings)


def test_a_run_inside_a_run_leaves_the_outer_one(tmp_path) -> None:
    """A user may validate with a trainer of its own in a hook."""

    class Inner(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer_of([MemoryMonitor(), CacheCleaner(verbose=False)]).validate(
                TinyRegressor(), loaders()[1], verbose=False
            )

    before = traces()
    callbacks = [*team(tmp_path), Inner()]
    trainer_of(callbacks).fit(TinyRegressor(), *loaders())

    assert traces() == before
    assert [reading.step for reading in callbacks[0].readings] == [1, 2, 3, 3]


def test_the_entry_of_the_progress_bar_is_taken_out(tmp_path) -> None:
    """Also when the user interrupts."""
    bar = TQDMProgressBar()
    trainer = trainer_of(
        [*team(tmp_path), bar, Raises("on_train_batch_end", KeyboardInterrupt)],
        enable_progress_bar=True,
    )
    with warnings.catch_warnings(), pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(TinyRegressor(), *loaders())

    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_steps_that_ran_out_of_memory_are_in_the_picture(call, monkeypatch, tmp_path) -> None:
    """Drawn at the end of the run, as vertical lines."""
    pytest.importorskip("matplotlib")
    drawn = []

    def draw(logger, readings, *, oom_steps):
        drawn.append((len(readings), list(oom_steps)))

    monkeypatch.setattr("lightning_oom.callbacks._tensorboard.write_memory_timeline", draw)
    model = TinyRegressor()
    model.body[1] = FailsAt(2)
    trainer = quiet(MemoryMonitor(every_n_steps=1), recovery(ladder=["release"]))
    data = regression_loader(24, batch_size=8)
    if call == "fit":
        trainer.fit(model, data)
    else:
        trainer.validate(model, data, verbose=False)

    assert drawn == [(3, [2])]
