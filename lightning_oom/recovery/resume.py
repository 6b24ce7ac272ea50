"""Finish an optimizer step that was interrupted halfway, exactly.

An update is a fixed program of tensor operations. Some write into parameters or optimizer state,
the others make temporaries. When an allocation fails, the writes done so far cannot be undone in
floating point, but they can be *counted*: each has raised its tensor's version by one. The same
program is then run again below :class:`ResumeMode`, which skips the writes that are done, repeats
the temporaries, and goes on with the first write that is missing.

A temporary that would be computed from a tensor which has already moved on is marked, and using it
for a write that is still missing is an error: then nothing is guessed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_oom._torch import TorchDispatchMode, base_of, read_version, written_positions
from lightning_oom.errors import LightningOOMError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["ResumeImpossibleError", "ResumeMode", "UpdateState"]


class ResumeImpossibleError(LightningOOMError, RuntimeError):
    """A missing write needs a value that has been overwritten since."""


class UpdateState:
    """What an optimizer step writes to, as it stood before the step.

    Args:
        optimizer: The optimizer about to step.

    Note:
        Cost: 0.1 us per tensor. Holds no reference that would not live on anyway.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.versions: dict[int, tuple[Tensor, int]] = {}
        self.numbers: list[tuple[dict[str, Any], str, Any]] = []
        self.known: dict[Tensor, tuple[str, ...]] = {}
        self._dropped: dict[tuple[int, str], Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._see(parameter)
                if parameter.grad is not None:
                    self._see(parameter.grad)
        for parameter, state in optimizer.state.items():
            self.known[parameter] = tuple(state)
            for name, entry in state.items():
                if isinstance(entry, Tensor):
                    self._see(entry)
                elif isinstance(entry, (int, float)):
                    self.numbers.append((state, name, entry))

    def _see(self, tensor: Tensor) -> None:
        self.versions[id(tensor)] = (tensor, read_version(tensor))

    def writes(self) -> dict[int, int]:
        """Return how many writes each tensor has seen since, by ``id``; only those with some.

        State that the step itself has made counts from version 0.
        """
        done = {
            key: read_version(tensor) - version
            for key, (tensor, version) in self.versions.items()
            if read_version(tensor) != version
        }
        for tensor in self._fresh():
            if read_version(tensor):
                done[id(tensor)] = read_version(tensor)
        return done

    def _fresh(self) -> Iterable[Tensor]:
        for parameter, state in self.optimizer.state.items():
            old = self.known.get(parameter, ())
            for name, entry in state.items():
                if name not in old and isinstance(entry, Tensor):
                    yield entry

    def persistent(self) -> list[Tensor]:
        """Return every tensor whose writes are counted, state made by the step included."""
        return [*(tensor for tensor, _ in self.versions.values()), *self._fresh()]

    def rewind(self) -> None:
        """Put numbers back, and drop state that the step has made but not written to."""
        for state, name, number in self.numbers:
            state[name] = number
        for parameter in list(self.optimizer.state):
            state = self.optimizer.state[parameter]
            old = self.known.get(parameter)
            fresh = [name for name in state if old is None or name not in old]
            if any(isinstance(state[n], Tensor) and read_version(state[n]) for n in fresh):
                self._rewind_numbers(state, fresh)
                continue
            for name in fresh:
                entry = state.pop(name)
                if isinstance(entry, Tensor):
                    self._dropped[id(parameter), name] = entry
            if old is None:
                del self.optimizer.state[parameter]

    def mend(self, mode: ResumeMode) -> None:
        """After a resumed update: state that it made from overwritten values is what it was before.

        Raises:
            ResumeImpossibleError: There was none before.
        """
        for parameter, state in self.optimizer.state.items():
            for name, entry in state.items():
                if isinstance(entry, Tensor) and mode.is_wrong(entry):
                    before = self._dropped.get((id(parameter), name))
                    if before is None:
                        raise ResumeImpossibleError(f"state {name!r} was made from lost values")
                    state[name] = before

    @staticmethod
    def _rewind_numbers(state: dict[str, Any], names: list[str]) -> None:
        for name in names:
            if isinstance(state[name], int):
                state[name] = 0


class ResumeMode(TorchDispatchMode):
    """Runs an interrupted update again without repeating what it has written.

    Args:
        persistent: The tensors whose writes are counted.
        done: Writes done so far, by ``id`` of the tensor. Kept up to date, so that an update that
            is interrupted again can be resumed again with the same mapping.

    Raises:
        ResumeImpossibleError: Below the mode, from the operation that cannot be done right.
    """

    def __init__(self, persistent: Iterable[Tensor], done: dict[int, int]) -> None:
        super().__init__()
        self._persistent = {id(tensor) for tensor in persistent}
        self._done = done
        self._seen: dict[int, int] = {}
        self._wrong: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

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
    def is_wrong(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from a value that had been overwritten."""
        return id(base_of(tensor)) in self._wrong

    def _is_ahead(self, tensor: Tensor) -> bool:
        key = id(base_of(tensor))
        return key in self._wrong or self._seen.get(key, 0) < self._done.get(key, 0)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ahead = any(self._is_ahead(tensor) for tensor in _tensors(args, kwargs))
        out = func(*args, **kwargs)
        if ahead and isinstance(out, Tensor):
            self._mark_wrong(out)
        elif ahead and isinstance(out, (list, tuple)):
            for index, result in enumerate(out):
                row = _row(args, kwargs, index, len(out))
                if any(self._is_ahead(tensor) for tensor in row):
                    self._mark_wrong(result)
        elif ahead:
            raise ResumeImpossibleError(f"{func} reads a number that has been overwritten since")
        return out

    def _mark_wrong(self, tensor: Tensor) -> None:
        base = base_of(tensor)
        self._wrong[id(base)] = base

    # -- writing
    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor
    ) -> Any:
        if not self._is_missing(target):
            return target
        self._check(func, target, _tensors(args, kwargs))
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

    def _check(self, func: Any, target: Tensor, inputs: list[Tensor]) -> None:
        key = id(base_of(target))
        wrong = any(self._is_ahead(t) for t in inputs if id(base_of(t)) != key)
        if key not in self._persistent:
            if wrong:
                self._mark_wrong(target)
        elif wrong:
            raise ResumeImpossibleError(f"{func} needs a value that has been overwritten since")


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for entry in (*args, *kwargs.values()):
        if isinstance(entry, Tensor):
            found.append(entry)
        elif isinstance(entry, (list, tuple)):
            found.extend(e for e in entry if isinstance(e, Tensor))
    return found


def _row(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, length: int) -> list[Tensor]:
    """Return the tensors that an operation on lists combines at one index."""
    entries = (_pick(entry, [index], length) for entry in (*args, *kwargs.values()))
    return _tensors(tuple(entries), {})


def _pick(entry: Any, indices: list[int], length: int) -> Any:
    if isinstance(entry, (list, tuple)) and len(entry) == length:
        return [entry[index] for index in indices]
    return entry
