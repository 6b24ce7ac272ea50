"""Tell steady growth from warm-up, saw-tooth, noise and what is cleared at the end of an epoch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_oom.memory.leaks_census import Holding

__all__ = ["AllocatedTrend", "Growth", "Sample"]

_MAX_SAMPLES = 64
_WARM_UP = 3
_GRAPH_RISES = 8
"""So many steps in a row have added to a graph before it is called a leak."""

_LONG_EPOCH_RISES = 12
_LAST_EPOCH_RISES = 6
_MANY_BYTES = 64 * 2**10
_ALIAS_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """What an attribute held after the ``count``-th step of a stage."""

    count: int
    holding: Holding


@dataclass(slots=True)
class Growth:
    """The history of one attribute within one stage.

    Attributes:
        samples: Since the attribute was last seen to shrink, or the epoch began.
        ends: What was left after each of the last epochs.
        has_leaked: Growth outlived an epoch or the run.
        grows_graph: Its graph grows from step to step.
    """

    samples: list[Sample] = field(default_factory=list)
    ends: list[Sample] = field(default_factory=list)
    has_leaked: bool = False
    grows_graph: bool = False

    def add(self, sample: Sample) -> None:
        """Add what the attribute holds now; forget what came before if that was more."""
        if self.samples and _has_shrunk(self.samples[-1].holding, sample.holding):
            self.empty()
            self.ends = []
        self.samples.append(sample)
        if len(self.samples) > _MAX_SAMPLES:
            self.samples = self.samples[:1] + self.samples[2::2]
        self.grows_graph = self.grows_graph or self._adds_to_graph()

    def empty(self) -> None:
        """Note that what the attribute held was taken out."""
        self.samples = []
        self.has_leaked = self.grows_graph = False

    def close(self, now: Sample | None, *, is_last: bool) -> None:
        """Judge the epoch that has ended.

        Args:
            now: What the attribute holds after everything that clears it has run.
            is_last: No further epoch follows.
        """
        last = self.samples[-1] if self.samples else None
        if now is None or last is None or _has_shrunk(last.holding, now.holding):
            self.ends = []
        else:
            if now.count > last.count:
                self.samples.append(now)
            rises = self._num_rises()
            self.ends = [*self.ends, now][-4:]
            if self._is_steady():
                appends = now.holding.kind in ("list", "metric_state")
                self.has_leaked |= appends and rises >= _LONG_EPOCH_RISES
                self.has_leaked |= is_last and rises >= _LAST_EPOCH_RISES
            self.has_leaked |= self._outgrows_epochs()
        if not self.has_leaked:
            self.samples = []

    @property
    def latest(self) -> Holding | None:
        """What was held at the last look."""
        if self.samples:
            return self.samples[-1].holding
        return self.ends[-1].holding if self.ends else None

    def is_growing(self) -> bool:
        """Say whether the attribute has grown up to now, for good or until something clears it."""
        return self._num_rises() >= 3 and self._is_steady()  # noqa: PLR2004 - fewer are chance

    def bytes_per_step(self) -> float:
        """Return the mean growth; 0.0 before there are two samples."""
        series = self.samples if len(self.samples) > 1 else self.ends
        if len(series) < 2:  # noqa: PLR2004 - a slope needs two points
            return 0.0
        first, last = series[0], series[-1]
        grown_bytes = last.holding.num_bytes - first.holding.num_bytes
        return grown_bytes / max(last.count - first.count, 1)

    def _num_rises(self) -> int:
        pairs = pairwise(self.samples)
        return sum(b.holding.num_bytes > a.holding.num_bytes for a, b in pairs)

    def _is_steady(self) -> bool:
        """Whether it still grows, as fast from burst to burst as from step to step."""
        steps = [
            (b.count, b.count - a.count, b.holding.num_bytes - a.holding.num_bytes)
            for a, b in pairwise(self.samples)
        ]
        rising = [count for count, _, grown in steps if grown > 0]
        if not rising or 2 * rising[-1] < self.samples[0].count + self.samples[-1].count:
            return False
        dense = [grown for _, distance, grown in steps if distance == 1]
        sparse = [(distance, grown) for _, distance, grown in steps if distance > 1]
        if not dense or not sparse:
            return True
        slope = sum(grown for _, grown in sparse) / sum(distance for distance, _ in sparse)
        return sum(dense) / len(dense) <= _ALIAS_FACTOR * slope

    def _outgrows_epochs(self) -> bool:
        """Whether each of the last epochs has left more, and more than a mean per epoch."""
        if len(self.ends) < 3:  # noqa: PLR2004 - two rises
            return False
        held = [end.holding for end in self.ends[-3:]]
        return all(
            b.num_bytes > a.num_bytes
            and (b.num_tensors > a.num_tensors + 1 or b.num_bytes > a.num_bytes + _MANY_BYTES)
            for a, b in pairwise(held)
        )

    def _adds_to_graph(self) -> bool:
        recent = [sample.holding for sample in self.samples[-_GRAPH_RISES - 1 :]]
        if len(recent) <= _GRAPH_RISES or not recent[-1].num_with_graph:
            return False
        pairs = list(pairwise(recent))
        if recent[-1].kind != "tensor":
            return all(b.num_with_graph > a.num_with_graph for a, b in pairs)
        graphs = [holding.graph for holding in recent]
        return all(
            a is not None and b is not None and b.num_nodes > a.num_nodes and a.oldest == b.oldest
            for a, b in pairwise(graphs)
        )


class AllocatedTrend:
    """Whether what a device holds after each step rises, noise and variable sizes allowed.

    Example:
        >>> trend = AllocatedTrend()
        >>> for count in range(16):
        ...     trend.add(count, 1000 + 10 * count)
        >>> trend.bytes_per_step()
        10.0
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[int, int]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, count: int, allocated_bytes: int) -> None:
        """Add one reading."""
        self._readings.append((count, allocated_bytes))

    def bytes_per_step(self) -> float | None:
        """Return how fast the floor rises; ``None`` where it does not, or is not known to.

        The least and the most of each quarter of the readings must be above those of the quarter
        before: under noise alone, that is rare.
        """
        readings = list(self._readings)[_WARM_UP:]
        length = len(readings) // 4
        if length < 3:  # noqa: PLR2004 - fewer have no least and most
            return None
        quarters = [readings[start : start + length] for start in range(0, 4 * length, length)]
        floors = [min(quarter, key=_value) for quarter in quarters]
        tops = [max(map(_value, quarter)) for quarter in quarters]
        rises = all(_value(b) > _value(a) for a, b in pairwise(floors))
        if not rises or any(b <= a for a, b in pairwise(tops)):
            return None
        (first, least), (last, most) = floors[0], floors[-1]
        return (most - least) / (last - first)


def _value(reading: tuple[int, int]) -> int:
    return reading[1]


def _has_shrunk(before: Holding, now: Holding) -> bool:
    """Whether something was taken out; numbers of long containers are estimates."""
    if now.kind != before.kind:
        return True
    if now.kind == "tensor":
        return now.num_bytes < before.num_bytes
    return (
        now.num_tensors < 0.98 * before.num_tensors
        or now.num_bytes < 0.8 * before.num_bytes
        or now.num_with_graph < 0.8 * before.num_with_graph
    )
