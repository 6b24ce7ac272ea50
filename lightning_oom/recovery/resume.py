"""Finish an optimizer step that was interrupted halfway, exactly, without having watched it.

An update is a fixed program of tensor operations. Some write into parameters or optimizer state,
the others make temporaries. When an allocation fails, the writes done so far cannot be undone in
floating point, but they can be *counted*: each has raised its tensor's version by one. The same
program is then run again below :class:`ResumeMode`, which skips the writes that are done, repeats
the temporaries, and goes on with the first write that is missing.

A temporary that would be computed from a tensor which has already moved on is marked, and using it
for a write that is still missing is an error: then nothing is guessed. Where this would happen, the
update is recorded instead (:mod:`.recording`).
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_oom._torch import WatchingMode, base_of, read_version, written_positions
from lightning_oom.errors import LightningOOMError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch

__all__ = ["CountedUpdate", "ResumeImpossibleError", "ResumeMode", "UpdateState", "tensors_among"]


class ResumeImpossibleError(LightningOOMError, RuntimeError):
    """The rest of an update needs a value that has been overwritten or was not kept."""


class UpdateState:
    """What an optimizer step can change, as it stood before the step.

    Args:
        optimizer: The optimizer about to step.

    Attributes:
        parameters: All parameters, in the optimizer's order.
        trained: Those with a gradient.
        gradients: Their gradients.
        tensors: Parameters, gradients and the tensors of the state.

    Note:
        Cost: 0.1 us per tensor. Keeps references for the length of a step, to what the optimizer
        keeps anyway.
    """

    __slots__ = (
        "_lengths",
        "_values",
        "_versions",
        "gradients",
        "optimizer",
        "parameters",
        "tensors",
        "trained",
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self.gradients = [g for p in self.parameters if (g := p.grad) is not None]
        self.trained = (
            self.parameters
            if len(self.gradients) == len(self.parameters)
            else [p for p in self.parameters if p.grad is not None]
        )
        states = optimizer.state.values()
        # a step adds entries behind those there are, and takes none away
        self._lengths = [len(state) for state in states]
        self._values = [value for state in states for value in state.values()]
        held = [value for value in self._values if isinstance(value, Tensor)]
        self.tensors = [*self.parameters, *self.gradients, *held]
        self._versions = list(map(read_version, self.tensors))

    def writes(self) -> dict[int, int]:
        """Return how many writes each tensor has seen since, by ``id``; only those with some."""
        return {
            id(tensor): version - before
            for tensor, before in zip(self.tensors, self._versions, strict=True)
            if (version := read_version(tensor)) != before
        }

    def owners(self) -> dict[int, int]:
        """Return the ``id`` of each parameter by that of its gradient, its state and its own."""
        owners = {id(p): id(p) for p in self.parameters}
        owners.update({id(p.grad): id(p) for p in self.trained})
        for parameter, state in self.optimizer.state.items():
            owners.update({id(value): id(parameter) for value in state.values()})
        return owners

    def has_new_state(self) -> bool:
        """Whether the step has made state."""
        states = self.optimizer.state.values()
        return len(states) > len(self._lengths) or any(
            len(state) > length for state, length in zip(states, self._lengths, strict=True)
        )

    def rewind(self) -> None:
        """Put the entries of the state back, and take out those that the step has made.

        What tensors hold stays as it is.
        """
        values = iter(self._values)
        for index, (parameter, state) in enumerate(list(self.optimizer.state.items())):
            if index >= len(self._lengths):
                del self.optimizer.state[parameter]
                continue
            names = list(state)
            known = self._lengths[index]
            state.update(zip(names[:known], values))  # noqa: B905 - the values of the others follow
            for name in names[known:]:
                del state[name]


class CountedUpdate:
    """One update whose writes are counted by the versions of the tensors it writes to.

    Args:
        before: The state before the update.
        numbers_stay: A number that the update reads from a tensor is used for the parameter of that
            tensor alone.
        is_blind: The update is fused: its writes raise no versions. Such an update allocates
            nothing once its state is there; should it fail nevertheless, it is not resumed.

    Attributes:
        lost: Why the update cannot be resumed; ``None`` while it can.
    """

    def __init__(
        self, before: UpdateState, *, numbers_stay: bool = False, is_blind: bool = False
    ) -> None:
        self.before = before
        self.lost: str | None = None
        self._numbers_stay = numbers_stay
        self._is_blind = is_blind
        self._done: dict[int, int] | None = None

    @property
    def has_moved(self) -> bool:
        """Whether anything was written to that existed before, or may have been."""
        return bool(self._done) or self._is_blind

    def watch(self) -> AbstractContextManager[object]:
        """Return what to run the update in: nothing at first, then what resumes it."""
        if self._done is None:
            return nullcontext()
        owners = self.before.owners() if self._numbers_stay else None
        return ResumeMode(self.before.tensors, self._done, owners)

    def note_failure(self) -> None:
        """Count what was done. Call it after each failure, before the state is rewound."""
        if self._done is None:
            self._done = self.before.writes()
        if self._is_blind:
            self.lost = "fused operations leave no trace of what they have written"
        elif self._done and self.before.has_new_state():
            self.lost = "it also made state, whose writes nobody has counted"


class ResumeMode(WatchingMode):
    """Runs an interrupted update again without repeating what it has written.

    Args:
        persistent: The tensors whose writes are counted.
        done: Writes done so far, by ``id`` of the tensor. Kept up to date, so that an update that
            is interrupted again can be resumed again with the same mapping.
        owners: The ``id`` of the parameter by that of each tensor that belongs to it, where a number
            read from a tensor is used for its parameter alone: then one that was overwritten since
            is no harm to the others. ``None`` where that is not known.

    Raises:
        ResumeImpossibleError: Below the mode, from the operation that cannot be done right.
    """

    def __init__(
        self,
        persistent: Iterable[Tensor],
        done: dict[int, int],
        owners: dict[int, int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates no mode
        self._persistent = {id(tensor) for tensor in persistent}
        self._done = done
        self._seen: dict[int, int] = {}
        self._wrong: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._owners = None if owners is None else dict(owners)
        self._without_number: set[int] = set()  # parameters

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Skip, repeat or run one operation."""
        kwargs = kwargs or {}
        positions = written_positions(func)
        if not positions:
            return self._compute(func, args, kwargs)
        if len(positions) != 1:
            raise ResumeImpossibleError(f"{func} writes several arguments at once")
        position, name = positions[0]
        target = args[position] if position < len(args) else kwargs[name]
        if isinstance(target, Tensor):
            return self._write(func, args, kwargs, target)
        return self._write_list(func, args, kwargs, target)

    # -- reading
    def _is_ahead(self, tensor: Tensor) -> bool:
        key = id(base_of(tensor))
        return key in self._wrong or self._seen.get(key, 0) < self._done.get(key, 0)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ahead = [t for t in tensors_among((*args, *kwargs.values())) if self._is_ahead(t)]
        out = func(*args, **kwargs)
        if ahead and isinstance(out, Tensor):
            self._mark_wrong(out, ahead)
        elif ahead and isinstance(out, (list, tuple)):
            for index, result in enumerate(out):
                row = [t for t in _row(args, kwargs, index, len(out)) if self._is_ahead(t)]
                if row:
                    self._mark_wrong(result, row)
        elif ahead:
            self._lose_number(func, ahead)
        return out

    def _mark_wrong(self, tensor: Tensor, sources: list[Tensor]) -> None:
        base = base_of(tensor)
        self._wrong[id(base)] = base
        if self._owners is not None:
            owners = {self._owners.get(id(base_of(source)), 0) for source in sources}
            self._owners[id(base)] = owners.pop() if len(owners) == 1 else 0

    def _lose_number(self, func: Any, sources: list[Tensor]) -> None:
        """Note whose number was overwritten since."""
        owners = self._owners or {}
        lost = {owners.get(id(base_of(source)), 0) for source in sources}
        if 0 in lost:
            raise ResumeImpossibleError(f"{func} reads a number that has been overwritten since")
        self._without_number |= lost

    # -- writing
    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor
    ) -> Any:
        if not self._is_missing(target):
            return target
        self._check(func, target, tensors_among((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        self._note(target)
        return out

    def _write_list(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Tensor]
    ) -> Any:
        length = len(targets)
        missing = [index for index in range(length) if self._is_missing(targets[index])]
        for index in missing:
            self._check(func, targets[index], _row(args, kwargs, index, length))
        if not missing:
            return None
        out = func(
            *(_pick(entry, missing, length) for entry in args),
            **{name: _pick(entry, missing, length) for name, entry in kwargs.items()},
        )
        for index in missing:
            self._note(targets[index])
        return out

    def _is_missing(self, target: Tensor) -> bool:
        """Count a write of the program; return whether it has not been done yet."""
        key = id(base_of(target))
        if key not in self._persistent:
            return True
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > self._done.get(key, 0)

    def _note(self, target: Tensor) -> None:
        key = id(base_of(target))
        if key in self._persistent:
            self._done[key] = self._seen[key]

    def _check(self, func: Any, target: Tensor, inputs: Iterable[Tensor]) -> None:
        key = id(base_of(target))
        wrong = [t for t in inputs if id(base_of(t)) != key and self._is_ahead(t)]
        if key not in self._persistent:
            if wrong:
                self._mark_wrong(target, wrong)
        elif wrong or (self._owners or {}).get(key) in self._without_number:
            raise ResumeImpossibleError(f"{func} needs a value that has been overwritten since")


def tensors_among(entries: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among ``entries`` and in the lists among them."""
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, (list, tuple)):
            yield from (each for each in entry if isinstance(each, Tensor))


def _row(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, length: int) -> list[Tensor]:
    """Return the tensors that an operation on lists combines at one index."""
    entries = (_pick(entry, [index], length) for entry in (*args, *kwargs.values()))
    return list(tensors_among(entries))


def _pick(entry: Any, indices: list[int], length: int) -> Any:
    if isinstance(entry, (list, tuple)) and len(entry) == length:
        return [entry[index] for index in indices]
    return entry
