"""Errors that Python code raises in a backward pass on the simulated GPU come out as they are."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import SimulatedGPU, fail_at

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def gpu() -> torch.device:
    """A simulated GPU without a limit."""
    return SimulatedGPU().device


class OnPurposeError(Exception):
    """Raised by the tests."""


def fail() -> None:
    """Raise."""
    raise OnPurposeError


def in_backward() -> bool:
    """Say whether the autograd engine is running."""
    return torch._C._current_graph_task_id() != -1


def hooked(x: torch.Tensor) -> torch.Tensor:
    """Fail in a hook of the gradient."""
    y = x * 2
    y.register_hook(lambda gradient: fail())
    return y


def recomputed(x: torch.Tensor) -> torch.Tensor:
    """Fail where a checkpoint recomputes."""

    def body(x: torch.Tensor) -> torch.Tensor:
        if in_backward():
            fail()
        return (x * 2).exp()

    return checkpoint(body, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [hooked, recomputed])
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda loss, x: loss.backward(), id="backward"),
        pytest.param(torch.autograd.grad, id="grad"),
    ],
)
def test_an_error_in_the_engine_is_raised(
    gpu: torch.device, forward: Callable[[torch.Tensor], torch.Tensor], run: Callable[..., Any]
) -> None:
    """The error arrives with its class and without another in front, and the next pass runs."""
    x = torch.ones(4, device=gpu, requires_grad=True)
    loss = forward(x).sum()

    with pytest.raises(OnPurposeError) as caught:
        run(loss, x)

    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_each_allocation_of_a_step_can_fail(gpu: torch.device) -> None:
    """Forward and backward, one allocation after the other, then the step that succeeds."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)).to(gpu)
    x = torch.ones(16, 8, device=gpu)

    def step() -> bool:
        model.zero_grad()
        try:
            model(x).mean().backward()
        except OutOfMemoryError:
            return False
        return True

    outcome = []
    for number in range(1, 100):
        with fail_at(number) as fault:
            outcome.append(step())
        if not fault.raised:
            break

    assert outcome == [False] * (len(outcome) - 1) + [True]
    assert len(outcome) > 8


def test_a_raised_error_is_not_kept(gpu: torch.device) -> None:
    """Once it was handled, nothing of the backward pass stays alive."""
    x = torch.ones(4, device=gpu, requires_grad=True)
    with pytest.raises(OnPurposeError) as caught:
        hooked(x).sum().backward()
    error = weakref.ref(caught.value)
    del caught
    gc.collect()

    assert error() is None
