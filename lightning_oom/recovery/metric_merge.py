"""Metrics that see micro-batches, left as if they had seen the batch.

``forward`` of a torchmetrics metric computes the value of its batch and adds the batch's state to
the accumulated one. While the micro-batches of a step run, :class:`MetricMerge` listens to that
addition; afterwards it reduces the states of the micro-batches to the state of the batch, computes
its value, and adds it to what was accumulated before the step - once, so that counters, means of
means and values of the step are those of the unsplit run. No earlier step has to be known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom import _torchmetrics as door

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

__all__ = ["MetricMerge"]


@dataclass(slots=True)
class _Heard:
    """What one metric's ``forward`` has added so far."""

    earlier: dict[str, Any]
    """The state before the step."""
    num_earlier: int
    num_seen: int
    parts: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """The index of a micro-batch and the state of that micro-batch alone."""
    undisturbed: bool = True
    """Nothing but ``forward`` has changed the accumulated state."""


class MetricMerge:
    """Listens to metrics while micro-batches run, and merges what they saw.

    Metrics whose state is not a reduction of the states of its batches
    (``full_state_update`` not ``False``), and those that synchronise on every step, keep the state
    that the micro-batches left, which is right for the end of the epoch; they have no
    :meth:`value_of` the batch. A window of batches (``Running``) counts micro-batches.

    Args:
        metrics: Path and metric.
        rows: Rows of every micro-batch.

    Note:
        Cost: none without a split. With one, the states of the micro-batches are held until the
        step ends, and ``compute`` runs once per metric that was called.

    Example:
        >>> from torchmetrics.aggregation import MeanMetric
        >>> mean = MeanMetric()
        >>> merge = MetricMerge([("mean", mean)], rows=[3, 1])
        >>> with merge:
        ...     for index, part in enumerate([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]):
        ...         merge.index = index
        ...         _ = mean(part)
        >>> merge.finish()
        >>> merge.value_of(mean), mean.update_count
        (tensor(4.), 1)
    """

    def __init__(self, metrics: Iterable[tuple[str, Any]], *, rows: Sequence[int]) -> None:
        self.index = 0
        self._rows = list(rows)
        self._metrics = [(p.rstrip("."), m) for p, m in metrics if isinstance(m, door.Metric)]
        self._mergeable = [(p, m) for p, m in self._metrics if door.can_merge_states(m)]
        self._counts = [(metric, door.num_updates(metric)) for _, metric in self._metrics]
        self._heard: dict[int, _Heard] = {}
        self._values: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for _, metric in self._mergeable:
            door.shadow_reduction(metric, self._listener(metric))
        return self

    def __exit__(self, *exception: object) -> None:
        for _, metric in self._mergeable:
            door.unshadow_reduction(metric)

    @torch.no_grad()
    def finish(self) -> None:
        """Give every metric the state and the batch value of the unsplit step."""
        for metric, earlier in self._counts:
            moved, left_over = divmod(door.num_updates(metric) - earlier, len(self._rows))
            if id(metric) not in self._heard and moved > 0 and not left_over:
                door.set_num_updates(metric, earlier + moved)
        for _, metric in self._mergeable:
            heard = self._heard.get(id(metric))
            if heard is not None:
                self._merge(metric, heard)

    def value_of(self, metric: Any) -> Any:
        """Return the metric's value on the whole batch, ``None`` where it cannot be had."""
        return self._values.get(id(metric))

    def called(self) -> list[tuple[str, Any]]:
        """Return path and metric of those whose ``forward`` ran in the current micro-batch."""
        return [
            (path, metric)
            for path, metric in self._mergeable
            if (heard := self._heard.get(id(metric))) and heard.parts[-1][0] == self.index
        ]

    def computed(self) -> list[tuple[str, Any]]:
        """Return path and metric of those updated in this step that hold a computed result."""
        paths = [path for path, _ in self._metrics]
        return [
            (path, metric)
            for path, (metric, earlier) in zip(paths, self._counts, strict=True)
            if door.computed_value(metric) is not None and door.num_updates(metric) != earlier
        ]

    def _listener(self, metric: Any) -> Any:
        add_to_earlier = door.reduction(metric)

        def listen(earlier: dict[str, Any]) -> None:
            count = door.num_updates(metric)  # forward has counted this batch already
            heard = self._heard.get(id(metric))
            if heard is None:
                heard = self._heard[id(metric)] = _Heard(earlier, count - 1, count - 1)
            heard.undisturbed = heard.undisturbed and count == heard.num_seen + 1
            heard.num_seen = count
            heard.parts.append((self.index, door.state_of(metric)))
            add_to_earlier(earlier)

        return listen

    def _merge(self, metric: Any, heard: _Heard) -> None:
        """Redo what the calls of ``forward`` did, once per call of the unsplit step."""
        calls = self._calls(heard)
        if calls is None:
            return
        left, num_left = door.state_of(metric), door.num_updates(metric)
        keep = heard.undisturbed and num_left == heard.num_seen
        state = heard.earlier
        for number, parts in enumerate(calls):
            rows = [self._rows[index] for index, _ in parts]
            door.merge_states(metric, [part for _, part in parts], rows)
            value = door.compute_locally(metric)
            door.add_earlier_state(metric, state, heard.num_earlier + number + 1)
            state = door.state_of(metric)
        self._values[id(metric)] = value
        if keep:
            door.set_batch_value(metric, value)
        else:
            door.set_state(metric, left)
            door.set_num_updates(metric, num_left)

    def _calls(self, heard: _Heard) -> list[list[tuple[int, dict[str, Any]]]] | None:
        """Group the states by call of a micro-batch: the first of each, the second of each, ..."""
        calls: list[list[tuple[int, dict[str, Any]]]] = []
        seen: dict[int, int] = {}
        for index, part in heard.parts:
            number = seen.get(index, 0)
            seen[index] = number + 1
            if number == len(calls):
                calls.append([])
            calls[number].append((index, part))
        return calls or None
