"""Count the rows of a batch, cut it into micro-batches, and look at it without touching it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches.batch_types import register_splitter
from lightning_oom.recovery.batches.containers import batch_tensors, copy_containers
from lightning_oom.recovery.batches.row_plan import plan_rows
from lightning_oom.recovery.batches.signature import BatchSignature, describe_batch, quick_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "BatchSignature",
    "batch_tensors",
    "copy_containers",
    "count_rows",
    "describe_batch",
    "register_splitter",
    "split_batch",
    "split_sizes",
    "take_rows",
]


def count_rows(batch: Any) -> int | None:
    """Count the rows of a batch: the length of dimension 0 that all its leaves share.

    Args:
        batch: Anything that :func:`split_batch` takes.

    Returns:
        The number of rows, or ``None`` when no leaf has rows.

    Raises:
        BatchSplitError: Two leaves disagree on how many, or it cannot be told what the rows are.

    Example:
        >>> import torch
        >>> count_rows({"x": torch.zeros(9, 3), "scale": 0.5}), count_rows({"scale": 0.5})
        (9, None)
    """
    rows = quick_rows(batch)
    return rows if rows is not None else plan_rows(batch).rows


def split_sizes(rows: int, max_rows: int) -> list[int]:
    """Share out ``rows`` over as few micro-batches of at most ``max_rows`` rows as possible.

    Sizes differ by at most one, larger ones first.

    Args:
        rows: Rows in all, at least 0.
        max_rows: Upper bound on rows per micro-batch, at least 1.

    Raises:
        ValueError: ``max_rows`` is below 1, or ``rows`` below 0.

    Example:
        >>> split_sizes(9, 8), split_sizes(9, 2), split_sizes(3, 8)
        ([5, 4], [2, 2, 2, 2, 1], [3])
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is at least 1, got {max_rows}")
    if rows < 0:
        raise ValueError(f"a number of rows is at least 0, got {rows}")
    num_parts = max(1, -(-rows // max_rows))
    least, extra = divmod(rows, num_parts)
    return [least + 1] * extra + [least] * (num_parts - extra)


def split_batch(
    batch: Any, max_rows: int, *, split_fn: Callable[[Any, int], Sequence[Any]] | None = None
) -> list[Any]:
    """Cut a batch into micro-batches of at most ``max_rows`` rows, losing and repeating none.

    A row is one index along dimension 0. The number of micro-batches is the smallest that honours
    ``max_rows``, and their sizes differ by at most one row, so no smaller peak is possible with
    that many: 9 rows at ``max_rows=8`` give 5 + 4, not 8 + 1.

    Args:
        batch: A tensor of shape ``(rows, ...)``, or any nesting of mappings, sequences, named
            tuples and dataclasses with such tensors as leaves; also NumPy arrays, packed
            sequences, nested and sparse tensors, and types entered with
            :func:`~lightning_oom.recovery.batches.batch_types.register_splitter`. A list or tuple that
            holds no tensor and has ``rows`` items (file names, captions) is cut like a tensor, as
            is a list with one tensor, mapping or tuple per row (images of unequal sizes). Leaves
            without rows (0-d tensors, numbers, strings, ``None``, sets) are shared by all.
        max_rows: Upper bound on rows per micro-batch, at least 1.
        split_fn: Called instead as ``split_fn(batch, max_rows)``; returns the micro-batches.

    Returns:
        ``ceil(rows / max_rows)`` batches with the structure of ``batch``, in row order; one,
        equal to ``batch``, when there are no rows. Tensors in them are views of the originals: no
        device memory is allocated. (Packed, sparse and strided nested tensors have no such views:
        their rows are copied.)

    Raises:
        ValueError: ``max_rows`` is below 1.
        BatchSplitError: No leaf has rows, two leaves disagree on how many, or a list can be read
            in two ways. The message names the path and the shape of both. Also when ``split_fn``
            does not return a list of at least one batch.

    Note:
        Micro-batches are not equal in size, so the mean of their means is not the batch mean.
        Weight each loss by its share of the rows to get the gradient of the whole batch.

    Example:
        >>> import torch
        >>> batch = {"x": torch.zeros(9, 3), "name": list("abcdefghi"), "scale": 0.5}
        >>> parts = split_batch(batch, max_rows=8)
        >>> [tuple(part["x"].shape) for part in parts]
        [(5, 3), (4, 3)]
        >>> parts[1]["name"], parts[1]["scale"]
        (['f', 'g', 'h', 'i'], 0.5)

        Leaves that disagree are an error, never a silent cut:

        >>> split_batch({"x": torch.zeros(12, 3), "y": torch.zeros(6)}, max_rows=3)
        Traceback (most recent call last):
            ...
        lightning_oom.errors.BatchSplitError: batch['x'] has 12 rows (12, 3), batch['y'] has 6 \
rows (6,): say how to cut the batch with split_fn
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is at least 1, got {max_rows}")
    if split_fn is not None:
        return _split_by(split_fn, batch, max_rows)
    plan = plan_rows(batch)
    if plan.rows is None:
        raise BatchSplitError(
            f"no leaf of the batch (a {type(batch).__qualname__}) has rows: say how to cut the "
            "batch with split_fn"
        )
    if plan.rows <= max_rows:
        return [batch]
    parts, start = [], 0
    for rows in split_sizes(plan.rows, max_rows):
        parts.append(plan.take(batch, start, start + rows))
        start += rows
    return parts


def _split_by(
    split_fn: Callable[[Any, int], Sequence[Any]], batch: Any, max_rows: int
) -> list[Any]:
    parts = split_fn(batch, max_rows)
    if not isinstance(parts, (list, tuple)) or not parts:
        raise BatchSplitError(
            f"split_fn returns a list of at least one micro-batch, got {type(parts).__qualname__}"
            f"{' without items' if isinstance(parts, (list, tuple)) else ''}"
        )
    return list(parts)


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Take the rows ``[start, stop)`` of a batch, as views.

    Args:
        batch: Anything that :func:`split_batch` takes.
        start: First row, at least 0.
        stop: One past the last row, more than ``start`` and at most the number of rows.

    Raises:
        ValueError: The range is empty or reaches outside the batch.
        BatchSplitError: As for :func:`split_batch`.

    Example:
        >>> import torch
        >>> take_rows({"x": torch.arange(5), "name": "a"}, 1, 3)
        {'x': tensor([1, 2]), 'name': 'a'}
    """
    plan = plan_rows(batch)
    if plan.rows is None:
        raise BatchSplitError(f"no leaf of the batch (a {type(batch).__qualname__}) has rows")
    if not 0 <= start < stop <= plan.rows:
        raise ValueError(f"rows [{start}, {stop}) are not within the {plan.rows} of the batch")
    return plan.take(batch, start, stop)
