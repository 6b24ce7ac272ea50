"""Every change has a way back, taken once, in reverse order, whatever fails."""

from __future__ import annotations

import pytest

from lightning_oom.undo import Undo, UndoStack, shadow


class _Owner:
    def work(self):
        return "class"


def test_a_shadow_is_removed_without_a_trace():
    """What the class gives is visible again and the instance's dictionary is empty."""
    owner = _Owner()
    undo = shadow(owner, "work", lambda: "shadow")
    assert owner.work() == "shadow"

    undo()

    assert owner.work() == "class"
    assert vars(owner) == {}


def test_an_earlier_shadow_comes_back_as_the_same_object():
    """Undoing restores the very object that was there."""
    owner = _Owner()
    first = lambda: "first"  # noqa: E731 - identity is what is tested
    owner.work = first

    shadow(owner, "work", lambda: "second")()

    assert vars(owner)["work"] is first


def test_somebody_elses_later_change_is_left_alone():
    """An undo does not throw away what another put on top."""
    owner = _Owner()
    undo = shadow(owner, "work", lambda: "ours")
    theirs = lambda: "theirs"  # noqa: E731
    owner.work = theirs

    undo()

    assert vars(owner)["work"] is theirs


def test_shadows_may_be_undone_in_any_order():
    """One that was undone below another does not come back with the other's undo."""
    owner = _Owner()
    undos = [shadow(owner, "work", lambda layer=layer: layer) for layer in range(3)]

    undos[1]()
    undos[0]()
    assert owner.work() == 2
    undos[2]()

    assert owner.work() == "class"
    assert vars(owner) == {}


def test_undoing_twice_does_nothing():
    """A second call must not take back what was set since."""
    owner = _Owner()
    undo = shadow(owner, "work", lambda: "shadow")
    undo()
    owner.work = undo

    undo()

    assert owner.work is undo


def test_a_stack_runs_every_undo_in_reverse_and_raises_the_first_error():
    """One failing undo does not keep the others from running."""
    order = []
    stack = UndoStack()

    def fail():
        order.append("fails")
        raise KeyError("broken")

    stack.push(Undo(lambda: order.append("first")))
    stack.push(Undo(fail))
    stack.push(Undo(lambda: order.append("last")))

    with pytest.raises(KeyError, match="broken"):
        stack()

    assert order == ["last", "fails", "first"]
    assert len(stack) == 0
