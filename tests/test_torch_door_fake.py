"""Private names of torch around fake tensors, each used once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_oom._torch import fake as door


def test_fake_tensors_have_shapes_and_no_numbers() -> None:
    """The same counterpart for the same tensor, and a shared storage stays shared."""
    mode = door.fake_mode()
    weight = torch.nn.Parameter(torch.ones(3, 4))

    fake = door.to_fake(mode, weight)
    view = door.to_fake(mode, weight.detach()[1:])

    assert door.is_fake(fake)
    assert not door.is_fake(weight)
    assert isinstance(fake, torch.nn.Parameter)
    assert door.to_fake(mode, weight) is fake
    assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata


def test_what_fake_tensors_cannot_follow_raises_one_of_the_errors() -> None:
    """A size that depends on numbers."""
    with door.fake_mode(), pytest.raises(door.FAKE_ERRORS):
        torch.ones(3).nonzero()


def test_known_values_are_those_of_real_tensors_and_constants() -> None:
    """Nothing is known of what was computed."""
    with door.fake_mode():
        constant, computed = torch.tensor(3), torch.ones(2)

    assert door.known_value(constant).item() == 3
    assert door.known_value(computed) is None
    real = torch.ones(1)
    assert door.known_value(real) is real


def test_numbers_can_be_read_below_a_fake_mode() -> None:
    """The mode is off inside of the block, and on again behind it."""
    real = torch.arange(3)
    with door.fake_mode():
        with door.without_any_mode():
            assert np.asarray((real + 1).tolist()).sum() == 6
        assert door.is_fake(torch.ones(1))


def test_a_running_node_knows_when_it_was_made() -> None:
    """Between the positions before and after; outside of a backward pass none runs."""
    seen: list[int | None] = []
    x = torch.ones(3, requires_grad=True)
    before = door.graph_position()
    y = x * 2
    after = door.graph_position()
    y.register_hook(lambda _: seen.append(door.running_node_position()))
    x.register_hook(lambda _: None)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(door.running_node_position())
            return grad

    z = Looks.apply(y)
    end = door.graph_position()
    z.sum().backward()

    assert before < after < end
    assert any(position is not None and after <= position < end for position in seen)
    assert door.running_node_position() is None


def test_a_compiled_module_gives_its_original() -> None:
    """Others are none."""
    linear = torch.nn.Linear(1, 1)

    assert door.compiled_original(torch.compile(linear, backend="eager")) is linear
    assert door.compiled_original(linear) is None


def test_failures_on_fake_tensors_are_raised_without_a_log(caplog) -> None:
    """And logged again after the undo."""
    undo = door.quiet_failures()
    with door.fake_mode(), pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(3, 4).mm(torch.ones(3, 4))
    assert not caplog.records
    undo()
    with door.fake_mode(), pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(3, 4).mm(torch.ones(3, 4))
    assert caplog.records
