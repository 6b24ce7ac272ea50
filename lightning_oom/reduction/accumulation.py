"""Accumulation windows counted in rows: where one ends, and what each micro-batch weighs in it.

The gradient of a window is the mean over its rows, ``sum(rows_i * g_i) / sum(rows_i)``, where ``g_i`` is
the gradient of the mean loss of micro-batch ``i``. How many rows there are is known at the end only,
so that micro-batches are weighted by the rows that were planned, and the sum is corrected once:
not at all where the plan came true, which is the usual case.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AccumulationWindow", "batches_for", "scale_gradients"]


def batches_for(effective_rows: float, rows: float) -> int:
    """Return how many batches of ``rows`` rows come nearest to ``effective_rows``, at least 1.

    Args:
        effective_rows: Rows wanted for an optimizer step, above 0.
        rows: Rows of one batch, on all devices together; at least 0.

    Example:
        >>> batches_for(256, 64), batches_for(256, 100), batches_for(256, 512), batches_for(256, 0)
        (4, 3, 1, 1)
    """
    return max(1, math.ceil(effective_rows / rows - 0.5)) if rows > 0 else 1


class AccumulationWindow:
    """The micro-batches between two optimizer steps, on one device.

    A window closes where its rows come nearest to the effective batch, taking the next micro-batch
    for as large as the last; or after a fixed number of micro-batches, where devices have to agree.

    Args:
        effective_rows: Rows wanted for an optimizer step on this device, above 0.
        num_batches: Close after this many micro-batches; ``None`` goes by rows.

    Attributes:
        is_first: Whether the present micro-batch is the first of its window.
        closes: Whether the window is full with the present micro-batch.
        rows: Rows in the window so far.
        planned_batches: Micro-batches that the window was planned for.

    Example:
        >>> window = AccumulationWindow(8)
        >>> for rows in (4, 4, 3, 3, 3):
        ...     window.add(rows)
        ...     print(window.is_first, window.closes, window.rows)
        True False 4.0
        False True 8.0
        True False 3.0
        False False 6.0
        False True 9.0
    """

    def __init__(self, effective_rows: float, *, num_batches: int | None = None) -> None:
        self.effective_rows = effective_rows
        self.num_batches = num_batches
        self.start()

    def start(self) -> None:
        """Begin a new window with the next micro-batch: gradients of an open one are given up."""
        self.is_first = True
        self.closes = True
        self.rows = 0.0
        self.planned_batches = 1
        self._num_seen = 0
        self._planned_rows = self.effective_rows
        self._last_rows = 0.0

    def add(self, rows: float) -> None:
        """Take one micro-batch in, into a new window where the last one was closed.

        Args:
            rows: Its rows, at least 0.
        """
        if self.closes:
            self.start()
            if rows > 0:
                self.planned_batches = self.num_batches or batches_for(self.effective_rows, rows)
                self._planned_rows = self.planned_batches * rows
        self.is_first = self._num_seen == 0
        self._num_seen += 1
        self._last_rows = rows
        self.rows += rows
        self.closes = (
            self._num_seen >= self.num_batches
            if self.num_batches is not None
            else self.rows + rows / 2 >= self.effective_rows
        )

    @property
    def share(self) -> float:
        """Factor for the present loss, after it was divided by :attr:`planned_batches`.

        1.0 for every micro-batch that has as many rows as the first.
        """
        return self.planned_batches * self._last_rows / self._planned_rows

    def correction(self, rows: float | torch.Tensor | None = None) -> float | torch.Tensor:
        """Return what takes the sum over planned rows to the mean over the rows that came.

        Args:
            rows: Rows of the whole window, where other devices have some too: their mean per
                device. Default :attr:`rows`.

        Returns:
            A factor for the gradients so far and for the present loss; 1.0 where the plan came true.
        """
        if rows is None:
            return self._planned_rows / self.rows if self.rows > 0 else 1.0
        return self._planned_rows / rows

    def drop_last(self) -> float:
        """Take the present micro-batch out again: its step had no loss, and added nothing.

        Returns:
            The factor that a correction was too small by, if one was made with its rows in.
        """
        before = self.rows
        self.rows -= self._last_rows
        self._last_rows = 0.0
        return before / self.rows if self.rows > 0 else 1.0


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float | torch.Tensor) -> None:
    """Multiply every ``.grad`` by a factor, in place; nothing for exactly 1.0.

    Args:
        parameters: Those without a gradient are passed over.
        factor: A number, or a tensor without dimensions on the parameters' device; its value is
            not looked at, so that nothing waits for the device.
    """
    if isinstance(factor, float) and factor == 1.0:
        return
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
