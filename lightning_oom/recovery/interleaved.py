"""An optimizer that calls its closure while it updates (``LBFGS``) runs its step again, exactly.

Its closures are guarded one by one, like any other step. What is left is its own algebra between
them, when parameters have already moved. So everything that the whole step may change is kept:
parameters and optimizer state beside the parts of a snapshot. After an OOM all of it is put back and
the step runs again from its first closure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_oom.errors import add_note
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.taking import take_patiently
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.snapshot import Snapshot

__all__ = ["InterleavedGuard", "is_interleaved"]


def is_interleaved(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer updates parameters between calls of its closure.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_interleaved(torch.optim.LBFGS([weight])), is_interleaved(torch.optim.Adam([weight]))
        (True, False)
    """
    return isinstance(optimizer, torch.optim.LBFGS)


class InterleavedGuard:
    """Guards the ``step`` of one optimizer for which :func:`is_interleaved` holds.

    Args:
        optimizer: The optimizer.
        snapshot: What closures may change. Its parts must be of this guard alone, since the guarded
            closures take theirs meanwhile.
        classify: Gives the cause of an error that may be recovered from, else ``None``.
        release: Collects garbage and empties caches.
        report: Called with a sentence after a step that was repeated.

    Note:
        Cost: one copy of parameters, gradients and three vectors of state per step, in host memory.
        A step of this kind runs up to ``max_iter`` forwards and backwards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        snapshot: Snapshot,
        classify: Callable[[Exception], OOMCause | None],
        release: Callable[[], object],
        report: Callable[[str], None],
    ) -> None:
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.classify = classify
        self.release = release
        self.report = report
        self._update: Callable[..., Any] = optimizer.step

    def install(self) -> Undo:
        """Put the guard in front of ``optimizer.step``; return its undo."""
        self._update = self.optimizer.step

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self.step(closure, **kwargs)

        vars(step).update(vars(getattr(self._update, "__func__", self._update)))
        undo = shadow(self.optimizer, "step", step)

        def remove() -> None:
            undo()
            self.__dict__.pop("_update", None)

        return Undo(remove)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the step; once more, from where it began, if it runs out of memory."""
        saved = take_patiently(self.snapshot, classify=self.classify, release=self.release)
        state = self._keep()
        try:
            return self._update(closure, **kwargs)
        except Exception as error:
            if self.classify(error) is None:
                raise
            clear_frames(error)
            lost = saved.restore()
            state.restore()
            if lost:
                add_note(error, f"lightning_oom: could not be put back: {', '.join(lost)}")
            if lost or _has_been_given_up(error):
                raise
        self.release()
        try:
            result = self._update(closure, **kwargs)
        except Exception as error:
            clear_frames(error)
            saved.restore()
            state.restore()
            add_note(error, "lightning_oom: parameters and optimizer are as before the step.")
            raise
        self.report("an optimizer step ran out of memory and was repeated from its beginning")
        return result

    def _keep(self) -> _StepState:
        try:
            return _StepState(self.optimizer)
        except Exception as error:
            if self.classify(error) is None:
                raise
            clear_frames(error)
        self.release()
        return _StepState(self.optimizer)


def _has_been_given_up(error: Exception) -> bool:
    """Whether a closure's own guard has tried everything already and said so."""
    return any("lightning_oom" in note for note in getattr(error, "__notes__", ()))


class _StepState:
    """Parameters, gradients and optimizer state before a step, on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [
            (parameter, _copy(parameter), None if parameter.grad is None else _copy(parameter.grad))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._state = {
            parameter: {name: _keep(entry) for name, entry in state.items()}
            for parameter, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, values, gradient in self._parameters:
            parameter.copy_(values)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        state = self._optimizer.state
        state.clear()
        for parameter, entries in self._state.items():
            state[parameter] = {name: _give(entry) for name, entry in entries.items()}


class _Kept:
    """A tensor of the state: its values on the host, and where it was."""

    __slots__ = ("device", "values")

    def __init__(self, tensor: Tensor) -> None:
        self.values, self.device = _copy(tensor), tensor.device


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _keep(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return _Kept(entry)
    return list(entry) if isinstance(entry, list) else entry  # their tensors are never written to


def _give(entry: Any) -> Any:
    if isinstance(entry, _Kept):
        return entry.values.to(entry.device, copy=True)
    return list(entry) if isinstance(entry, list) else entry
