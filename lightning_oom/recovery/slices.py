"""Which few rows of a batch tell most about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["choose_windows"]

_SCANNED_ROWS = 64
_SCANNED_ELEMENTS = 4096


def choose_windows(tensors: Sequence[Tensor], rows: int, num_rows: int) -> list[int]:
    """Rank slices of neighbouring rows by how much their rows differ from each other.

    A slice of equal rows hides that rows influence each other; so does, for a token mean, a slice
    of rows with equally many counted tokens. Rows therefore differ in their values, and in how
    often they hold the smallest value of their tensor (which padding and ignored labels mostly
    are).

    Args:
        tensors: The tensors of the batch; those without ``rows`` rows are passed over.
        rows: Rows of the batch.
        num_rows: Rows per slice, in [1, ``rows``].

    Returns:
        First rows of the slices, most telling first, among the first 64 rows of the batch; empty
        when every slice holds equal rows only.

    Example:
        >>> choose_windows([torch.tensor([5, 5, 5, 7, 8, 9])], rows=6, num_rows=3)
        [2, 3, 1]
    """
    traits: list[list[bytes | int]] = []
    scanned = min(rows, _SCANNED_ROWS)
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.ndim and tensor.shape[0] == rows:
            traits += _traits_of(tensor.detach()[:scanned])
    starts = range(scanned - num_rows + 1)
    if not traits:
        return list(starts)
    scores = {start: _score(traits, start, start + num_rows) for start in starts}
    ranked = sorted(starts, key=lambda start: -scores[start])
    return [start for start in ranked if scores[start] > 0]


def _traits_of(tensor: Tensor) -> list[list[bytes | int]]:
    """Return two traits per row: its values, and how often it holds the smallest of all."""
    flat = tensor.reshape(len(tensor), -1)[:, :_SCANNED_ELEMENTS]
    flat = (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).to("cpu")
    if not flat.numel():
        return []
    values = flat.to(torch.float64).numpy()
    counts: list[bytes | int] = [int(n) for n in (values == values.min()).sum(axis=1)]
    return [[row.tobytes() for row in values], counts]


def _score(traits: list[list[bytes | int]], start: int, stop: int) -> int:
    """Count different rows beyond the first; that the first two differ counts once more."""
    return sum(
        len(set(trait[start:stop])) - 1 + (trait[start] != trait[min(start + 1, stop - 1)])
        for trait in traits
    )
