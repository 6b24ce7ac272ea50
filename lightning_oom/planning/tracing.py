"""Watch the operators of a training step and write down what each does to memory."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_oom._torch import tree_leaves
from lightning_oom._torch.fake import graph_position, running_node_position
from lightning_oom.memory.allocations import AllocationWatcher, StorageLedger
from lightning_oom.memory.operators import desugars
from lightning_oom.memory.storages import strided_parts
from lightning_oom.planning.trace import (
    MemoryEvent,
    MemoryTrace,
    OperatorCall,
    TensorSpec,
    TraceMark,
)
from lightning_oom.undo import Undo, UndoStack

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable

    from lightning_oom.planning.answers import Answers

__all__ = ["StepTracer"]

_DEVICE = torch.ops.prim.device.default  # half of what a fake tensor is asked
_KIND_OF_PHASE = {"before": "temporary", "forward": "activation"}


class _Storage:
    """What is known of one storage; its kind may still change."""

    __slots__ = ("kind", "module", "num_bytes", "number", "operator")

    def __init__(self, number: int, num_bytes: int, kind: str, module: str, operator: str) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.kind = kind
        self.module = module
        self.operator = operator


class StepTracer(AllocationWatcher):
    """Writes down what is allocated and freed while it is entered, on real or on fake tensors.

    Args:
        device: Only what is there counts; ``None`` counts everything.
        answers: Answers questions about values that fake tensors do not have; ``None`` for real ones.
        record_operators: Keep shapes and types of every call too, at some 10 us each.

    Attributes:
        phase: Where in the step the run is, one of :data:`~lightning_oom.planning.trace.PHASES`.
        step: Optimizer step, from 0.

    Note:
        Cost: some 10 us per operator, and no walk over the stack. Memory that an operator takes and
        gives back within itself is not seen.
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        answers: Answers | None = None,
        record_operators: bool = False,
    ) -> None:
        super().__init__(device=device)
        self.ledger = self._storages = _TraceLedger(self)
        self.phase = "before"
        self.step = 0
        self._answers = answers
        self._calls: list[OperatorCall] | None = [] if record_operators else None
        self._events: list[tuple[_Storage, int, str, int, int]] = []
        self._marks: list[TraceMark] = []
        self._operator: Any = None
        self._names: dict[Any, str] = {}
        self._running: list[str] = []
        self._spans: tuple[list[int], list[str]] = ([], [])

    def counts(self, device: torch.device) -> bool:
        """Say whether ``device`` is traced; the storages of fake tensors are on ``meta``."""
        return self.device is None or device.type == "meta" or super().counts(device)

    def register(self, tensors: Iterable[Any], kind: str, module: str = "") -> None:
        """Count tensors that exist already, and label them."""
        self._running.append(module)
        for tensor in tensors:
            for storage in _storages_in(tensor):
                if self.counts(storage.device) and self.ledger.add(storage):
                    self._storages.label(storage, kind)
        self._running.pop()

    def label(self, tensors: Iterable[Any], kind: str, only: str = "temporary") -> None:
        """Say what storages that were seen are for, in the end; those of kind ``only`` change."""
        for tensor in tensors:
            for storage in _storages_in(tensor):
                self._storages.label(storage, kind, only)

    def mark(self, name: str) -> None:
        """Write down that a step or a phase begins here."""
        calls = 0 if self._calls is None else len(self._calls)
        self._marks.append(TraceMark(name, self.step, len(self._events), calls))

    def enter_phase(self, phase: str, mark: str | None = None) -> str:
        """Let ``phase`` begin; return the one before."""
        before, self.phase = self.phase, phase
        self.mark(mark or phase)
        return before

    def follow_modules(self, root: torch.nn.Module) -> Undo:
        """Let events know which module runs; the undo takes the hooks off."""
        undos = UndoStack()
        for path, module in root.named_modules():
            enter = module.register_forward_pre_hook(self._entering(path), prepend=True)
            leave = module.register_forward_hook(self._leave, always_call=True)
            undos.push(Undo(enter.remove))
            undos.push(Undo(leave.remove))
        return Undo(undos)

    def trace(self, *, rows: int | None, is_measured: bool = False) -> MemoryTrace:
        """Return what was written down so far."""
        answers = self._answers
        ends = [mark.event for mark in self._marks if mark.name == "end"]
        return MemoryTrace(
            events=tuple(
                MemoryEvent(
                    storage.number,
                    num_bytes,
                    storage.kind,
                    phase,
                    step,
                    storage.module,
                    storage.operator,
                    call,
                )
                for storage, num_bytes, phase, step, call in self._events[
                    : ends[-1] if ends else None
                ]
            ),
            marks=(*self._marks,),
            operators=tuple(self._calls or ()),
            substitutions=() if answers is None else answers.substitutions(),
            rows=rows,
            num_steps=self.step + 1,
            is_measured=is_measured,
        )

    def saw_allocation(self, num_bytes: int, known: _Storage | None = None) -> _Storage:
        """Write an allocation down; the ledger calls this."""
        storage = known or _Storage(
            self._storages.num_storages,
            num_bytes,
            _KIND_OF_PHASE.get(self.phase, "temporary"),
            self._module(),
            self._name_of(self._operator),
        )
        self._note(storage, num_bytes)
        return storage

    def saw_free(self, storage: _Storage, num_bytes: int) -> None:
        """Write a free down; the ledger calls this."""
        self._note(storage, -num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what asks for values; run everything else, then look at what it returned."""
        if func is _DEVICE:
            return args[0].device
        if types and desugars(types):
            return NotImplemented
        kwargs = kwargs or {}
        self._operator = func
        calls = self._calls
        if calls is not None:
            calls.append(None)  # type: ignore[arg-type] # its place; filled below
            position = len(calls) - 1
        out = NotImplemented if self._answers is None else self._answers.answer(func, args, kwargs)
        if out is NotImplemented:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            self._count(out)
        if self._answers is not None:
            self._answers.saw(func, args, kwargs, out)
        if calls is not None:
            calls[position] = self._call(func, args, kwargs, out)
        return out

    def _count(self, out: Any) -> None:
        for leaf in tree_leaves(out):
            for storage in _storages_in(leaf):
                self.ledger.add(storage)

    def _note(self, storage: _Storage, num_bytes: int) -> None:
        call = -1 if self._calls is None else len(self._calls) - 1
        self._events.append((storage, num_bytes, self.phase, self.step, call))

    def _name_of(self, operator: Any) -> str:
        name = self._names.get(operator)
        if name is None:
            name = self._names[operator] = "" if operator is None else str(operator)
        return name

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> OperatorCall:
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        flops: int | None = None
        if count is not None:
            try:
                flops = int(count(*args, **kwargs, out_val=out))
            except Exception:  # a form that torch's counter was not written for
                flops = None
        return OperatorCall(
            self._name_of(func),
            self.phase,
            self.step,
            self._module(),
            tuple(self._specs((*args, *kwargs.values()))),
            tuple(self._specs((out,))),
            tuple(value for value in args if _is_plain(value)),
            flops,
        )

    def _specs(self, values: Iterable[Any]) -> Iterable[TensorSpec]:
        for value in values:
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                number = next((self._storages.number(s) for s in _storages_in(value)), -1)
                yield TensorSpec(tuple(value.shape), dtype, number, value.requires_grad)
            elif isinstance(value, (list, tuple)):
                yield from self._specs(value)

    def _entering(self, path: str) -> Any:
        def enter(*_: Any) -> None:
            self._running.append(path)
            self._begin_span(path)

        return enter

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
        self._begin_span(self._running[-1] if self._running else "")

    def _begin_span(self, path: str) -> None:
        """Graph nodes that are made from here on belong to the module at ``path``."""
        position = graph_position()
        if position is not None:
            self._spans[0].append(position)
            self._spans[1].append(path)

    def _module(self) -> str:
        if self._running:
            return self._running[-1]
        position = running_node_position() if self.phase == "backward" else None
        if position is None or not self._spans[0]:
            return ""
        index = bisect_right(self._spans[0], position) - 1
        return self._spans[1][index] if index >= 0 else ""


class _TraceLedger(StorageLedger):
    """Tells a tracer of each storage that appears, changes or dies."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self.num_storages = 0
        self._tracer = tracer
        self._known: dict[int, _Storage] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Count ``storage``; return its bytes if it was not known, else 0."""
        num_bytes = super().add(storage)
        if num_bytes:
            self._known[id(storage)] = self._tracer.saw_allocation(num_bytes)
            self.num_storages += 1
        return num_bytes

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` with the bytes it has now: freed, and allocated again."""
        known = self._known.get(id(storage))
        super().resize(storage)
        num_bytes = storage.nbytes()
        if known is None:
            if num_bytes and id(storage) not in self._known:
                self._known[id(storage)] = self._tracer.saw_allocation(num_bytes)
                self.num_storages += 1
        elif known.num_bytes != num_bytes:
            if known.num_bytes:
                self._tracer.saw_free(known, known.num_bytes)
            known.num_bytes = num_bytes
            if num_bytes:
                self._tracer.saw_allocation(num_bytes, known)

    def label(self, storage: torch.UntypedStorage, kind: str, only: str | None = None) -> None:
        """Say what a storage is for; where ``only`` is given, if that was said before."""
        known = self._known.get(id(storage))
        if known is not None and only in (None, known.kind):
            known.kind = kind

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; -1 for one that is not counted."""
        known = self._known.get(id(storage))
        return -1 if known is None else known.number

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        key = getattr(ref, "key", 0)
        before = self.live_bytes
        super()._forget(ref)
        freed_bytes = before - self.live_bytes
        if freed_bytes:
            known = self._known.pop(key)
            self._tracer.saw_free(known, freed_bytes)


def _is_plain(value: Any) -> bool:
    """Say whether a value holds no tensor, which it would keep alive."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (int, float, str))


def _storages_in(tensor: Any) -> list[torch.UntypedStorage]:
    if not isinstance(tensor, torch.Tensor):
        return []
    try:
        return [part.untyped_storage() for part in strided_parts(tensor)]
    except (NotImplementedError, RuntimeError):  # no storage of its own
        return []
