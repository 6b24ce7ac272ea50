"""Every private name of Lightning that the recovery uses is there, and a moved one is noticed."""

from __future__ import annotations

import warnings

import pytest
from fakes import TinyRegressor, batches_of
from lightning.pytorch import Trainer

from lightning_oom import OOMRecovery
from lightning_oom._lightning.names import ACCUMULATION_NAMES, PRIVATE_NAMES, missing_names
from lightning_oom._lightning.support import reason_not_to_guard
from lightning_oom.errors import RecoveryDisabledWarning

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 1,
}


def _fitted():
    trainer, model = Trainer(**QUIET), TinyRegressor()
    trainer.fit(model, batches_of([4]))
    return trainer, model


def test_every_name_is_there():
    """The installed release has all of them, in the form that is used."""
    assert missing_names(*_fitted()) == []


def test_every_name_of_accumulation_is_there():
    """Looked for when windows are taken over."""
    assert missing_names(*_fitted(), table=ACCUMULATION_NAMES) == []


@pytest.mark.parametrize("place", PRIVATE_NAMES)
def test_a_moved_name_is_noticed(place, monkeypatch):
    """Looking for a name that no release has, at each place, gives that name."""
    trainer, model = _fitted()
    monkeypatch.setitem(PRIVATE_NAMES, place, ("_no_such_name",))

    assert missing_names(trainer, model) == [f"{place}._no_such_name"]


def test_a_changed_form_is_noticed(monkeypatch):
    """Other parameters than those that are passed count as moved."""
    trainer, model = _fitted()
    place = "trainer.fit_loop.epoch_loop.automatic_optimization"
    monkeypatch.setitem(PRIVATE_NAMES, place, ("_make_closure(kwargs, batch_idx)",))

    assert missing_names(trainer, model) == [f"{place}._make_closure(kwargs, batch_idx)"]


def test_the_recovery_stands_aside_with_one_warning_when_a_name_has_moved(monkeypatch):
    """The fit goes on unguarded; the warning says what moved."""
    monkeypatch.setitem(PRIVATE_NAMES, "trainer", ("_no_such_name",))
    trainer, model = Trainer(**QUIET, callbacks=[OOMRecovery()]), TinyRegressor()

    with pytest.warns(RecoveryDisabledWarning, match=r"trainer\._no_such_name"):
        trainer.fit(model, batches_of([4]))

    assert trainer.global_step == 1


def test_a_supported_set_up_has_no_reason_to_stand_aside():
    """One device and automatic optimization."""
    trainer, model = _fitted()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason_not_to_guard(trainer, model) is None
