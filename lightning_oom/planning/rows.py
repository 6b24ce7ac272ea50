"""The same batch, and the same trace, with another number of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.skeleton import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["TraceByRows", "count_rows", "resize_rows", "take_rows"]


def count_rows(batch: Any) -> int | None:
    """Return the size that most tensors of a batch share in dimension 0; of equals, the first.

    Args:
        batch: Any nesting of tensors.

    Returns:
        ``None`` where no tensor has a dimension.

    Example:
        >>> count_rows({"x": torch.zeros(4, 3), "y": torch.zeros(4), "weights": torch.zeros(7)})
        4
    """
    sizes: Counter[int] = Counter()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            sizes[tensor.shape[0]] += 1
        return tensor

    Skeleton(count).value(batch)
    return sizes.most_common(1)[0][0] if sizes else None


def take_rows(batch: Any, rows: int) -> Any:
    """Return a batch like ``batch`` with ``rows`` rows: its own ones, over and over.

    Tensors with as many entries in dimension 0 as the batch has rows are cut or repeated, and so are
    lists of that length that do not hold such tensors. Everything else is shared.

    Args:
        batch: An example.
        rows: Rows wanted, at least 1.

    Raises:
        ValueError: ``rows`` is below 1, or the batch has none.

    Example:
        >>> take_rows({"x": torch.tensor([1, 2]), "name": "a"}, 5)
        {'x': tensor([1, 2, 1, 2, 1]), 'name': 'a'}
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows!r}")
    rows_before = count_rows(batch)
    if rows_before == 0:
        raise ValueError("the batch has no rows to take: give one with a row at least")
    return resize_rows(batch, rows, rows_before)


def resize_rows(
    batch: Any,
    rows: int,
    rows_before: int | None,
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Do as :func:`take_rows`, of a batch whose rows were counted.

    Args:
        batch: An example.
        rows: Rows wanted.
        rows_before: Rows that it has; ``None`` leaves it as it is.
        take: Takes the rows at some positions out of a tensor.
    """
    if rows_before is None:
        return batch

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != rows_before:
            return tensor
        positions = torch.arange(rows, device=tensor.device) % max(rows_before, 1)
        return tensor.index_select(0, positions) if take is None else take(tensor, positions)

    return Skeleton(resize).value(_resize_lists(batch, rows, rows_before))


def _resize_lists(value: Any, rows: int, rows_before: int) -> Any:
    if isinstance(value, dict) and type(value) is dict:
        return {name: _resize_lists(item, rows, rows_before) for name, item in value.items()}
    if type(value) not in (list, tuple):
        return value
    has_rows = any(
        isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == rows_before
        for item in value
    )
    if type(value) is list and len(value) == rows_before and not has_rows:
        return list(islice(cycle(value), rows))
    return type(value)(_resize_lists(item, rows, rows_before) for item in value)


@dataclass(frozen=True, slots=True)
class TraceByRows:
    """A trace for any number of rows: each allocation grows by so many bytes per row.

    The peak is the largest of many lines; a line through two peaks would be too low.

    Attributes:
        trace: The trace at fewer rows.
        slopes: Bytes per row, for each event of the trace.

    Example:
        >>> from lightning_oom.planning.fake_step import FakeStep
        >>> step = FakeStep(torch.nn.Linear(4, 2), torch.zeros(2, 4))
        >>> by_rows = TraceByRows.between(step.run(), step.run(rows=3))
        >>> by_rows.peak_bytes(64) == step.run(rows=64).peak_bytes
        True
    """

    trace: MemoryTrace
    slopes: tuple[float, ...]

    @classmethod
    def between(cls, first: MemoryTrace, second: MemoryTrace) -> TraceByRows:
        """Draw the lines through two traces of the same step at different rows.

        Args:
            first: At 2 rows or more: with 1, other operators may run.
            second: At more rows, usually one more.

        Raises:
            StepNotTracedError: They do not consist of the same events, so that no line can be drawn;
                the message names the first operator that differs.
            ValueError: They have the same number of rows, or none.
        """
        if first.rows is None or second.rows is None or first.rows == second.rows:
            raise ValueError(
                f"two numbers of rows are needed, got {first.rows!r} and {second.rows!r}"
            )
        shift = second.rows - first.rows
        for before, after in zip(first.events, second.events, strict=False):
            if (before.storage, before.operator, before.phase, before.num_bytes > 0) != (
                after.storage,
                after.operator,
                after.phase,
                after.num_bytes > 0,
            ):
                raise StepNotTracedError(
                    f"the step does not run the same operators at {first.rows} and {second.rows} "
                    f"rows: {_describe(before)} against {_describe(after)}"
                )
        if len(first.events) != len(second.events):
            raise StepNotTracedError(
                f"the step does not run the same operators at {first.rows} and {second.rows} rows: "
                f"{len(first.events)} allocations and frees against {len(second.events)}"
            )
        slopes = tuple(
            (after.num_bytes - before.num_bytes) / shift
            for before, after in zip(first.events, second.events, strict=True)
        )
        return cls(first, slopes)

    def at(self, rows: int) -> MemoryTrace:
        """Return the trace at so many rows, from 1; shapes of recorded operators are left out."""
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows!r}")
        events = tuple(
            event._replace(num_bytes=_extended(event.num_bytes, slope, rows - self._first_rows))
            for event, slope in zip(self.trace.events, self.slopes, strict=True)
        )
        return replace(self.trace, events=events, rows=rows, operators=())

    def peak_bytes(self, rows: int) -> int:
        """Return the peak at so many rows."""
        return self.at(rows).peak_bytes

    def largest_rows(self, budget_bytes: int) -> int:
        """Return the most rows whose peak is not above a budget; 0 where not even one fits.

        Args:
            budget_bytes: Bytes that may be held, blocks and workspaces left out.

        Raises:
            ValueError: The peak does not grow with the rows, so that there is no largest number.
        """
        limit = min(self._crossings(budget_bytes), default=None)
        if limit is None:
            raise ValueError("the peak does not grow with the number of rows")
        return max(int(limit // 1), 0)

    def _crossings(self, budget_bytes: int) -> Iterator[float]:
        """Give, for each point of the curve, the rows at which it reaches the budget."""
        live_bytes, slope = 0, 0.0
        for event, growth in zip(self.trace.events, self.slopes, strict=True):
            live_bytes += event.num_bytes
            slope += growth
            if slope > 0:
                yield self._first_rows + (budget_bytes - live_bytes) / slope
            elif live_bytes > budget_bytes:
                yield 0

    @property
    def _first_rows(self) -> int:
        return self.trace.rows or 0


def _extended(num_bytes: int, slope: float, shift: int) -> int:
    extended = num_bytes + round(slope * shift)
    return max(extended, 0) if num_bytes > 0 else min(extended, 0)


def _describe(event: Any) -> str:
    action = "allocates" if event.num_bytes > 0 else "frees"
    return f"{event.operator or 'a tensor'} {action} in {event.module or 'the root'}"
