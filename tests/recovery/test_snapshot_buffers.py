"""Buffers: values, replaced objects, new names, and what cannot be put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_oom.recovery.snapshot import Buffers


class Keeps(nn.Module):
    """A module with a moving average, a table and an optional buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("optional", None)


def test_running_statistics_come_back() -> None:
    """Batch normalisation writes to its buffers without moving a version counter."""
    module = Keeps()
    buffers = Buffers(module)
    buffers.learn(buffers.take())
    saved = buffers.take()
    mean = module.norm.running_mean
    module.norm(torch.randn(8, 3))

    for _ in range(2):
        assert saved.restore() == ()
        assert module.norm.running_mean is mean
        assert mean.tolist() == [0.0, 0.0, 0.0]
        assert int(module.norm.num_batches_tracked) == 0
        module.norm(torch.randn(8, 3))


def test_a_replaced_buffer_is_the_old_object_again() -> None:
    """``self.average = new`` is undone by binding the old tensor."""
    module = Keeps()
    before = module.average
    saved = Buffers(module).take()
    module.average = module.average + 1

    assert saved.restore() == ()

    assert module.average is before


def test_buffers_that_an_attempt_registered_are_gone() -> None:
    """Also on a module that had none, and from the list of those not saved."""
    module = nn.Sequential(nn.Linear(2, 2), Keeps())
    saved = Buffers(module).take()
    module[0].register_buffer("mask", torch.ones(2), persistent=False)
    del module[1].table
    module[1].register_buffer("table", torch.ones(1))
    module[1].optional = torch.ones(1)

    saved.restore()

    assert [name for name, _ in module.named_buffers()] == [
        "1.average", "1.table", "1.norm.running_mean", "1.norm.running_var",
        "1.norm.num_batches_tracked",
    ]  # fmt: skip
    assert module[1].table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert module[1].optional is None
    module[0].register_buffer("mask", torch.ones(2))
    assert "0.mask" in module.state_dict()


def test_only_what_moves_is_copied_once_a_step_was_seen() -> None:
    """Norm layers always; others when the step changed them, by value or by version."""
    module = Keeps()
    buffers = Buffers(module)
    saved = buffers.take()
    everything = buffers.held_bytes
    module.average.data += 1  # moves no version counter
    buffers.learn(saved)
    buffers.take()

    norm_bytes = 4 * 3 + 4 * 3 + 8
    assert everything == norm_bytes + 4 * 3 + 4 * 4
    assert buffers.held_bytes == norm_bytes + 4 * 3


def test_a_buffer_that_moves_against_expectation_is_lost_once() -> None:
    """It is named, and copied from the next snapshot on."""
    module = Keeps()
    buffers = Buffers(module)
    buffers.learn(buffers.take())
    saved = buffers.take()
    module.table.add_(1)

    assert saved.restore() == ("table",)

    saved = buffers.take()
    module.table.add_(1)
    assert saved.restore() == ()
    assert module.table.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_a_later_step_moves_is_learned_as_well() -> None:
    """A buffer that changes every second step is copied after its first change."""
    module = Keeps()
    buffers = Buffers(module)
    buffers.learn(buffers.take())
    saved = buffers.take()
    module.table.add_(1)
    buffers.learn(saved)
    saved = buffers.take()
    module.table.add_(1)

    assert saved.restore() == ()
    assert module.table.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_need_not_be_finite(value: float) -> None:
    """NaN and infinity are put back like any number."""
    module = Keeps()
    module.average.fill_(value)
    saved = Buffers(module).take()
    module.average.zero_()

    assert saved.restore() == ()

    assert str(module.average.tolist()) == str([value] * 3)


def test_copies_overwritten_by_a_later_snapshot_are_refused() -> None:
    """Restoring from them would be silently wrong."""
    buffers = Buffers(Keeps())
    saved = buffers.take()
    buffers.take()

    with pytest.raises(RuntimeError, match="later snapshot"):
        saved.restore()


def test_a_snapshot_in_inference_mode_serves_the_next_training_step() -> None:
    """Copies are ordinary tensors, wherever they were first made."""
    module = Keeps()
    buffers = Buffers(module)
    with torch.inference_mode():
        buffers.take()
    saved = buffers.take()
    module.average.add_(1)

    assert saved.restore() == ()
    assert module.average.tolist() == [0.0, 0.0, 0.0]


def test_a_shape_that_changes_is_followed() -> None:
    """A queue that grows by replacement has another size at each snapshot."""
    module = Keeps()
    buffers = Buffers(module)
    buffers.take()
    module.average = torch.ones(5)
    saved = buffers.take()
    module.average.zero_()

    assert saved.restore() == ()
    assert module.average.tolist() == [1.0] * 5
