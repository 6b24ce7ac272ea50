"""Minimum, mean and maximum of readings over every step and every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MEMORY_SCALARS", "RankAggregates"]

MEMORY_SCALARS = (
    "memory/allocated_gib",
    "memory/peak_allocated_gib",
    "memory/reserved_gib",
    "memory/peak_reserved_gib",
    "memory/headroom_gib",
    "memory/used_fraction",
)
"""What is compared between ranks, where a backend has it."""


class RankAggregates:
    """Adds up scalars in plain Python, and asks the other ranks only when told to.

    Args:
        names: The scalars that are followed, the same on every rank; others are passed over.

    Example:
        >>> aggregates = RankAggregates(["memory/used_fraction"])
        >>> aggregates.add({"memory/used_fraction": 0.25})
        >>> aggregates.add({"memory/used_fraction": 0.75})
        >>> for name, value in aggregates.compute().items():
        ...     print(name, value)
        memory/used_fraction_min 0.25
        memory/used_fraction_mean 0.5
        memory/used_fraction_max 0.75
        >>> aggregates.compute()
        {}
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._clear()

    def _clear(self) -> None:
        self._low = [float("inf")] * len(self._names)
        self._high = [float("-inf")] * len(self._names)
        self._total = [0.0] * len(self._names)
        self._count = [0.0] * len(self._names)

    def add(self, scalars: Mapping[str, float]) -> None:
        """Take one reading of this rank in; no other rank is asked."""
        for index, name in enumerate(self._names):
            value = scalars.get(name)
            if value is not None:
                self._low[index] = min(self._low[index], value)
                self._high[index] = max(self._high[index], value)
                self._total[index] += value
                self._count[index] += 1

    def compute(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Reduce over ranks and start again. A collective: every rank has to call it.

        Args:
            device: Where the collective wants its tensors.

        Returns:
            ``<name>_min``, ``<name>_mean`` and ``<name>_max`` of each scalar that any rank had.
        """
        metric = _Extremes(len(self._names)).to(torch.device(device))
        metric.update(self._low, self._high, self._total, self._count)
        self._clear()
        low, mean, high = (column.reshape(-1).tolist() for column in metric.compute())
        return {
            f"{name}_{kind}": value
            for name, *values in zip(self._names, low, mean, high, strict=True)
            for kind, value in zip(("min", "mean", "max"), values, strict=True)
            if values[2] != float("-inf")
        }


class _Extremes(Metric):
    """Vectors of minima, sums, counts and maxima, reduced over ranks by torchmetrics."""

    full_state_update = False
    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_state("low", torch.full((size,), float("inf")), dist_reduce_fx="min")
        self.add_state("high", torch.full((size,), float("-inf")), dist_reduce_fx="max")
        self.add_state("total", torch.zeros(size), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(size), dist_reduce_fx="sum")

    def update(self, low: Any, high: Any, total: Any, count: Any) -> None:
        """Take the sums of one rank in."""
        self.low = torch.minimum(self.low, self.low.new_tensor(low))
        self.high = torch.maximum(self.high, self.high.new_tensor(high))
        self.total = self.total + self.total.new_tensor(total)
        self.count = self.count + self.count.new_tensor(count)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return minima, means and maxima."""
        return self.low, self.total / self.count, self.high
