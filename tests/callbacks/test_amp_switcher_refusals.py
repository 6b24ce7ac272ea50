"""Where a switch would be wrong it is not made, one warning says why, and nothing is left behind."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from amp_cases import Watched, differences, oom_before, scaled, trained
from fakes import TinyRegressor, batches_of, regression_loader
from fits import AtBatch, fit, quiet
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn import functional

from lightning_oom import AMPSwitcher
from lightning_oom._lightning.names import PRECISION_NAMES
from lightning_oom._lightning.precision import (
    install_precision,
    reason_not_to_switch,
    within_precision,
)
from lightning_oom.errors import LightningOOMWarning


def switcher(**options):
    """The callback under test, silent."""
    return AMPSwitcher(verbose=False, **options)


class Manual(TinyRegressor):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """One step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class WithLBFGS(TinyRegressor):
    """Calls its closure several times."""

    def configure_optimizers(self):
        """Second order."""
        return torch.optim.LBFGS(self.parameters(), lr=0.01)


class Fused(TinyRegressor):
    """An optimizer that unscales."""

    def configure_optimizers(self):
        """In one kernel."""
        return torch.optim.AdamW(self.parameters(), fused=True)


class Probabilities(TinyRegressor):
    """A loss that CUDA's autocast refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.BCELoss()

    def loss(self, batch):
        """Binary cross-entropy of probabilities."""
        return self.criterion(self(batch[0]).sigmoid(), (batch[1] > 0).float())


class FunctionalProbabilities(TinyRegressor):
    """The same without a child."""

    def loss(self, batch):
        """Binary cross-entropy of probabilities."""
        return functional.binary_cross_entropy(self(batch[0]).sigmoid(), (batch[1] > 0).float())


CASES = [
    pytest.param(TinyRegressor, {}, {"precision": "bf16-mixed"}, "already", id="bf16-mixed"),
    pytest.param(TinyRegressor, {}, {"plugins": scaled}, "16-mixed already", id="16-mixed"),
    pytest.param(TinyRegressor, {}, {"precision": "bf16-true"}, "HalfPrecision", id="bf16-true"),
    pytest.param(WithLBFGS, {}, {}, "LBFGS compares losses", id="LBFGS"),
    pytest.param(
        Manual, {"precision": "16-mixed"}, {}, "Manual uses manual optimization", id="manual"
    ),
    pytest.param(
        Fused,
        {"precision": "16-mixed"},
        {"gradient_clip_val": 1.0},
        "pass fused=False to it.*'bf16-mixed'",
        id="fused and clipping",
    ),
    pytest.param(Probabilities, {}, {}, r"criterion \(BCELoss\).*BCEWithLogitsLoss", id="BCELoss"),
    pytest.param(
        FunctionalProbabilities,
        {},
        {},
        r"FunctionalProbabilities.loss \(binary_cross_entropy\)",
        id="binary_cross_entropy",
    ),
]


@pytest.mark.parametrize("when", ["start", "oom"])
@pytest.mark.parametrize(("make", "own", "options", "message"), CASES)
def test_it_stands_aside_with_one_warning(make, own, options, message, when):
    """Before the first step, in the words of the remedy; the run is that without the callback."""
    made = {key: value() if callable(value) else value for key, value in options.items()}
    again = {key: value() if callable(value) else value for key, value in options.items()}
    _, _, expected = trained(make=make, batches=2, **made)
    callback = switcher(when=when, **own)

    with pytest.warns(LightningOOMWarning, match=message) as told:
        _, _, actual = trained(callback, make=make, batches=2, **again)

    assert differences(expected, actual) == []
    assert callback.changes == []
    assert len([line for line in told if line.category is LightningOOMWarning]) == 1


def test_bfloat16_under_manual_optimization_is_the_trainers_own():
    """There is no loss scale in anybody's way."""
    _, _, expected = trained(make=Manual, precision="bf16-mixed")
    _, _, actual = trained(switcher(when="start"), make=Manual)

    assert differences(expected, actual) == []


def test_a_device_without_a_peak_is_named():
    """A fraction of what is not known is never passed."""
    with pytest.warns(LightningOOMWarning, match="cpu does not tell how much"):
        trained(switcher(when=0.9))


@pytest.mark.parametrize(
    ("strategy", "plugin", "message"),
    [
        (FSDPStrategy, Precision, "FSDPStrategy keeps weights in a way of its own"),
        (ModelParallelStrategy, Precision, "ModelParallelStrategy keeps"),
        (DDPStrategy, Precision, None),
        (DDPStrategy, type("DeepSpeedPrecision", (Precision,), {}), "DeepSpeedPrecision"),
        (DDPStrategy, DoublePrecision, "64-true"),
        (DDPStrategy, HalfPrecision, "16-true"),
    ],
)
def test_which_strategies_and_plugins_are_left_alone(strategy, plugin, message):
    """Those that hold weights elsewhere, and every plugin that is not plain 32-bit."""
    made = plugin()
    trainer = SimpleNamespace(
        strategy=object.__new__(strategy),
        precision_plugin=made,
        precision=made.precision,
        training=True,
        optimizers=[],
    )
    trainer.strategy._precision_plugin = made
    reason = reason_not_to_switch(trainer, TinyRegressor(), "bf16-mixed")

    assert reason is None if message is None else message in reason


@pytest.mark.parametrize("place", PRECISION_NAMES)
def test_a_moved_name_of_lightning_is_noticed(place, monkeypatch):
    """Before anything is exchanged."""
    trainer = quiet()
    assert reason_not_to_switch(trainer, TinyRegressor(), "bf16-mixed") is None
    monkeypatch.setitem(PRECISION_NAMES, place, ("_no_such_name",))

    reason = reason_not_to_switch(trainer, TinyRegressor(), "bf16-mixed")

    assert f"{place}._no_such_name" in reason


class AutocastRefuses(TinyRegressor):
    """A loss that the scan cannot see, refused as on CUDA."""

    def loss(self, batch):
        """Raise."""
        raise RuntimeError("torch.nn.functional.binary_cross_entropy are unsafe to autocast.")


def test_an_error_that_the_switch_has_caused_says_so():
    """By a note, on the error of torch."""
    with pytest.raises(RuntimeError, match="unsafe to autocast") as caught:
        trained(switcher(when="start"), make=AutocastRefuses)

    assert any("BCEWithLogitsLoss" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match="unsafe to autocast") as caught:
        trained(switcher(), make=AutocastRefuses)
    assert not getattr(caught.value, "__notes__", [])


# -- undo
class Breaks(Callback):
    """Raises in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *args) -> None:
        """Raise."""
        raise KeyError("a user's error")


@pytest.mark.parametrize("hook", [None, "on_fit_start", "on_train_batch_end", "on_fit_end"])
def test_the_trainers_own_plugin_comes_back(hook):
    """The very object, at the end and after an error at any time."""
    callback = switcher(when="start")
    trainer = quiet(callback, *([Breaks(hook)] if hook else []))
    before = trainer.precision_plugin
    for _ in range(2):
        if hook is None:
            trainer.fit(TinyRegressor(), batches_of([4]))
        else:
            with pytest.raises(KeyError):
                trainer.fit(TinyRegressor(), batches_of([4]))

        assert trainer.precision_plugin is before
        assert vars(before) == {}
        assert trainer.precision == "32-true"


def test_two_fits_with_one_callback_do_not_see_each_other():
    """The second starts in 32-bit, as the arguments say."""
    callback = switcher()
    for _ in range(2):
        make, guard = oom_before(1)
        _, model, _ = trained(guard, callback, make=make, batches=2)

        assert [p for _, p, _ in model.seen.rows] == ["32-true"] * 2 + ["bf16-mixed"]
        assert len(callback.changes) == 1


def test_a_trainer_inside_of_another_is_left_alone():
    """One warning; the outer run goes on as it was."""
    callback = switcher(when="start")
    inner = quiet(callback)

    def nested(trainer, model):
        with pytest.warns(LightningOOMWarning, match="at work in another trainer"):
            inner.fit(TinyRegressor(), batches_of([4]))

    _, model, _ = trained(callback, AtBatch(nested, 2))

    assert {p for _, p, _ in model.seen.rows} == {"bf16-mixed"}
    assert inner.precision == "32-true"


def test_two_trainers_one_after_the_other():
    """Each is switched and put back."""
    callback = switcher(when="start")
    for _ in range(2):
        trainer, model = fit(Watched, batches_of([4]), callback)

        assert [p for _, p, _ in model.seen.rows] == ["bf16-mixed"]
        assert trainer.precision == "32-true"


def test_another_plugin_that_came_meanwhile_stays():
    """An undo takes back its own change only."""
    trainer = quiet()
    undo = install_precision(trainer, "bf16-mixed")
    theirs = MixedPrecision("bf16-mixed", "cpu")
    trainer.strategy.precision_plugin = theirs
    undo()

    assert trainer.precision_plugin is theirs


def test_one_attempt_in_another_precision():
    """Forward and backward; afterwards the plugin that was there. A loss scale cannot be had so."""
    trainer = quiet()
    before = trainer.precision_plugin
    with within_precision(trainer, "bf16-mixed"):
        assert trainer.precision == "bf16-mixed"
    assert trainer.precision_plugin is before
    with pytest.raises(ZeroDivisionError), within_precision(trainer, "bf16-mixed"):
        raise ZeroDivisionError

    assert trainer.precision_plugin is before
    with pytest.raises(ValueError, match="has to last until the update"):
        within_precision(trainer, "16-mixed").__enter__()


# -- with the guard
class ClipFails(Watched):
    """Clipping runs out of memory once, in the first step after the switch."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        """Fail once."""
        if self.trainer.precision != "32-true" and not self.limit.refused.numbers:
            self.limit.refused.add(1)
            raise self.limit.make_error()
        self.clip_gradients(optimizer, *args, **kwargs)


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16-mixed", marks=pytest.mark.slow), "16-mixed"]
)
def test_the_guard_follows_a_switch(precision):
    """Clipping and unscaling under the new plugin are guarded as under the old one."""
    ends = []
    for model in (Watched, ClipFails):
        make, guard = oom_before(1, model)
        callback = switcher(precision=precision)
        ends.append(trained(guard, callback, make=make, batches=3, gradient_clip_val=0.1)[2])

    assert differences(*ends) == []
    assert guard.summary.num_optimizer == 1


# -- YAML
CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_oom.AMPSwitcher
      init_args:
        precision: bf16-mixed
        when: WHEN
        back_off_steps: 100
        watch: false
        verbose: false
"""


class Rows(LightningDataModule):
    """One batch."""

    def train_dataloader(self):
        """The batches."""
        return regression_loader(8)


@pytest.mark.parametrize("when", ["oom", "start", 0.8])
def test_a_yaml_file_builds_and_runs_the_callback(when, tmp_path, monkeypatch):
    """Plain values only."""
    config = tmp_path / "amp.yaml"
    config.write_text(CONFIG.replace("WHEN", str(when)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of LightningCLI itself
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AMPSwitcher stands aside: cpu", LightningOOMWarning)
        cli = LightningCLI(TinyRegressor, Rows, args=["fit", f"--config={config}"])
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, AMPSwitcher)]

    assert (callback.when, callback.precision, callback.back_off_steps) == (
        when,
        "bf16-mixed",
        100,
    )
    assert isinstance(cli.trainer, Trainer)
    assert cli.trainer.global_step == 1
