"""How many rows the pieces of a batch have, also where only the user's own function can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches import count_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["rows_of_parts"]


def rows_of_parts(
    parts: Sequence[Any], split_fn: Callable[[Any, int], Sequence[Any]] | None = None
) -> list[int]:
    """Count the rows of each micro-batch.

    Args:
        parts: Micro-batches.
        split_fn: The user's way to cut a batch; where rows cannot be counted, the number of pieces
            that it cuts a micro-batch into at one row each.

    Returns:
        One number per part, at least 1.

    Raises:
        BatchSplitError: A part's rows cannot be counted and there is no ``split_fn``.

    Example:
        >>> import torch
        >>> rows_of_parts([torch.zeros(5, 2), torch.zeros(4, 2)])
        [5, 4]
    """
    return [_rows_of(part, split_fn) for part in parts]


def _rows_of(part: Any, split_fn: Callable[[Any, int], Sequence[Any]] | None) -> int:
    try:
        rows = count_rows(part)
    except BatchSplitError:
        if split_fn is None:
            raise
        rows = None
    if rows:
        return rows
    return len(split_fn(part, 1)) if split_fn is not None else 1
