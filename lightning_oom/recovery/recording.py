"""Watch an optimizer step, and after a failure go on exactly where it stopped.

An update is a fixed program of tensor operations: run again, it makes the same ones in the same
order. :class:`RecordMode` notes each operation that was executed. After a failure the program is
run again from its start below the same mode, which answers every operation that is in the record
with what it gave then, and executes only what comes after: no write is done twice, no value is
computed from one that has moved on.

The record keeps weak references. What the rest of the program can still use is alive at the
moment of the failure, and is held from then on; what had been freed by then cannot be used, and a
stand-in of one element takes its place.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_oom._torch import (
    WatchingMode,
    base_of,
    read_version,
    schema_of,
    sparse_parts,
    written_positions,
)
from lightning_oom.recovery.resume import ResumeImpossibleError, UpdateState, tensors_among

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["RecordMode", "RecordedUpdate"]

_WRITE = "write"
_ASIDE = "aside"


class RecordedUpdate:
    """One update, each of whose operations is noted.

    Args:
        before: The state before the update.

    Attributes:
        has_moved: Whether anything was written to that existed before.
        lost: Why the update cannot be resumed; ``None`` while it can.

    Note:
        Cost: some 10 us per operation, and 1 us per tensor that it returns.
    """

    def __init__(self, before: UpdateState) -> None:
        self.before = before
        self.has_moved = False
        self.lost: str | None = None
        self.entries: list[tuple[Any, Any]] = []
        self._persistent = {id(tensor) for tensor in before.tensors}

    def watch(self) -> AbstractContextManager[object]:
        """Return what to run the update in, first and again."""
        return RecordMode(self)

    def note_failure(self) -> None:
        """Hold what is alive. Call it after each failure, before frames are cleared."""
        self.hold()

    def hold(self) -> None:
        """Turn the weak references to what is still alive into strong ones."""
        for _, outputs in self.entries:
            if type(outputs) is list:
                for output in outputs:
                    if type(output) is _Output:
                        output.hold()

    def note_write(self, targets: list[Tensor]) -> None:
        """Note that an operation writes to ``targets``."""
        if not self.has_moved:
            self.has_moved = any(id(base_of(tensor)) in self._persistent for tensor in targets)

    def note_half_written(self, operator: Any, targets: list[Tensor]) -> None:
        """Note that an operation failed that writes to ``targets``."""
        if len(targets) > 1:
            self.lost = f"{operator} may have written to some of its tensors before it failed"
            self.note_write(targets)


class RecordMode(WatchingMode):
    """Answers the operations that are in a record, executes and notes the others.

    Args:
        record: Filled in, and answered from when the update is run again.

    Raises:
        ResumeImpossibleError: Below the mode, when the update does not make the operations that it
            made before.
    """

    supports_higher_order_operators = True

    def __init__(self, record: RecordedUpdate) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates no mode
        self._record = record
        self._entries = record.entries
        self._known = len(record.entries)
        self._next = 0
        self._stand_ins: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer or execute one operation."""
        kwargs = kwargs or {}
        if _kind_of(func) is _ASIDE:
            return func(*args, **kwargs)
        try:
            if self._next < self._known:
                out = self._answer(func, args, kwargs)
            else:
                out = self._execute(func, args, kwargs)
        except BaseException:
            # now, while the caller's intermediate results are still alive
            self._record.hold()
            raise
        self._next += 1
        return out

    # -- executing
    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stand_ins:
            self._refuse_stand_ins(func, args, kwargs)
        kind = _kind_of(func)
        if kind is _WRITE:
            out = self._write(func, args, kwargs)
            self._entries.append((func, _WRITE))
        else:
            out = func(*args, **kwargs)
            self._entries.append((func, _remember(out)))
        return out

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        targets = _targets(func, args, kwargs)
        version = read_version(targets[0]) if targets else 0
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self._record.note_half_written(func, targets)
            raise
        self._record.note_write(targets)
        if _is_on_lists(func) and targets and read_version(targets[0]) == version:
            for tensor in targets:  # below a mode torch leaves that out
                increment_version(tensor)
        return out

    def _refuse_stand_ins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stand_ins = {id(tensor.untyped_storage()) for tensor in self._stand_ins.values()}
        for tensor in tensors_among((*args, *kwargs.values())):
            part = tensor if tensor.layout is torch.strided else sparse_parts(tensor)[1]
            if id(part.untyped_storage()) in stand_ins:
                raise ResumeImpossibleError(f"{func} needs a value that was not kept")

    # -- answering
    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        then, outputs = self._entries[self._next]
        if then is not func:
            raise ResumeImpossibleError(f"the update ran {then} the first time and {func} now")
        if outputs is _WRITE:
            return _returned(func, args, kwargs)
        if type(outputs) is not list:
            return outputs[0]
        results = [self._give(output, func, args, kwargs) for output in outputs[1:]]
        return results[0] if outputs[0] is None else outputs[0](results)

    def _give(self, output: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(output) is not _Output:
            return output
        tensor = output.give()
        if tensor is not None:
            return tensor
        if output.values is not None:
            made = func(*args, **kwargs)
            values = self._give(output.values, func, args, kwargs)
            return _with_values(made, values)
        key = (output.device, output.dtype)
        if key not in self._stand_ins:
            self._stand_ins[key] = torch.zeros((), dtype=output.dtype, device=output.device)
        return self._stand_ins[key].expand(output.size)


class _Output:
    """A tensor that an operation has returned, held weakly until the update fails."""

    __slots__ = (
        "_held",
        "_ref",
        "device",
        "dtype",
        "offset",
        "size",
        "storage",
        "stride",
        "values",
    )

    def __init__(self, tensor: Tensor) -> None:
        self._ref = weakref.ref(tensor)
        self._held: Tensor | None = None
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.storage: weakref.ref[torch.UntypedStorage] | None = None
        self.values: _Output | None = None
        if tensor.layout is torch.sparse_coo:
            # its indices follow from the arguments, which keep theirs
            self.values = _Output(sparse_parts(tensor)[1])
            return
        self.storage = weakref.ref(tensor.untyped_storage())
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def hold(self) -> None:
        """Keep the tensor if it is alive, or if a view of it is."""
        self._held = self._ref()
        if self.values is not None:
            self.values.hold()
        storage = self.storage() if self._held is None and self.storage is not None else None
        if storage is not None:
            self._held = torch.empty(0, dtype=self.dtype, device=self.device)
            self._held.set_(storage, self.offset, self.size, self.stride)
            self._ref = weakref.ref(self._held)

    def give(self) -> Tensor | None:
        """Return the tensor if there is one, and hold it no longer."""
        tensor, self._held = self._held, None
        return tensor if tensor is not None else self._ref()


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor with the places of ``tensor`` and other values there."""
    return torch.sparse_coo_tensor(
        sparse_parts(tensor)[0],
        values,
        tensor.shape,
        is_coalesced=tensor.is_coalesced(),
        check_invariants=False,
    )


def _remember(out: Any) -> Any:
    """Return what stands for the result of an operation: a list if it holds tensors."""
    if isinstance(out, Tensor):
        return [None, _Output(out)]
    if isinstance(out, (list, tuple)):
        return [type(out), *(_Output(e) if isinstance(e, Tensor) else e for e in out)]
    return (out,)


@functools.cache
def _kind_of(operator: Any) -> str | None:
    """Return whether an operator writes into an argument, or is to be left aside.

    The latter are views, which cost nothing to be made again (and torch itself makes one more when
    it hands out a tensor that somebody else holds too), and the marks of the profiler, which are
    also made while an error passes.
    """
    if written_positions(operator):
        return _WRITE
    schema = schema_of(operator)
    if schema is None or schema.name == "aten::lift_fresh":
        return None  # the latter is the first that is seen of a tensor made from numbers
    is_view = any(result.alias_info is not None for result in schema.returns)
    return _ASIDE if is_view or schema.name.startswith("profiler::") else None


@functools.cache
def _is_on_lists(operator: Any) -> bool:
    return str(schema_of(operator).name).startswith("aten::_foreach_")


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    return list(
        tensors_among(
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in written_positions(func)
        )
    )


def _returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation that writes into its arguments returns: those arguments."""
    number = len(schema_of(func).returns)
    if not number:
        return None
    targets = _targets(func, args, kwargs)
    return targets[0] if number == 1 else tuple(targets)
