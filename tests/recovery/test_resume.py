"""An interrupted update is finished by counting its writes, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_oom.recovery.resume import (
    CountedUpdate,
    ResumeImpossibleError,
    ResumeMode,
    UpdateState,
)


def adam() -> tuple[torch.nn.Parameter, torch.optim.Adam]:
    """Return a parameter and an optimizer that has made a step."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return weight, optimizer


def test_only_missing_writes_are_done() -> None:
    """Of two writes to a tensor, the first of which is done, the second is done."""
    weight, optimizer = adam()
    before = UpdateState(optimizer)
    weight.data = torch.ones(3)
    with torch.no_grad():
        weight.mul_(3)
    assert before.writes() == {id(weight): 1}
    with torch.no_grad(), ResumeMode(before.tensors, before.writes()):
        weight.mul_(3)
        weight.add_(torch.ones(3))
    assert weight.tolist() == [4.0, 4.0, 4.0]


def test_a_lost_value_may_not_reach_a_missing_write() -> None:
    """A temporary of a value that was overwritten since is refused where it is written."""
    weight, optimizer = adam()
    before = UpdateState(optimizer)
    with torch.no_grad():
        weight.mul_(3)
    moment = optimizer.state[weight]["exp_avg"]
    with torch.no_grad(), ResumeMode(before.tensors, before.writes()):
        lost = weight + 1
        weight.mul_(3)
        with pytest.raises(ResumeImpossibleError, match="overwritten"):
            moment.add_(lost)


def test_a_lost_number_spares_other_parameters() -> None:
    """Where numbers stay with their parameter, one that was overwritten harms no other."""
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    before = UpdateState(torch.optim.SGD([first, second]))
    with torch.no_grad():
        first.mul_(3)
    done, owners = before.writes(), before.owners()
    with torch.no_grad(), ResumeMode(before.tensors, dict(done), owners):
        first.norm().item()
        first.mul_(3)
        second.add_(1)
        with pytest.raises(ResumeImpossibleError, match="overwritten"):
            first.add_(1)
    with torch.no_grad(), ResumeMode(before.tensors, dict(done)):
        norm = first.norm()
        with pytest.raises(ResumeImpossibleError, match="number"):
            norm.item()
    assert (first.tolist(), second.tolist()) == ([3.0] * 3, [2.0] * 3)


def test_the_state_returns_to_its_entries() -> None:
    """Numbers and replaced tensors come back; what the step has made goes."""
    weight, optimizer = adam()
    other = torch.nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [other]})
    state: dict[str, Any] = optimizer.state[weight]
    state["count"] = 3
    entries = dict(state)
    before = UpdateState(optimizer)
    assert not before.has_new_state()
    state["count"] = 4
    state["exp_avg"] = torch.zeros(3)
    state["more"] = torch.zeros(3)
    optimizer.state[other]["exp_avg"] = torch.zeros(1)
    assert before.has_new_state()
    before.rewind()
    assert state.keys() == entries.keys()
    assert all(state[name] is entry for name, entry in entries.items())
    assert set(optimizer.state) == {weight}


def test_a_counted_update_that_made_state_is_lost() -> None:
    """Nobody has counted the writes to state that is made in the same step."""
    weight, optimizer = adam()
    update = CountedUpdate(UpdateState(optimizer))
    with torch.no_grad():
        weight.add_(1)
    optimizer.state[weight]["more"] = torch.zeros(3)
    update.note_failure()
    assert update.has_moved
    assert update.lost is not None


def test_a_fused_update_counts_as_moved() -> None:
    """Where writes leave no trace, none is ruled out."""
    _, optimizer = adam()
    update = CountedUpdate(UpdateState(optimizer), is_blind=True)
    update.note_failure()
    assert update.has_moved
    assert update.lost is not None
