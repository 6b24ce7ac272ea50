"""Nothing that an interrupted backward has added is counted twice, and nothing is lost."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_oom.recovery.gradients import GradientGuard


class _StopError(RuntimeError):
    pass


def _layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def _interrupt(model, x):
    """Run a backward that stops before it reaches the first layer."""

    def stop(grad):
        raise _StopError

    hidden = model[0](x)
    hidden.register_hook(stop)
    with pytest.raises(_StopError):
        model[2](model[1](hidden)).mean().backward()


def _grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_an_interrupted_first_micro_step_is_dropped():
    """Without earlier micro-steps, whatever was added goes."""
    model, x = _layers(), torch.randn(3, 4)
    guard = GradientGuard(model.parameters())
    guard.mark()
    _interrupt(model, x)
    assert any(g is not None for g in _grads(model))

    assert guard.reset() == ()

    assert all(g is None for g in _grads(model))


def test_finished_gradients_of_a_window_are_set_aside_and_put_back():
    """The retry's contribution to a finished parameter is dropped; the window's sum is exact."""
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    wanted_model = _layers()
    for x in (first, second):
        wanted_model(x).mean().backward()
    model = _layers()
    model(first).mean().backward()
    guard = GradientGuard(model.parameters())
    guard.mark()
    _interrupt(model, second)

    assert guard.reset() == ()
    model(second).mean().backward()
    guard.merge()

    assert all(map(torch.equal, _grads(wanted_model), _grads(model)))


def test_several_interruptions_in_one_window_are_exact():
    """A second failed attempt finds the first one's finished gradients set aside."""
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    wanted_model = _layers()
    for x in (first, second):
        wanted_model(x).mean().backward()
    model = _layers()
    model(first).mean().backward()
    guard = GradientGuard(model.parameters())
    guard.mark()
    for _ in range(3):
        _interrupt(model, second)
        assert guard.reset() == ()
    model(second).mean().backward()
    guard.merge()

    assert all(map(torch.equal, _grads(wanted_model), _grads(model)))


def test_doing_nothing_would_count_twice():
    """The case that the guard exists for: without it, the upper layers count the step twice."""
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    wanted_model = _layers()
    for x in (first, second):
        wanted_model(x).mean().backward()
    model = _layers()
    model(first).mean().backward()
    _interrupt(model, second)
    model(second).mean().backward()

    assert not all(map(torch.equal, _grads(wanted_model), _grads(model)))


def test_a_gradient_with_several_contributions_is_reported_as_lost():
    """Re-entrant checkpointing adds more than once; an interrupted one cannot be told apart."""
    model, x = _layers(), torch.randn(3, 4, requires_grad=True)

    def run():
        return (
            checkpoint(model[0], x, use_reentrant=True)
            + checkpoint(model[0], x, use_reentrant=True)
        ).sum()

    run().backward()
    guard = GradientGuard(model[0].parameters())
    guard.mark()
    run().backward()

    lost = guard.reset()

    assert len(lost) == 1
    assert "several contributions" in lost[0]


def test_gradients_that_die_are_not_kept_alive():
    """After gradients were zeroed, a mark holds none of them."""
    model, x = _layers(), torch.randn(3, 4)
    model(x).mean().backward()
    dying = weakref.ref(model[0].weight.grad)
    model.zero_grad(set_to_none=True)
    guard = GradientGuard(model.parameters())

    guard.mark()
    gc.collect()

    assert dying() is None


def test_a_parameter_that_is_unfrozen_later_is_watched():
    """Nothing but ``requires_grad`` at the time of the backward decides who has a gradient."""
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    wanted_model = _layers()
    for x in (first, second):
        wanted_model(x).mean().backward()
    model = _layers()
    model[2].requires_grad_(False)
    guard = GradientGuard(model.parameters())
    model[2].requires_grad_(True)
    model(first).mean().backward()
    guard.mark()
    _interrupt(model, second)

    assert guard.reset() == ()
    model(second).mean().backward()
    guard.merge()

    assert all(map(torch.equal, _grads(wanted_model), _grads(model)))


def test_a_parameter_that_a_backward_did_not_use_is_no_lost_one():
    """What a layer's gradient usually gets is learnt from a backward that reached the layer."""
    model, x = _layers(), torch.randn(3, 4)
    guard = GradientGuard(model.parameters())
    model(x).mean().backward()
    for layers in (model[1:], model):  # the first backward leaves layer 0 out
        guard.mark()
        layers(x).mean().backward()
        guard.learn()
        guard.forget()
    guard.mark()
    model(x).mean().backward()

    assert guard.reset() == ()
