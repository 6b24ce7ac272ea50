"""Memory that kernels take and give back within one operator, which a trace does not show."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_oom.planning.trace import MemoryEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.target import TargetDevice
    from lightning_oom.planning.trace import MemoryTrace, OperatorCall, TensorSpec

__all__ = ["TargetTrace", "with_workspaces"]

_FORWARD = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"
_FEW_CHANNELS = 4
_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "mm", "addbmm", "addmv", "mv")
)


class TargetTrace(NamedTuple):
    """What a step does to memory on a target device.

    Attributes:
        trace: With the workspaces of kernels in between, of kind ``"workspace"``; its operators are
            left out.
        releases: Positions of events before which the allocator's cache is emptied.
    """

    trace: MemoryTrace
    releases: frozenset[int]


def with_workspaces(trace: MemoryTrace, target: TargetDevice) -> TargetTrace:
    """Put the workspaces that kernels of a target take between the events of a trace.

    cuBLAS takes one workspace at the first matrix product and keeps it. Convolutions of cuDNN take
    one for each call; kernels in TF32 and half precision want channels last, and keep the converted
    input and result there. Depthwise convolutions have a kernel of torch's own without one.

    Args:
        trace: With its operators recorded.
        target: Whose kernels.

    Returns:
        The trace of the target.
    """
    events = _with_ordered_frees(trace.events)
    if target.kernels != "cuda":
        return TargetTrace(replace(trace, events=events, operators=()), frozenset())
    builder = _Builder(trace, target)
    for event in events:
        builder.add(event)
    builder.finish()
    events = tuple(builder.events)
    return TargetTrace(replace(trace, events=events, operators=()), frozenset(builder.releases))


def _with_ordered_frees(events: tuple[MemoryEvent, ...]) -> tuple[MemoryEvent, ...]:
    """Sort what is freed during one operator: autocast drops its casted weights in any order."""
    ordered: list[MemoryEvent] = []
    runs = groupby(events, key=lambda event: (event.num_bytes < 0, event.call, event.phase))
    for (is_free, *_), run in runs:
        ordered.extend(sorted(run, key=lambda event: event.storage) if is_free else run)
    return tuple(ordered)


class _Builder:
    """Goes through events and calls at the same time."""

    def __init__(self, trace: MemoryTrace, target: TargetDevice) -> None:
        self.events: list[MemoryEvent] = []
        self.releases: set[int] = set()
        self._target = target
        self._operators = trace.operators
        self._storage = 1 + max((event.storage for event in trace.events), default=-1)
        self._call = 0
        self._seen: set[tuple[object, ...]] = set()
        self._has_matmul_workspace = False

    def add(self, event: MemoryEvent) -> None:
        """Add ``event``, after the workspaces of the calls that ended before it."""
        ended = event.call if event.num_bytes > 0 else event.call + 1
        self._pass(ended, event)
        self.events.append(event)

    def finish(self) -> None:
        """Add what the last calls take."""
        if self.events:
            self._pass(len(self._operators), self.events[-1])

    def _pass(self, until: int, near: MemoryEvent) -> None:
        for position in range(self._call, min(until, len(self._operators))):
            call = self._operators[position]
            if call.name in (_FORWARD, _BACKWARD):
                self._convolve(call, near, position)
            elif call.name in _PRODUCTS and not self._has_matmul_workspace:
                self._has_matmul_workspace = True
                self._take(self._target.matmul_workspace_bytes, near, call, position)
        self._call = max(self._call, until)

    def _convolve(self, call: OperatorCall, near: MemoryEvent, position: int) -> None:
        for num_bytes in convolution_workspaces(call):
            if self._take(num_bytes, near, call, position):
                taken = self.events[-1]
                self.events.append(taken._replace(num_bytes=-num_bytes))
        shape = (call.name, call.arguments and str(call.arguments), *(t.shape for t in call.inputs))
        if self._target.empties_cache and shape not in self._seen and not _is_depthwise(call):
            self.releases.add(len(self.events))
        self._seen.add(shape)

    def _take(self, num_bytes: int, near: MemoryEvent, call: OperatorCall, position: int) -> bool:
        if num_bytes <= 0:
            return False
        self.events.append(
            MemoryEvent(
                self._storage,
                num_bytes,
                "workspace",
                call.phase,
                near.step if near.call == position else call.step,
                call.module,
                call.name,
                position,
            )
        )
        self._storage += 1
        return True


def convolution_workspaces(call: OperatorCall) -> Iterator[int]:
    """Give the workspaces that a convolution takes one after the other, in bytes.

    A kernel of more than one pixel keeps its converted input, weight and result there; one on few
    channels (of an image) twice as much, for its channels are filled up or its patches unfolded.
    Of the rules that were tried on published measurements, this one fits best; cuDNN chooses by
    speed, so single workspaces are often far off.

    Args:
        call: A convolution, or its backward.
    """
    if call.name == _FORWARD:
        source, weight = call.inputs[:2]
        result, count = call.outputs[0], 1
    else:
        result, source, weight = call.inputs[:3]
        mask = call.arguments[-1]
        count = sum(mask[:2]) if isinstance(mask, list) else 2
    if _is_depthwise(call) or prod(weight.shape[2:]) == 1:
        return
    factor = 2 if source.shape[1] <= _FEW_CHANNELS else 1
    for _ in range(count):
        yield factor * (_num_bytes(source) + _num_bytes(result)) + _num_bytes(weight)


def _is_depthwise(call: OperatorCall) -> bool:
    backward = call.name == _BACKWARD
    groups = call.arguments[-2 if backward else -1]
    source = call.inputs[1 if backward else 0]
    return isinstance(groups, int) and groups > 1 and source.shape[1] == groups


def _num_bytes(tensor: TensorSpec) -> int:
    dtype = getattr(torch, tensor.dtype)
    return prod(tensor.shape) * int(dtype.itemsize)
