"""When the cache is emptied, in which order, and when it is left alone."""

from __future__ import annotations

import gc

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from fits import quiet

from lightning_oom import CacheCleaner
from lightning_oom.memory import MemoryReading
from lightning_oom.memory.cleaning import CachePressure
from lightning_oom.testing import SimulatedGPUStrategy

MIB = 2**20


class Filling(TinyRegressor):
    """Leaves much cached and little in use after every step."""

    def on_train_batch_end(self, *args) -> None:
        """A large tensor for a moment."""
        torch.empty(40 * MIB, dtype=torch.uint8, device=self.device)


@pytest.fixture
def calls(monkeypatch):
    """The order of garbage collections and emptied caches, real ones made."""
    SimulatedGPUStrategy()
    seen = []
    collect, empty = gc.collect, torch.simgpu.empty_cache
    monkeypatch.setattr(gc, "collect", lambda *a: (seen.append("collect"), collect(*a))[1])
    monkeypatch.setattr(torch.simgpu, "empty_cache", lambda: (seen.append("empty"), empty())[1])
    return seen


def train(cleaner, *, where="simgpu", model=None, validate=True, **options):
    """Five steps an epoch, a validation at its end."""
    if where == "simgpu":
        options = {"strategy": SimulatedGPUStrategy("64 MiB"), "accelerator": "auto", **options}
    trainer = quiet(cleaner, **options)
    loaders = (regression_loader(),) * (2 if validate else 1)
    trainer.fit(model or TinyRegressor(), *loaders)
    return trainer


def reasons(cleaner):
    """Why each cleaning was done."""
    return [cleaning.reason for cleaning in cleaner.cleanings]


def test_stage_changes_are_the_moments() -> None:
    """Each moment that is asked for, once."""
    every = CacheCleaner(
        at=["sanity_check_end", "validation_start", "validation_end", "epoch_end"],
        above_used=None,
        verbose=False,
    )
    train(every, num_sanity_val_steps=1)
    none = CacheCleaner(at=[], above_used=None, verbose=False)
    train(none)

    assert sorted(reasons(every)) == sorted(
        ["sanity_check_end", "validation_start", "validation_end", "epoch_end"]
    )
    assert reasons(none) == []


def test_steps_are_counted_on_request_only() -> None:
    """Every n optimizer steps; by default no step is followed by a cleaning (axolotl#1858)."""
    counting = CacheCleaner(at=[], every_n_steps=2, above_used=None, verbose=False)
    train(counting, max_epochs=2)
    default = CacheCleaner(verbose=False)
    train(default, validate=False, max_epochs=2)

    assert reasons(counting) == ["every 2 steps"] * 5
    assert reasons(default) == []


def test_pressure_is_answered_and_then_given_time() -> None:
    """A device full of cached memory is cleaned once in ``pause_steps`` (transformers#31372)."""
    options = {"at": [], "above_used": 0.5, "above_fragmentation": 0.5, "verbose": False}
    patient, eager = CacheCleaner(**options), CacheCleaner(pause_steps=2, **options)
    for cleaner in (patient, eager):
        train(cleaner, model=Filling(), validate=False, max_epochs=2)

    assert reasons(patient) == ["pressure"]
    assert 3 <= len(reasons(eager)) <= 5
    assert patient.cleanings[0].freed_bytes >= 40 * MIB


def test_garbage_goes_before_the_cache(calls) -> None:
    """Tensors in dead cycles are collected first, or their blocks would stay."""
    cleaner = CacheCleaner(at=["epoch_end"], above_used=None, verbose=False)
    strategy = SimulatedGPUStrategy("64 MiB")
    trainer = quiet(cleaner, strategy=strategy, accelerator="auto", max_steps=2)
    calls.clear()
    cleaner._clean(trainer, "asked")

    assert calls == ["collect", "empty"]


def test_nothing_happens_on_the_cpu(calls) -> None:
    """Not even a garbage collection."""
    cleaner = CacheCleaner(every_n_steps=1, verbose=False)
    train(cleaner, where="cpu")

    assert reasons(cleaner) == []
    assert "empty" not in calls


def test_cost_and_gain_are_logged() -> None:
    """Each cleaning is a row: what it freed, and the time spent so far."""
    cleaner = CacheCleaner(at=[], every_n_steps=2, above_used=None, verbose=False)
    logger = train(cleaner, model=Filling()).logger
    seconds = logger.values("memory/cleaning_seconds")

    assert len(logger.values("memory/cache_freed_gib")) == 2
    assert min(logger.values("memory/cache_freed_gib")) >= 40 / 1024
    assert 0 < seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("reserved", "allocated", "felt"),
    [(90, 60, True), (89, 10, False), (95, 70, False), (None, 60, False)],
)
def test_pressure_needs_both(reserved, allocated, felt) -> None:
    """Full and only cached; what is not known is no pressure."""
    reading = MemoryReading(
        device="cuda:0", allocated_bytes=allocated, reserved_bytes=reserved, limit_bytes=100
    )

    assert CachePressure(used_fraction=0.9, fragmentation_fraction=0.3).is_felt(reading) is felt


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("at", ["always"]),
        ("at", "epoch_end"),
        ("every_n_steps", 0),
        ("above_used", 0),
        ("above_fragmentation", 1),
        ("pause_steps", 0),
    ],
)
def test_arguments_are_checked_at_once(option, value) -> None:
    """The constructor names the argument and its range."""
    with pytest.raises(ValueError, match=option):
        CacheCleaner(**{option: value})
