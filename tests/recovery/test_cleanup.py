"""After a failed attempt nothing of it may stay alive."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref

import pytest
import torch

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.recovery.cleanup import (
    clear_frames,
    collect_garbage,
    drop_traceback,
    related_errors,
)


class Attempt:
    """Fails with a tensor in a frame, and remembers it weakly."""

    def __init__(self):
        self.alive: list[weakref.ref] = []

    def fail(self, message="CUDA out of memory."):
        """Raise with one tensor in the frame."""
        activation = torch.zeros(8)
        self.alive.append(weakref.ref(activation))
        raise OutOfMemoryError(message)

    def fail_from(self):
        """Raise from an error, with a tensor in each frame."""
        outer = torch.ones(8)
        self.alive.append(weakref.ref(outer))
        try:
            self.fail()
        except RuntimeError as error:
            raise ValueError("outer") from error

    def fail_while_handling(self):
        """Raise while an error is handled, with a tensor in each frame."""
        try:
            self.fail()
        except RuntimeError:
            self.fail("again")

    def num_alive(self):
        """Tensors of the frames that are still held."""
        return sum(ref() is not None for ref in self.alive)


def caught_from(failing):
    """The error, stored as careless code stores it."""
    try:
        failing()
    except Exception as error:
        return error
    pytest.fail("it must raise")


def test_stored_exception_keeps_the_activations():
    """The trap itself (pytorch/pytorch#27600): while the error lives, so does the tensor."""
    attempt = Attempt()
    error = caught_from(attempt.fail)

    gc.collect()

    assert attempt.num_alive() == 1
    del error
    gc.collect()
    assert attempt.num_alive() == 0


@pytest.mark.parametrize("way", ["fail", "fail_from", "fail_while_handling"])
def test_clear_frames_frees_the_tensors_of_the_whole_chain(way):
    """The error stays printable and can be raised again, but its frames hold nothing."""
    attempt = Attempt()
    error = caught_from(getattr(attempt, way))
    before = traceback.format_exception(error)

    clear_frames(error)

    assert attempt.num_alive() == 0
    assert before == traceback.format_exception(error)
    with pytest.raises(type(error)):
        raise error


@pytest.mark.parametrize("way", ["fail", "fail_from", "fail_while_handling"])
def test_drop_traceback_frees_the_tensors_and_takes_the_tracebacks(way):
    """No error of the chain has a traceback left."""
    attempt = Attempt()
    error = caught_from(getattr(attempt, way))

    drop_traceback(error)

    assert attempt.num_alive() == 0
    assert all(found.__traceback__ is None for found in related_errors(error))


def test_with_traceback_none_is_not_enough():
    """Why the chain is walked: the cause holds its own frames."""
    attempt = Attempt()
    error = caught_from(attempt.fail_from).with_traceback(None)

    assert attempt.num_alive() == 2
    clear_frames(error)
    assert attempt.num_alive() == 0


def test_running_frames_are_left_alone():
    """Inside the ``except`` block the caller's own variables survive."""
    mine = torch.zeros(2)
    try:
        Attempt().fail()
    except RuntimeError as error:
        drop_traceback(error)

    assert mine.sum() == 0


def test_interpreter_forgets_the_error(monkeypatch):
    """A notebook's ``sys.last_value`` does not keep the failed attempt (ipython#11572)."""
    attempt = Attempt()
    error = caught_from(attempt.fail_from)
    for name in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, name, error.__cause__, raising=False)
    monkeypatch.setattr(sys, "last_traceback", error.__cause__.__traceback__, raising=False)
    monkeypatch.setattr(sys, "last_type", type(error), raising=False)

    drop_traceback(error)
    del error

    assert sys.last_value is None
    assert sys.last_traceback is None
    assert sys.last_type is None
    assert attempt.num_alive() == 0


def test_another_remembered_error_is_left_alone(monkeypatch):
    """What the debugger remembers of another error is not ours to drop."""
    other = ValueError("other")
    monkeypatch.setattr(sys, "last_value", other, raising=False)

    drop_traceback(caught_from(Attempt().fail))

    assert sys.last_value is other


def test_related_errors_ends_on_a_circle():
    """Causes in a circle, the compiler's inner error and group members are each seen once."""
    first, second, third, fourth = (RuntimeError(str(i)) for i in range(4))
    first.__cause__, second.__context__ = second, first
    second.inner_exception = third
    third.exceptions = (fourth, first)

    assert [str(error) for error in related_errors(first)] == ["0", "1", "2", "3"]


def test_collect_garbage_frees_cycles():
    """A tensor that only a reference cycle holds is freed."""
    holder = [torch.zeros(4)]
    holder.append(holder)
    alive = weakref.ref(holder[0])
    gc.disable()
    try:
        del holder
        assert alive() is not None

        assert collect_garbage() > 0
    finally:
        gc.enable()

    assert alive() is None
