"""A run that was saved in one precision goes on in whichever the resumed one starts in."""

from __future__ import annotations

import warnings

import pytest
import torch
from amp_cases import NotFinite, Watched, differences, loaders, oom_before, scaled, trained
from fits import AtBatch, end_state, fit, quiet
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_oom import AMPSwitcher
from lightning_oom.errors import LightningOOMWarning, StepSkippedWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

SCALE = 1234.0
KINDS = ["bf16-mixed", "16-mixed"]


def switcher(**options):
    """The callback under test, silent."""
    return AMPSwitcher(verbose=False, **options)


def saves(path, batch=4):
    """Save a checkpoint after a batch, once its loss scale is one that no default has."""

    def save(trainer, model):
        if trainer.scaler is not None:
            trainer.precision_plugin.load_state_dict(
                {**trainer.scaler.state_dict(), "scale": SCALE}
            )
        trainer.save_checkpoint(path)

    return AtBatch(save, batch)


class SavesAfterEpoch(Callback):
    """Save a checkpoint after the first epoch."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        """Save."""
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def starts_in(precision):
    """Trainer options; float16 on the CPU is not to be had by the flag."""
    return {"plugins": scaled()} if precision == "16-mixed" else {"precision": precision}


def resumed(path, *callbacks, make=Watched, **options):
    """Go on from a checkpoint; return trainer, model, precision and scale after each batch."""
    seen = []

    def look(trainer, model):
        scale = None if trainer.scaler is None else trainer.scaler.get_scale()
        seen.append((str(trainer.precision), scale))

    torch.manual_seed(11)
    model = make()
    trainer = quiet(*callbacks, AtBatch(look), **options)
    trainer.fit(model, *loaders(), ckpt_path=path)
    return trainer, model, seen


@pytest.fixture(params=KINDS, scope="module")
def saved(request, tmp_path_factory):
    """Precision and path of a checkpoint of a run that had switched after an OOM."""
    path = tmp_path_factory.mktemp("amp") / "switched.ckpt"
    make, guard = oom_before(3)
    trained(guard, switcher(precision=request.param), saves(path), make=make)
    return request.param, path


@pytest.mark.parametrize("start", ["32-true", "16-mixed", "bf16-mixed"])
def test_each_pair_of_precisions_resumes(saved, start):
    """Without the callback: Lightning finds the scaler's state under its own name."""
    kind, path = saved
    trainer, _, seen = resumed(path, make=unguarded, **starts_in(start))

    assert trainer.global_step >= 8
    assert {precision for precision, _ in seen} == {start}
    if start == "16-mixed":
        assert seen[0][1] in ([SCALE] if kind == "16-mixed" else [2.0**16, 2.0**15])


@pytest.mark.parametrize("start", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_pair_of_precisions_resumes_with_the_callback(saved, start, same):
    """It applies the saved switch in 32-bit, and leaves a trainer that is mixed already alone."""
    kind, path = saved
    wanted = kind if same else next(other for other in KINDS if other != kind)
    callback = switcher(precision=wanted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*already", LightningOOMWarning)
        trainer, _, seen = resumed(path, callback, make=unguarded, **starts_in(start))
    expected = wanted if start == "32-true" else start

    assert trainer.global_step >= 8
    assert {precision for precision, _ in seen} == {expected}
    if expected == "16-mixed":
        assert seen[0][1] in ([SCALE] if kind == "16-mixed" else [2.0**16, 2.0**15])
    assert len(callback.changes) == (start == "32-true")


def unguarded():
    """The model of :func:`oom_before` after its one failure."""
    make, _ = oom_before(10**6)
    return make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_one_that_was_never_broken_off(kind, tmp_path):
    """Bit by bit, scale included."""
    path = tmp_path / "epoch.ckpt"
    make, guard = oom_before(3)
    _, _, expected = trained(
        guard, switcher(precision=kind), SavesAfterEpoch(path), make=make, max_epochs=2
    )
    trainer, _, _ = resumed(path, switcher(precision=kind), make=unguarded, max_epochs=2)
    actual = end_state(trainer)

    assert trainer.global_step == 16
    assert differences(expected["weights"], actual["weights"]) == []
    assert differences(expected["optimizers"], actual["optimizers"]) == []


def test_the_scale_is_kept_when_the_run_is_saved_after_its_end(tmp_path):
    """The trainer's own plugin is back by then, and its state is not in the checkpoint."""
    callback = switcher(when="start", precision="16-mixed")
    trainer, _, _ = trained(callback, saves(tmp_path / "inside", batch=7))
    trainer.save_checkpoint(tmp_path / "after")
    checkpoint = torch.load(tmp_path / "after", weights_only=False)
    options = {"max_epochs": 2}
    seen = resumed(tmp_path / "after", switcher(when="start", precision="16-mixed"), **options)[2]

    assert "MixedPrecision" not in checkpoint
    assert seen[0] == ("16-mixed", SCALE)


def test_a_checkpoint_of_lightnings_own_float16_is_taken_over(tmp_path):
    """The plugin of ours has the name of Lightning's."""
    path = tmp_path / "own"
    trained(saves(path), plugins=scaled())
    seen = resumed(path, switcher(when="start", precision="16-mixed"))[2]

    assert seen[0] == ("16-mixed", SCALE)


@pytest.mark.parametrize(("steps", "expected"), [(None, "..."), (3, ".mm"), (1, "mmm")])
def test_a_way_back_is_remembered(steps, expected, tmp_path):
    """For good, or for what is left of its steps."""
    path = tmp_path / "back"
    options = {"when": "start", "back_off_steps": steps}
    with pytest.warns(StepSkippedWarning):
        trained(switcher(**options), saves(path), make=lambda: NotFinite(3))
    seen = resumed(path, switcher(**options), make=lambda: NotFinite(3))[2]

    kinds = "".join("m" if kind == "bf16-mixed" else "." for kind, _ in seen)
    assert kinds[:3] == expected


def test_what_is_saved_is_plain_data(tmp_path):
    """Also under ``weights_only=True``."""
    path = tmp_path / "plain"
    trained(switcher(when="start", precision="16-mixed"), saves(path))
    state = torch.load(path, weights_only=True)["callbacks"]["AMPSwitcher"]

    assert state["is_mixed"]
    assert state["scaler"]["scale"] == SCALE


def test_a_test_run_takes_no_notice_of_the_checkpoint(saved):
    """``when="oom"`` acts in a fit only."""
    kind, path = saved
    model, trainer = unguarded(), quiet(switcher(precision=kind))
    trainer.test(model, loaders()[1], ckpt_path=path, verbose=False)

    assert trainer.precision == "32-true"


def test_our_plugin_is_lightnings_to_everybody_else():
    """By class and by the name under which its state is saved."""
    found = []
    fit(
        Watched,
        loaders(1),
        switcher(when="start"),
        AtBatch(lambda t, m: found.append(t.precision_plugin)),
    )
    (plugin,) = found

    assert isinstance(plugin, MixedPrecision)
    assert type(plugin).__qualname__ == MixedPrecision.__qualname__
