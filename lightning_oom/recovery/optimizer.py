"""An optimizer step that runs out of memory is finished, or raises before anything has moved.

Four situations, from the usual one to the last resort:

1. *Nothing was written yet* (state could not be made, or the first temporary): state that was half
   made is dropped, caches are emptied, the update runs again.
2. *Something was written*: the update goes on where it stopped, either by counting its writes
   (:mod:`.resume`, which costs nothing before the failure) or by a record of its operations
   (:mod:`.recording`, for first steps and for the few updates whose writes cannot be counted).
3. *The update needs more at once than there is*: parameters are updated a few at a time, which
   needs the temporaries of the largest instead of all (:mod:`.portions`).
4. *Not even that fits*: the error is raised, and nothing has moved.

Before an update, the device's counters are compared with what it needs, so that a shortage shows
while nothing has changed. Nothing is allocated for that: the peak stays what it is.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import counts_list_writes, is_compiled, step_hooks
from lightning_oom.errors import add_note
from lightning_oom.memory import read_memory
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.recovery.cleanup import clear_frames
from lightning_oom.recovery.portions import only, portions_of, reserve
from lightning_oom.recovery.recording import RecordedUpdate
from lightning_oom.recovery.resume import CountedUpdate, ResumeImpossibleError, UpdateState
from lightning_oom.recovery.update_kinds import find_kind, is_guardable
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OptimizerGuard", "is_guardable"]

_CHECK_EVERY = 16  # steps between two looks at the counters while memory is plentiful
_ASK_AGAIN_AFTER = 256  # steps, where no allocator can be asked
_TRIES = 3  # how often an update is resumed
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class OptimizerGuard:
    """Guards the ``step`` of one optimizer.

    Args:
        optimizer: The optimizer. Unless :func:`is_guardable` holds, and where its step is compiled
            or its parameters are no plain tensors, its errors pass through with a note.
        device: Where its parameters are; its counters decide whether memory is reserved.
        release: Collects garbage and empties caches.
        report: Called with a sentence after an update that ran out of memory was finished.

    Note:
        Cost without an OOM: 0.1 us for each parameter and state tensor, and one look at the
        allocator's counters in 16 steps (in every step while memory is scarce). First steps,
        ``Adafactor`` with decay, ``SparseAdam``, ``ASGD`` and ``Rprop`` with lists are recorded,
        which costs some 10 us for each of their operations.
        Hooks of the optimizer run once, before and after all that; the closure runs before the
        update, as torch's own optimizers do it. An update under a dispatch mode that hides writes
        to lists from version counters (``FlopCounterMode``, say) is recorded too.
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
        self.kind = find_kind(optimizer)
        self._update: Callable[..., Any] = optimizer.step
        self._is_active = is_guardable(optimizer) and not is_compiled(optimizer.step)
        self._steps_until_check = 0
        self._is_scarce = False
        self._probe = torch.zeros(1)
        self._settled: set[int] = set()  # ids of parameters whose first step is over
        self._settled_key = (0, 0)  # of the state that they have

    def install(self) -> Undo:
        """Put the guard in front of ``optimizer.step``; return its undo."""
        update = self._update = self.optimizer.step

        # what others have noted on the method (a scheduler's mark, say) stays visible, and it is a
        # method, which is what a scheduler made later expects
        @functools.wraps(getattr(update, "__func__", update))
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self.step(*args, **kwargs)

        method = MethodType(step, self.optimizer)
        undo = shadow(self.optimizer, "step", method)

        def remove() -> None:
            self._is_active = False
            if vars(self.optimizer).get("step") is method:
                self.__dict__.pop("_update", None)  # else somebody's wrapper still comes through
            undo()

        return Undo(remove)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure, then the update, which ends whole or raises with nothing moved."""
        if not self._is_active:
            return self._pass_through(args, kwargs)
        before, after = step_hooks(self.optimizer)
        if any(before) or any(after):
            return self._step_with_hooks(before, after, args, kwargs)
        return self._step(*args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = self._run_closure(closure)
        self._run_update(kwargs)
        return loss

    def _run_closure(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _step_with_hooks(
        self,
        before: list[dict[int, Any]],
        after: list[dict[int, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the optimizer's hooks as torch does, outside of what may be repeated."""
        args = (self.optimizer, *args)
        for hook in [hook for hooks in before for hook in hooks.values()]:
            changed = hook(self.optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        options = dict(kwargs)
        loss = self._run_closure(args[1] if len(args) > 1 else options.pop("closure", None))
        taken = [(hooks, dict(hooks)) for hooks in (*before, *after)]
        for hooks, _ in taken:
            hooks.clear()
        try:
            self._run_update(options)
        finally:
            for hooks, entries in taken:
                hooks.update(entries)
        for hook in [hook for hooks in after for hook in hooks.values()]:
            hook(self.optimizer, args, kwargs)
        return loss

    def _pass_through(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._update(*args, **kwargs)
        except Exception as error:
            # an error of the closure has its own story
            if classify_oom(error) is not None and not getattr(error, "__notes__", None):
                add_note(error, _OPAQUE.format(type(self.optimizer).__name__))
            raise

    # -- one update
    def _run_update(self, kwargs: dict[str, Any]) -> None:
        before = UpdateState(self.optimizer)
        if not set(map(type, before.parameters)) <= _PLAIN:
            self._pass_through((), kwargs)
            return
        fresh = self._is_fresh(before)
        if self._has_room(before, fresh=fresh):
            attempt = self._attempt(before, fresh=fresh)
            error = self._try(attempt, kwargs)
            if error is not None:
                error = self._recover(attempt, error, kwargs)
        else:
            error = self._in_portions(before, kwargs)
        if error is not None:
            try:
                raise error
            finally:
                error = None
        if fresh:
            self._settled.update(map(id, before.trained))

    def _is_fresh(self, before: UpdateState) -> bool:
        """Whether a parameter steps for the first time: its state is yet to be made."""
        state = self.optimizer.state
        key = (id(state), len(state))
        if key[0] != self._settled_key[0] or key[1] < self._settled_key[1]:
            self._settled.clear()  # loaded, or emptied
        self._settled_key = key
        return not self._settled.issuperset(map(id, before.trained))

    def _attempt(self, before: UpdateState, *, fresh: bool) -> RecordedUpdate | CountedUpdate:
        """Return a new attempt, recorded where counting writes does not suffice."""
        groups = self.optimizer.param_groups
        if fresh:
            return RecordedUpdate(before)
        if all(group.get("fused") for group in groups):
            return CountedUpdate(before, is_blind=True)
        is_counted = (
            all(self.kind.is_counted(group, self.device) for group in groups)
            and not (self.kind.takes_sparse and any(g.is_sparse for g in before.gradients))
            and counts_list_writes(self._probe)
        )
        if not is_counted:
            return RecordedUpdate(before)
        return CountedUpdate(before, numbers_stay=self.kind.numbers_stay)

    def _try(
        self, attempt: RecordedUpdate | CountedUpdate, kwargs: dict[str, Any]
    ) -> Exception | None:
        """Run an update; return its out-of-memory error, which holds no frames' contents."""
        try:
            with attempt.watch():
                self._update(**kwargs)
        except ResumeImpossibleError as error:
            attempt.lost = str(error)
            clear_frames(error)
            return error
        except Exception as error:
            cause = classify_oom(error)
            if cause is None or not cause.recoverable_on(self.device.type):
                raise
            attempt.note_failure()
            clear_frames(error)
            return error
        return None

    def _recover(
        self, attempt: RecordedUpdate | CountedUpdate, error: Exception, kwargs: dict[str, Any]
    ) -> Exception | None:
        self._steps_until_check = 0
        if attempt.has_moved:
            return self._resume(attempt, error, kwargs)
        before = attempt.before
        del attempt  # with what it holds
        before.rewind()
        self.release()
        again = self._attempt(before, fresh=self._is_fresh(before))
        error_again = self._try(again, kwargs)
        if error_again is None:
            self.report(_REPEATED)
            return None
        if again.has_moved:
            return self._resume(again, error_again, kwargs)
        del again
        before.rewind()
        self.release()
        return self._in_portions(before, kwargs)

    def _resume(
        self, attempt: RecordedUpdate | CountedUpdate, error: Exception, kwargs: dict[str, Any]
    ) -> Exception | None:
        for _ in range(_TRIES):
            if attempt.lost is not None:
                break
            attempt.before.rewind()
            self.release()
            again = self._try(attempt, kwargs)
            if again is None:
                self.report(_RESUMED)
                return None
            if not isinstance(again, ResumeImpossibleError):
                error = again
        add_note(error, _MOVED if attempt.lost is None else f"{_MOVED} ({attempt.lost})")
        return error

    # -- memory
    def _has_room(self, before: UpdateState, *, fresh: bool) -> bool:
        """Return whether an ordinary update has the memory it needs."""
        self._steps_until_check -= 1
        if self._steps_until_check > 0 and not fresh:
            return True
        needed = self._needed_bytes()
        free = self._free_bytes()
        if free is not None and needed > free and not self._is_scarce:
            self.release()
            free = self._free_bytes()
        self._is_scarce = free is not None and needed > free
        if free is None:  # no allocator to ask here; one may come (a limit in a test)
            self._steps_until_check = _ASK_AGAIN_AFTER
        elif needed <= free // 2:
            self._steps_until_check = _CHECK_EVERY
        return not self._is_scarce

    def _free_bytes(self) -> int | None:
        reading = read_memory(self.device)
        if reading.limit_bytes is None or reading.allocated_bytes is None:
            return None
        if reading.peak_allocated_bytes is None:  # the resident set of a process, no allocator's
            return None
        return reading.limit_bytes - reading.allocated_bytes

    def _needed_bytes(self) -> int:
        """Return the bytes of new state and temporaries that one ordinary update needs."""
        optimizer, temporary_bytes, state_bytes = self.optimizer, 0, 0
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            state_bytes += sum(
                self.kind.state_bytes(p, group) for p in trained if p not in optimizer.state
            )
            temporary_bytes = max(
                temporary_bytes, self.kind.temporary_bytes(trained, group, self.device)
            )
        return state_bytes + temporary_bytes

    # -- last resort
    def _in_portions(self, before: UpdateState, kwargs: dict[str, Any]) -> Exception | None:
        """Update a few parameters at a time; reserve what the dearest need before the first."""
        portions = portions_of(self.optimizer)
        held = functools.partial(reserve, self.optimizer, self.kind, portions, self.device)
        error = self._try_reserving(held)
        if error is not None:
            self.release()
            error = self._try_reserving(held)
        if error is not None:
            add_note(error, _UNTOUCHED)
            return error
        for index, portion in enumerate(portions):
            with only(self.optimizer, portion):
                error = self._update_portion(kwargs, is_first=index == 0)
            if error is not None:
                return error
        self.report(_PORTIONED)
        return None

    def _try_reserving(self, hold: Callable[[], None]) -> Exception | None:
        try:
            hold()
        except Exception as error:
            if classify_oom(error) is None:
                raise
            clear_frames(error)
            return error
        return None

    def _update_portion(self, kwargs: dict[str, Any], *, is_first: bool) -> Exception | None:
        before = UpdateState(self.optimizer)
        error: Exception | None = None
        for _ in range(_TRIES):
            attempt = RecordedUpdate(before)
            error = self._try(attempt, kwargs)
            if error is None:
                return None
            if attempt.has_moved:
                return self._resume(attempt, error, kwargs)
            del attempt
            before.rewind()
            self.release()
        if error is not None:
            add_note(error, _UNTOUCHED if is_first else _MOVED)
        return error


_MOVED = (
    "lightning_oom: the optimizer step had begun: some parameters hold this step's update and some "
    "do not. Continue from the last checkpoint."
)
_UNTOUCHED = (
    "lightning_oom: the optimizer step was not begun: parameters and optimizer state are what they "
    "were before it."
)
_OPAQUE = (
    "lightning_oom: the update of {} cannot be resumed, so it was not tried again; some parameters "
    "may hold this step's update and some not. Continue from the last checkpoint."
)
_REPEATED = "an optimizer step ran out of memory before its first write and was repeated"
_RESUMED = "an optimizer step ran out of memory and was resumed where it stopped"
_PORTIONED = "an optimizer step was done a few parameters at a time for want of memory"
