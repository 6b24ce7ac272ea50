"""The choice of a precision, losses that 16 bits break, and when to go back."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_oom.reduction.precision import (
    NonFiniteWatch,
    PrecisionSwitch,
    choose_precision,
    find_unsafe_losses,
)


# -- the device
@pytest.mark.parametrize(("native", "expected"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_cuda_computes_in_bfloat16_only_where_the_hardware_does(native, expected, monkeypatch):
    """Emulated bfloat16 saves memory and costs more time than float16."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or native,
    )

    assert choose_precision(torch.device("cuda")) == expected


def test_the_other_devices():
    """The CPU always, MPS in float16, a device without autocast not at all."""
    assert choose_precision(torch.device("cpu")) == "bf16-mixed"
    assert choose_precision(torch.device("mps")) == "16-mixed"
    assert choose_precision(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float16, torch.bfloat16], "bf16-mixed"),
        ([torch.float16], "16-mixed"),
        ([], None),
    ],
)
def test_an_outside_device_is_asked(dtypes, expected, monkeypatch):
    """By the name that torch wants of every backend."""
    backend = SimpleNamespace(get_amp_supported_dtype=lambda: dtypes)
    monkeypatch.setattr(torch, "outside", backend, raising=False)

    assert choose_precision(SimpleNamespace(type="outside")) == expected


def test_the_simulated_gpu_computes_in_bfloat16():
    """It says so by that name."""
    from lightning_oom.testing import SimulatedGPU

    assert choose_precision(SimulatedGPU().device) == "bf16-mixed"


# -- losses
def outside_function(x, y):
    """A loss that a step calls."""
    return functional.binary_cross_entropy(x, y)


def outside_function_of_logits(x, y):
    """The right one."""
    return functional.binary_cross_entropy_with_logits(x, y)


class Plain(nn.Module):
    """Nothing to find."""

    def loss(self, x, y):
        """On logits."""
        return outside_function_of_logits(x, y) + nn.BCEWithLogitsLoss()(x, y)


class InAMethod(nn.Module):
    """The functional form."""

    def loss(self, x, y):
        """On probabilities."""
        return functional.binary_cross_entropy(x.sigmoid(), y)


class InAFunction(nn.Module):
    """One call away, inside of a comprehension."""

    def loss(self, x, y):
        """On probabilities."""
        return sum(outside_function(row, y) for row in x)


class MadeInAMethod(nn.Module):
    """No child, but an object of the step."""

    @property
    def loss(self):
        """On probabilities."""
        return nn.BCELoss()


class SwitchedOff(nn.Module):
    """What torch's own advice says."""

    def loss(self, x, y):
        """In 32 bits."""
        with torch.autocast("cuda", enabled=False):
            return functional.binary_cross_entropy(x.float().sigmoid(), y)


class ChildSwitchedOff(nn.Module):
    """The same around a child."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.BCELoss()

    def loss(self, x, y):
        """In 32 bits."""
        with torch.autocast("cuda", enabled=False):
            return self.criterion(x.float().sigmoid(), y)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Plain, []),
        (SwitchedOff, []),
        (ChildSwitchedOff, []),
        (InAMethod, ["InAMethod.loss (binary_cross_entropy)"]),
        (InAFunction, ["InAFunction.loss (binary_cross_entropy)"]),
        (MadeInAMethod, ["MadeInAMethod.loss (BCELoss)"]),
        (nn.BCELoss, ["0 (BCELoss)"]),
        (lambda: nn.ModuleDict({"loss": nn.BCELoss()}), ["0.loss (BCELoss)"]),
    ],
)
def test_losses_on_probabilities_are_found(make, expected):
    """By child, by method, by a function of the user's; each place once."""
    assert find_unsafe_losses(nn.Sequential(make(), nn.Linear(1, 1))) == expected


def test_a_loss_alone_is_found():
    """Without a module around it."""
    assert find_unsafe_losses(nn.BCELoss()) == ["the module itself (BCELoss)"]


def test_large_library_models_have_none():
    """No false alarm on what does not take such a loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)

    assert find_unsafe_losses(transformers.GPT2LMHeadModel(config)) == []


# -- the watch
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["loss", "gradient", "sparse gradient"])
def test_what_is_not_finite_is_seen(bad, place):
    """In a loss of the window, or in any gradient."""
    watch = NonFiniteWatch()
    sparse = torch.sparse_coo_tensor(
        [[0, 0]], [1.0, bad if place == "sparse gradient" else 1.0], (4,), check_invariants=False
    )
    gradients = [torch.zeros(3), torch.tensor([bad if place == "gradient" else 1.0]), sparse]
    watch.note_loss(torch.tensor(bad if place == "loss" else 1.0))
    watch.note_loss(torch.tensor(1.0))

    assert not watch.is_update_finite(gradients)
    assert watch.take_failure() == "a loss or gradient was not finite"
    assert watch.take_failure() is None
    assert watch.is_update_finite([torch.ones(1)])


def test_nothing_to_look_at_is_finite():
    """No loss, no gradients, empty ones."""
    watch = NonFiniteWatch()

    assert watch.is_update_finite([])
    assert watch.is_update_finite([torch.zeros(0)])
    assert watch.take_failure() is None


def test_losses_are_left_out_where_ranks_see_their_own():
    """Gradients are those of all ranks; a loss is not."""
    watch = NonFiniteWatch(losses=False)
    watch.note_loss(torch.tensor(math.nan))

    assert watch.is_update_finite([torch.ones(1)])


def failing_after(scales, **options):
    """The number of updates after which the watch gives up; ``None`` for never."""
    watch = NonFiniteWatch(**options)
    for count, scale in enumerate(scales):
        watch.note_scale(scale)
        if watch.take_failure() is not None:
            return count
    return None


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([2.0**n for n in range(16, -1, -1)], None),
        ([2.0**n for n in range(16, -3, -1)], 17),
        ([2.0**n for n in range(40, 0, -1)], 20),
        ([2.0**16, 2.0**15, 2.0**15] * 30, None),
        ([1.0] * 100, None),
    ],
)
def test_a_scaler_that_searches_is_told_from_one_that_finds_nothing(scales, expected):
    """A scale below 1, or 20 skipped updates in a row."""
    assert failing_after(scales) == expected


# -- the switch
def walk(switch, steps, *, bad=()):
    """Whether each step ran in mixed precision."""
    seen = []
    for step in range(steps):
        seen.append(switch.is_mixed)
        if step in bad and switch.is_mixed:
            switch.back_off(step + 1)
        switch.advance(step + 1)
    return seen


def test_a_back_off_lasts_for_good_or_for_n_steps():
    """The step that fails is mixed itself."""
    ended, paused = PrecisionSwitch(), PrecisionSwitch(back_off_steps=2)
    ended.request()
    paused.request()

    assert walk(ended, 6, bad=[1]) == [True, True, False, False, False, False]
    assert walk(paused, 6, bad=[1]) == [True, True, False, False, True, True]
    ended.request()
    assert not ended.is_mixed


def test_a_request_does_not_end_a_back_off():
    """Memory running short again is no reason to compute with numbers that do not carry it."""
    switch = PrecisionSwitch(back_off_steps=3)
    switch.request()
    switch.back_off(4)
    switch.request()

    assert not switch.is_mixed


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("bad", [(), (1,)])
def test_a_saved_switch_goes_on_where_it_was(steps, bad):
    """At each moment."""
    switch, copy = (PrecisionSwitch(back_off_steps=steps) for _ in range(2))
    switch.request()
    walk(switch, 3, bad=bad)
    copy.load_state_dict(switch.state_dict())

    assert copy.state_dict() == switch.state_dict()
    assert walk(copy, 6) == walk(switch, 6)


def test_a_state_of_another_version_is_ignored():
    """It may mean anything."""
    switch = PrecisionSwitch()
    switch.load_state_dict({"version": 0, "is_mixed": True})

    assert not switch.is_mixed
