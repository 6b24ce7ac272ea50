"""What a training step does to memory, event by event, apart from any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "KINDS",
    "PHASES",
    "MemoryEvent",
    "MemoryTrace",
    "OperatorCall",
    "Substitution",
    "TensorSpec",
    "TraceMark",
]

KINDS = (
    "parameter",
    "buffer",
    "batch",
    "gradient",
    "optimizer",
    "activation",
    "temporary",
)
"""What a storage is for. Allocated in the forward: an activation; in the backward or the optimizer
step: a temporary, unless it ends as a gradient or in the state of an optimizer."""

PHASES = ("before", "forward", "backward", "optimizer")
"""Where in a step something happens; ``before`` is what exists when training starts."""


class MemoryEvent(NamedTuple):
    """One storage that was allocated or freed.

    Attributes:
        storage: Number of the storage; a resize is a free and an allocation under one number.
        num_bytes: Logical bytes, not rounded to blocks; below 0 when freed.
        kind: What the storage is for in the end, one of :data:`KINDS`; the same in both its events.
        phase: Where in the step this event lies, one of :data:`PHASES`.
        step: Optimizer step, from 0.
        module: Path of the module that ran when it was allocated; ``""`` for the root.
        operator: What allocated it (``"aten.mm.default"``); ``""`` for what existed before.
        call: Position in :attr:`MemoryTrace.operators` of the call during which this event happened;
            -1 where none is recorded.
    """

    storage: int
    num_bytes: int
    kind: str
    phase: str
    step: int
    module: str
    operator: str
    call: int


class TraceMark(NamedTuple):
    """A point of time in a trace.

    Attributes:
        name: ``"step"``, or a phase that begins: ``"forward"``, ``"zero_grad"``, ``"backward"``,
            ``"optimizer"``; ``"end"`` closes the trace.
        step: Optimizer step, from 0.
        event: How many events lie before it.
        call: How many operator calls lie before it.
    """

    name: str
    step: int
    event: int
    call: int


class TensorSpec(NamedTuple):
    """Shape and type of a tensor that went into an operator or came out.

    Attributes:
        shape: Sizes of its dimensions.
        dtype: For instance ``"float32"``.
        storage: Number of its storage in the trace; -1 where it has none that is counted.
        requires_grad: Whether autograd asks for its gradient. Below autograd, where operators are
            seen, this tells parameters and inputs, not intermediate results.
    """

    shape: tuple[int, ...]
    dtype: str
    storage: int
    requires_grad: bool


class OperatorCall(NamedTuple):
    """One operator that ran.

    Attributes:
        name: With its overload: ``"aten.convolution.default"``.
        phase: One of :data:`PHASES`.
        step: Optimizer step, from 0.
        module: Path of the module that ran; in the backward, of the one whose forward it belongs to.
        inputs: Its tensors, those in lists included, in order.
        outputs: What it returned.
        arguments: The other positional arguments, as they are where they are plain values.
        flops: Floating-point operations as torch's counter knows them; ``None`` for unknown.
    """

    name: str
    phase: str
    step: int
    module: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: tuple[object, ...]
    flops: int | None


class Substitution(NamedTuple):
    """A question about values that was answered without knowing them.

    Attributes:
        question: What was asked: ``"item"``, ``"nonzero"``, ``"boolean index"``...
        answer: What was answered, in words: ``"the largest possible size"``.
        place: ``file:line`` of the user's code that asked.
        num_times: How often, there.
    """

    question: str
    answer: str
    place: str
    num_times: int


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """Every allocation and free of some training steps, in order.

    Attributes:
        events: Oldest first. The first ones, in phase ``before``, are parameters, buffers and batch.
        marks: Where steps and phases begin.
        operators: The calls, where they were recorded; empty otherwise.
        substitutions: What was answered pessimistically. With any, the trace is an upper bound.
        rows: Rows of the batch; ``None`` where it has none.
        num_steps: Optimizer steps that were traced.
        is_measured: Whether real tensors were run; fake ones otherwise.

    Example:
        >>> def event(storage, num_bytes, kind, phase):
        ...     return MemoryEvent(storage, num_bytes, kind, phase, 0, "", "", -1)
        >>> trace = MemoryTrace(
        ...     events=(
        ...         event(0, 100, "parameter", "before"),
        ...         event(1, 60, "activation", "forward"),
        ...         event(2, 50, "gradient", "backward"),
        ...         event(1, -60, "activation", "backward"),
        ...     ),
        ...     marks=(), rows=4, num_steps=1,
        ... )
        >>> trace.peak_bytes, trace.peak_phase, trace.final_bytes
        (210, 'backward', 150)
        >>> trace.by_kind()
        {'parameter': 100, 'gradient': 50, 'activation': 60}
        >>> trace.phase_peaks()
        {'before': 100, 'forward': 160, 'backward': 210}
    """

    events: tuple[MemoryEvent, ...]
    marks: tuple[TraceMark, ...]
    rows: int | None
    num_steps: int
    operators: tuple[OperatorCall, ...] = ()
    substitutions: tuple[Substitution, ...] = field(default=())
    is_measured: bool = False

    @cached_property
    def _peak(self) -> tuple[int, int]:
        """Bytes at the peak, and the position of the event that reached it first."""
        highest, position = 0, -1
        for index, live_bytes in enumerate(self.live_curve()):
            if live_bytes > highest:
                highest, position = live_bytes, index
        return highest, position

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once: the sum of storages, without rounding or workspaces."""
        return self._peak[0]

    @property
    def peak_event(self) -> int:
        """Position of the event that reached the peak first; -1 when nothing was allocated."""
        return self._peak[1]

    @property
    def peak_phase(self) -> str | None:
        """The phase in which the peak was reached first; ``None`` when nothing was allocated."""
        return self.events[self.peak_event].phase if self.events else None

    @property
    def final_bytes(self) -> int:
        """What is held when the last step has ended."""
        return sum(event.num_bytes for event in self.events)

    def live_curve(self) -> Iterator[int]:
        """Give the bytes held after each event."""
        live_bytes = 0
        for event in self.events:
            live_bytes += event.num_bytes
            yield live_bytes

    def by_kind(self, event: int | None = None) -> dict[str, int]:
        """Return the bytes held after an event, by kind; kinds that hold nothing are left out.

        Args:
            event: Position of the event; ``None`` is the peak.
        """
        held = dict.fromkeys(KINDS, 0)
        for entry in self._until(event):
            held[entry.kind] = held.get(entry.kind, 0) + entry.num_bytes
        return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes}

    def by_module(self, event: int | None = None) -> dict[str, int]:
        """Return the bytes held after an event, by the path of the module that allocated them.

        Args:
            event: Position of the event; ``None`` is the peak.

        Returns:
            The largest first. Parameters and buffers belong to the module that owns them.
        """
        held: dict[str, int] = {}
        for entry in self._until(event):
            held[entry.module] = held.get(entry.module, 0) + entry.num_bytes
        ordered = sorted(held.items(), key=lambda item: -item[1])
        return {module: num_bytes for module, num_bytes in ordered if num_bytes}

    def phase_peaks(self, step: int | None = None) -> dict[str, int]:
        """Return the most that was held in each phase.

        Args:
            step: Of which step, from 0; ``None`` is all of them.
        """
        peaks: dict[str, int] = {}
        for entry, live_bytes in zip(self.events, self.live_curve(), strict=True):
            if step is None or entry.step == step:
                peaks[entry.phase] = max(peaks.get(entry.phase, 0), live_bytes)
        return peaks

    def requests(self) -> Iterator[tuple[int, int | None]]:
        """Give what ``lightning_oom.memory.allocator.CachingAllocator.replay`` takes."""
        for event in self.events:
            yield event.storage, event.num_bytes if event.num_bytes > 0 else None

    def _until(self, event: int | None) -> tuple[MemoryEvent, ...]:
        return self.events[: (self.peak_event if event is None else event) + 1]
