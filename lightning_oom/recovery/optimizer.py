"""An optimizer step that runs out of memory is finished, or raises before anything has moved.

Three situations, from the usual one to the last resort:

1. *Nothing was written yet* (state could not be made, or the first temporary): state that was half
   made is dropped, caches are emptied, the update runs again.
2. *Something was written*: the update is resumed after its last write (:mod:`.resume`).
3. *The update needs more at once than there is*: parameters are updated one by one, each with its
   own reservation, which needs the temporaries of one parameter instead of all.

Before an update, the device's counters are compared with an upper estimate of what it needs, so that
a shortage shows while nothing has changed. Nothing is allocated for that: the peak stays what it is.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.errors import add_note
from lightning_oom.memory import read_memory
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.resume import ResumeImpossibleError, ResumeMode, UpdateState
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OptimizerGuard", "is_guardable"]

_CHECK_EVERY = 16  # steps between two looks at the counters while memory is plentiful


def is_guardable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's update is one whose writes can be counted.

    True for torch's own optimizers except ``LBFGS``, which interleaves its update with calls of the
    closure. Others may write through ``.data``, which raises no version; their errors pass through.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_guardable(torch.optim.AdamW([weight])), is_guardable(torch.optim.LBFGS([weight]))
        (True, False)
    """
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


class OptimizerGuard:
    """Guards the ``step`` of one optimizer.

    Args:
        optimizer: One for which :func:`is_guardable` holds.
        device: Where its parameters are; its counters decide whether memory is reserved.
        release: Collects garbage and empties caches.
        report: Called with a sentence after an update that ran out of memory was finished.

    Note:
        Cost without an OOM: 0.1 us for each parameter and state tensor, and one look at the
        allocator's counters in 16 steps (in every step while memory is scarce).
        The closure runs before the update, as torch's own optimizers do it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        release: Callable[[], object],
        report: Callable[[str], None],
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.release = release
        self.report = report
        self._steps_until_check = 0
        self._update: Callable[..., Any] = optimizer.step

    def install(self) -> Undo:
        """Put the guard in front of ``optimizer.step``; return its undo."""
        self._update = self.optimizer.step

        # what others have noted on the method (a scheduler's mark, say) stays visible
        @functools.wraps(self._update)
        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self.step(closure, **kwargs)

        undo = shadow(self.optimizer, "step", step)

        def remove() -> None:
            undo()
            self.__dict__.pop("_update", None)

        return Undo(remove)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure, then the update, which ends whole or raises with nothing moved."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = UpdateState(self.optimizer)
        if self._reserve(state):
            error = self._try(self._update, kwargs)
            if error is None:
                return loss
            error = self._recover(state, kwargs)
        else:
            error = self._one_by_one(state, kwargs)
        if error is not None:
            try:
                raise error
            finally:
                error = None
        return loss

    # -- one update
    def _try(self, update: Callable[..., Any], kwargs: dict[str, Any]) -> Exception | None:
        """Run an update; return its out-of-memory error, which holds no frames' contents."""
        try:
            update(**kwargs)
        except Exception as error:
            cause = classify_oom(error)
            if cause is None or not cause.recoverable_on(self.device.type):
                raise
            clear_frames(error)
            return error
        return None

    def _recover(self, state: UpdateState, kwargs: dict[str, Any]) -> Exception | None:
        self._steps_until_check = 0
        done = state.writes()
        state.rewind()
        self.release()
        if done:
            return self._resume(state, done, kwargs)
        error = self._try(self._update, kwargs)
        if error is None:
            self.report(
                "an optimizer step ran out of memory before its first write and was repeated"
            )
            return None
        done = state.writes()
        state.rewind()
        self.release()
        if done:
            return self._resume(state, done, kwargs)
        return self._one_by_one(state, kwargs)

    def _resume(
        self, state: UpdateState, done: dict[int, int], kwargs: dict[str, Any], tries: int = 2
    ) -> Exception | None:
        error: Exception | None = None
        for _ in range(tries):
            mode = ResumeMode(state.persistent(), done)
            try:
                with mode:
                    error = self._try(self._update, kwargs)
                if error is None:
                    state.mend(mode)
            except ResumeImpossibleError as impossible:
                add_note(impossible, _MOVED)
                return impossible
            if error is None:
                self.report("an optimizer step ran out of memory and was resumed where it stopped")
                return None
            state.rewind()
            self.release()
        if error is not None:
            add_note(error, _MOVED)
        return error

    # -- reservation
    def _reserve(self, state: UpdateState) -> bool:
        """Return whether an ordinary update has the memory it may need."""
        self._steps_until_check -= 1
        if self._steps_until_check > 0:
            return True
        needed = self._needed_bytes(state)
        free = self._free_bytes()
        if free is not None and needed > free:
            self.release()
            free = self._free_bytes()
        if free is None or needed <= free // 2:
            self._steps_until_check = _CHECK_EVERY
        return free is None or needed <= free

    def _free_bytes(self) -> int | None:
        reading = read_memory(self.device)
        if reading.limit_bytes is None or reading.allocated_bytes is None:
            return None
        return reading.limit_bytes - reading.allocated_bytes

    def _needed_bytes(self, state: UpdateState) -> int:
        """Return an upper estimate of new state and temporaries of one ordinary update."""
        total = 0
        for group in self.optimizer.param_groups:
            sizes = [_nbytes(p) for p in group["params"] if p.grad is not None]
            fresh = sum(
                _nbytes(p) for p in group["params"] if p.grad is not None and p not in state.known
            )
            total += 2 * fresh
            if not group.get("fused"):
                total += _temporaries(group, sizes, self.device)
        return total

    # -- last resort
    def _one_by_one(self, state: UpdateState, kwargs: dict[str, Any]) -> Exception | None:
        """Update parameters one at a time; reserve what the dearest one needs before the first."""
        parameters = [
            (group, parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        largest = max((_nbytes(parameter) for _, parameter in parameters), default=0)
        fresh = sum(_nbytes(p) for _, p in parameters if p not in state.known)
        error = self._try(self._hold, {"num_bytes": 2 * largest + 2 * fresh})
        if error is not None:
            add_note(error, "lightning_oom: the optimizer step had not begun; nothing has moved.")
            return error
        for group, parameter in parameters:
            with self._only(group, parameter):
                own = UpdateState(self.optimizer)
                error = self._try(self._update, kwargs)
                if error is not None:
                    error = self._recover_one(own, kwargs)
            if error is not None:
                return error
        self.report("an optimizer step was done one parameter at a time for want of memory")
        return None

    def _hold(self, num_bytes: int) -> None:
        torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _recover_one(self, own: UpdateState, kwargs: dict[str, Any]) -> Exception | None:
        done = own.writes()
        own.rewind()
        self.release()
        if done:
            return self._resume(own, done, kwargs)
        error = self._try(self._update, kwargs)
        if error is not None:
            add_note(error, _MOVED)
        return error

    @contextlib.contextmanager
    def _only(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> Iterator[None]:
        """Let the optimizer see one parameter, updated without lists."""
        groups = self.optimizer.param_groups
        saved = [(g, g["params"], g.get("foreach"), g.get("fused")) for g in groups]
        for other in groups:
            other["params"] = [parameter] if other is group else []
            if "foreach" in other and not other.get("fused"):
                other["foreach"] = False
        try:
            yield
        finally:
            for other, parameters, foreach, _ in saved:
                other["params"] = parameters
                if "foreach" in other:
                    other["foreach"] = foreach


_MOVED = (
    "lightning_oom: the optimizer step had begun: some parameters hold this step's update and some "
    "do not. Continue from the last checkpoint."
)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _temporaries(group: dict[str, Any], sizes: list[int], device: torch.device) -> int:
    """Return bytes of temporaries: of all parameters with lists, of the largest one without."""
    foreach = group.get("foreach")
    if foreach is None:
        foreach = device.type in ("cuda", "xpu") and not group.get("differentiable")
    return 2 * (sum(sizes) if foreach else max(sizes, default=0))
