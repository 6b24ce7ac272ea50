"""Every allocation and free of some steps, on any device, in a ring."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_oom._torch import tree_leaves
from lightning_oom.memory.allocations import AllocationWatcher, StorageLedger, storages_in

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable, Iterator

__all__ = ["AllocationRecord", "AllocationTimeline", "chrome_trace"]


class AllocationRecord(NamedTuple):
    """One storage that was allocated or freed.

    Attributes:
        seconds: Since the timeline began.
        num_bytes: Allocated; below 0 what was freed.
        live_bytes: Held by all storages that are known, after it.
        operator: That allocated; ``""`` for a free.
        phase: What the run was doing (``"forward"``), as the owner of the timeline says.
        step: Optimizer step, likewise.
    """

    seconds: float
    num_bytes: int
    live_bytes: int
    operator: str
    phase: str
    step: int


class AllocationTimeline(AllocationWatcher):
    """Records what is allocated and freed on a device while it is entered.

    Args:
        device: Of which device; ``None`` for all.
        max_records: The last so many are kept, at least 1: host memory is constant.

    Attributes:
        records: Oldest first.
        num_records: How many there were, those that were dropped included.
        peak: The record at which most was held, also when it was dropped; ``None`` before the first.
        phase: Name that the next records get.
        step: Number that the next records get.

    Note:
        Cost: 10 us per operator and 2 us per record while entered; 300 bytes per record. Memory that
        an operator takes and gives back within itself is not seen.

    Example:
        >>> import torch
        >>> timeline = AllocationTimeline(max_records=100)
        >>> with timeline:
        ...     x = torch.ones(256)
        ...     del x
        >>> [(record.num_bytes, record.live_bytes) for record in timeline.records]
        [(1024, 1024), (-1024, 0)]
    """

    def __init__(self, *, device: torch.device | None = None, max_records: int = 20_000) -> None:
        super().__init__(device=device)
        if max_records < 1:
            raise ValueError(f"max_records is at least 1, got {max_records!r}")
        self.records: deque[AllocationRecord] = deque(maxlen=max_records)
        self.num_records = 0
        self.peak: AllocationRecord | None = None
        self.phase = ""
        self.step = 0
        self.ledger = _RecordingLedger(self)
        self._names: dict[Any, str] = {}
        self._began = time.perf_counter()

    def register(self, objects: Iterable[Any]) -> int:
        """Count what exists already, so that ``live_bytes`` includes it; return its bytes.

        Args:
            objects: Modules, optimizers, tensors or nestings of tensors.
        """
        return sum(
            self.ledger.add(storage)
            for tensor in _tensors_of(objects)
            for storage in storages_in(tensor, self)
        )

    def refuses(self, operator: Any, num_bytes: int) -> bool:
        """Record the allocation, and let it be."""
        self._note(num_bytes, self._name_of(operator))
        return False

    def saw_free(self, num_bytes: int) -> None:
        """Record a free."""
        self._note(-num_bytes, "")

    def _note(self, num_bytes: int, operator: str) -> None:
        record = AllocationRecord(
            time.perf_counter() - self._began,
            num_bytes,
            self.ledger.live_bytes,
            operator,
            self.phase,
            self.step,
        )
        self.records.append(record)
        self.num_records += 1
        if self.peak is None or record.live_bytes > self.peak.live_bytes:
            self.peak = record

    def _name_of(self, operator: Any) -> str:
        name = self._names.get(operator)
        if name is None:
            name = self._names[operator] = str(operator)
        return name


class _RecordingLedger(StorageLedger):
    """Tells a timeline of each storage that dies."""

    def __init__(self, timeline: AllocationTimeline) -> None:
        super().__init__()
        self._timeline = timeline

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        before = self.live_bytes
        super()._forget(ref)
        if self.live_bytes < before:
            self._timeline.saw_free(before - self.live_bytes)


def chrome_trace(records: Iterable[AllocationRecord], *, rank: int = 0) -> dict[str, Any]:
    """Return the records in the format that Perfetto and ``chrome://tracing`` open.

    Args:
        records: Oldest first.
        rank: Shown as the process.

    Returns:
        Plain data for :func:`json.dump`: a counter of live bytes, and one slice per phase of a step.

    Example:
        >>> record = AllocationRecord(0.5, 1024, 4096, "aten.mm.default", "forward", 3)
        >>> chrome_trace([record])["traceEvents"][0]["args"]
        {'live_bytes': 4096}
    """
    events: list[dict[str, Any]] = []
    spans: dict[tuple[int, str], list[float]] = {}
    for record in records:
        microseconds = record.seconds * 1e6
        common = {"pid": rank, "tid": 0, "ts": microseconds}
        events.append(
            {"name": "memory", "ph": "C", **common, "args": {"live_bytes": record.live_bytes}}
        )
        if record.num_bytes > 0:
            events.append(
                {
                    "name": record.operator,
                    "ph": "i",
                    "s": "t",
                    **common,
                    "args": {"num_bytes": record.num_bytes, "step": record.step},
                }
            )
        span = spans.setdefault((record.step, record.phase), [microseconds, microseconds])
        span[1] = microseconds
    for (step, phase), (begin, end) in spans.items():
        events.append(
            {
                "name": f"step {step} {phase}".strip(),
                "ph": "X",
                "pid": rank,
                "tid": 1,
                "ts": begin,
                "dur": end - begin,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tensors_of(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    for leaf in objects:
        if isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
            yield from (p.grad for p in leaf.parameters() if p.grad is not None)
        elif isinstance(leaf, torch.optim.Optimizer):
            yield from _tensors_of(tree_leaves(list(leaf.state.values())))
        else:
            yield from (found for found in tree_leaves(leaf) if isinstance(found, torch.Tensor))
