"""Plain attributes after micro-batches, as one step would have left them."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.outputs import merge_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_oom.recovery.snapshot.attributes import SavedAttributes

__all__ = ["merge_attributes"]

_NUMBERS = (int, float)


def merge_attributes(
    saved: SavedAttributes, counted: Sequence[dict[str, float]], rows: Sequence[int]
) -> None:
    """Undo the repetition that micro-batches bring to counters and lists of step outputs.

    A number that grew by the same amount in every micro-batch (``self.steps += 1``) grows by that
    amount once - unless the amount is the number of rows (``self.samples += len(x)``). A list that
    grew by one entry per micro-batch gets one entry, joined as step outputs are. Numbers and lists
    in a dictionary are treated alike. Everything else stays as the last micro-batch left it: what a
    moving average of micro-batches means for the batch cannot be known.

    Args:
        saved: The attributes before the step.
        counted: :meth:`SavedAttributes.counters` after every micro-batch.
        rows: Rows of every micro-batch.

    Example:
        >>> import torch
        >>> from lightning_oom.recovery.snapshot import Attributes
        >>> model = torch.nn.Module()
        >>> model.__class__ = type("Model", (torch.nn.Module,), {})
        >>> model.steps, model.losses = 10, []
        >>> saved, counted = Attributes(model).take(), []
        >>> for loss in (1.0, 4.0):
        ...     model.steps += 1
        ...     model.losses.append(loss)
        ...     counted.append(saved.counters())
        >>> merge_attributes(saved, counted, rows=[2, 1])
        >>> model.steps, model.losses
        (11, [2.0])
    """
    if len(rows) < 2:  # noqa: PLR2004 - one micro-batch is the batch
        return
    for path, namespace, name, before in _slots(saved):
        now = namespace.get(name)
        if type(before) in _NUMBERS and type(now) is type(before):
            numbers = [before, *(count.get(path, before) for count in counted)]
            step = _step_of(numbers, rows)
            if step is not None:
                namespace[name] = before + step
        elif isinstance(before, _Length) and type(now) in (list, deque):
            _merge_growth(now, before.entries, rows)


class _Length:
    """How many entries a list had."""

    __slots__ = ("entries",)

    def __init__(self, entries: int) -> None:
        self.entries = entries


def _step_of(numbers: Sequence[float], rows: Sequence[int]) -> float | None:
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    first = steps[0]
    if len(steps) != len(rows) or not first or any(step != first for step in steps):
        return None
    counts_rows = all(step == count for step, count in zip(steps, rows, strict=True))
    return None if counts_rows and first != 1 else first


def _merge_growth(entries: Any, before: int, rows: Sequence[int]) -> None:
    if len(entries) - before != len(rows) or getattr(entries, "maxlen", None) is not None:
        return
    new = list(entries)[before:]
    merged = merge_outputs(new, list(rows))
    for _ in new:
        entries.pop()
    entries.append(merged)


def _slots(saved: SavedAttributes) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, dictionary, key and earlier value of what may have been counted twice."""
    for (prefix, owner), state in zip(saved.owners, saved.states, strict=True):
        yield from _entries(prefix, vars(owner), state.entries)


def _entries(prefix: str, namespace: Any, entries: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    children = dict(entries.children)
    for name, value in entries.plain.items():
        child = children.get(name)
        inner = getattr(child, "entries", None)
        if child is None:
            yield f"{prefix}{name}", namespace, name, value
        elif inner is not None and isinstance(inner.plain, list):
            yield f"{prefix}{name}", namespace, name, _Length(len(inner.plain))
        elif inner is not None and isinstance(namespace.get(name), dict):
            yield from _entries(f"{prefix}{name}.", namespace[name], inner)
