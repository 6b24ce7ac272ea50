"""A recorded update goes on exactly where it stopped."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.recording import RecordedUpdate
from lightning_oom.recovery.resume import ResumeImpossibleError, UpdateState
from lightning_oom.testing import fail_at

if TYPE_CHECKING:
    from collections.abc import Callable


def start() -> tuple[torch.nn.Parameter, RecordedUpdate]:
    """Return a parameter of ones and a record of the update of its optimizer."""
    weight = torch.nn.Parameter(torch.ones(3))
    return weight, RecordedUpdate(UpdateState(torch.optim.SGD([weight])))


def fail(record: RecordedUpdate, program: Callable[[], object], n: int) -> None:
    """Run a program whose n-th allocation fails."""
    with pytest.raises(OutOfMemoryError), torch.no_grad(), fail_at(n), record.watch():
        program()
    record.note_failure()


def test_writes_are_done_once_and_numbers_are_remembered() -> None:
    """A number read before its tensor was overwritten is what it was then."""
    weight, record = start()
    seen = []

    def program() -> None:
        before = weight.sum().item()
        weight.mul_(2)
        seen.append(before)
        weight.add_(torch.full((3,), before))

    fail(record, program, 2)
    assert record.has_moved
    with torch.no_grad(), record.watch():
        program()
    assert seen == [3.0, 3.0]
    assert weight.tolist() == [5.0, 5.0, 5.0]


def test_temporaries_survive_that_are_still_needed() -> None:
    """A temporary made from a value that was overwritten later is handed out as it was."""
    weight, record = start()

    def program() -> None:
        gone = weight + 1
        kept = gone * 3
        del gone
        view = kept.view(3, 1)
        del kept
        weight.zero_()
        weight.add_((view + 1).view(3))

    fail(record, program, 3)
    with torch.no_grad(), record.watch():
        program()
    assert weight.tolist() == [7.0, 7.0, 7.0]


def test_nothing_is_held_before_a_failure() -> None:
    """While nothing fails, a temporary dies when the program lets go of it."""
    weight, record = start()
    with torch.no_grad(), record.watch():
        made = weight + 1
        ref = weakref.ref(made)
        del made
        assert ref() is None


def test_what_was_handed_out_is_held_no_longer() -> None:
    """After a resumed update the record holds no tensor."""
    weight, record = start()
    refs = []

    def program() -> None:
        made = weight + 1
        refs.append(weakref.ref(made))
        weight.add_(made * 2)

    fail(record, program, 2)
    assert refs[0]() is not None
    with torch.no_grad(), record.watch():
        program()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_another_program_is_refused() -> None:
    """An update that makes other operations than the first time is not resumed."""
    weight, record = start()

    def program(*, again: bool) -> None:
        weight.mul_(2)
        _ = weight.neg() if again else weight.abs()
        weight.add_(weight.exp())

    fail(record, lambda: program(again=False), 2)
    with pytest.raises(ResumeImpossibleError, match="abs"), torch.no_grad(), record.watch():
        program(again=True)


def test_writes_to_lists_raise_versions() -> None:
    """Below the mode a write to a list is as visible to autograd as without it."""
    weight, record = start()
    with torch.no_grad(), record.watch():
        torch._foreach_add_([weight], 1)
    assert weight._version == 1
