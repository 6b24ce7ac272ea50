"""The one door to private torchmetrics: every private name that the package uses is taken here.

Checked on torchmetrics 1.0 to 1.9. ``tests/test_torchmetrics_door.py`` asserts each name on the
installed version, so that a release that moves one breaks this file and its test, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import MaxMetric, MinMetric
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CONSTANT_NAMES",
    "Metric",
    "MetricCollection",
    "add_earlier_state",
    "batch_value",
    "can_merge_states",
    "compute_locally",
    "computed_value",
    "extremum_of",
    "is_metric",
    "merge_states",
    "num_updates",
    "reduction",
    "set_batch_value",
    "set_num_updates",
    "set_state",
    "shadow_reduction",
    "state_of",
    "unshadow_reduction",
]

_MERGEABLE = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)


CONSTANT_NAMES = frozenset(
    {"_defaults", "_persistent", "_reductions", "_update_signature", "update", "compute"}
)
"""Attributes of a metric that stay as its constructor leaves them."""


def is_metric(module: object) -> bool:
    """Tell whether a module is torchmetrics' own kind: its state lies in plain attributes."""
    return isinstance(module, (Metric, MetricCollection)) or (
        type(module).__module__.partition(".")[0] == "torchmetrics"
    )


def state_of(metric: Metric) -> dict[str, Any]:
    """Return the accumulated state, detached; lists are copied, tensors are shared."""
    return {
        name: [_detached(entry) for entry in value] if isinstance(value, list) else _detached(value)
        for name, value in ((name, getattr(metric, name)) for name in metric._defaults)
    }


def set_state(metric: Metric, state: dict[str, Any]) -> None:
    """Replace the accumulated state; the cached result goes with it."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._computed = None


def can_merge_states(metric: Metric) -> bool:
    """Tell whether the state of many batches is a reduction of the states of each."""
    if metric.full_state_update is not False or metric.dist_sync_on_step:
        return False
    return all(
        reduction in _MERGEABLE or (reduction is None and isinstance(metric._defaults[name], list))
        for name, reduction in metric._reductions.items()
    )


def merge_states(metric: Metric, states: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
    """Load into ``metric`` the state that one batch would have left, from those of its parts."""
    set_state(metric, states[0])
    metric._update_count = 1
    for state in states[1:]:
        earlier = state_of(metric)
        set_state(metric, state)
        metric._reduce_states(earlier)
    for name, reduction in metric._reductions.items():
        parts = [state[name] for state in states]
        if reduction is dim_zero_mean:
            setattr(metric, name, _weighted_mean(parts, rows))
        elif isinstance(metric._defaults[name], list):
            setattr(metric, name, _joined(parts))


def add_earlier_state(metric: Metric, earlier: dict[str, Any], num_updates: int) -> None:
    """Reduce an earlier state into the present one, as ``forward`` does after its batch."""
    metric._update_count = num_updates
    metric._reduce_states(earlier)
    metric._computed = None


def reduction(metric: Metric) -> Callable[[dict[str, Any]], None]:
    """Return the metric's own method that adds an earlier state to the present one."""
    method: Callable[[dict[str, Any]], None] = type(metric)._reduce_states.__get__(metric)
    return method


def shadow_reduction(metric: Metric, reduce: Callable[[dict[str, Any]], None]) -> None:
    """Let ``reduce`` stand for the method that ``forward`` calls to add a batch's state."""
    metric.__dict__["_reduce_states"] = reduce


def unshadow_reduction(metric: Metric) -> None:
    """Undo :func:`shadow_reduction`; harmless where there is nothing to undo."""
    metric.__dict__.pop("_reduce_states", None)


def num_updates(metric: Metric) -> int:
    """Return how many batches the accumulated state has seen."""
    return metric._update_count


def set_num_updates(metric: Metric, count: int) -> None:
    """Say how many batches the accumulated state has seen."""
    metric._update_count = count


def batch_value(metric: Metric) -> Any:
    """Return what the last ``forward`` computed for its batch alone."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Say what ``forward`` computed for its batch; it is what ``self.log(on_step=True)`` reads."""
    metric._forward_cache = value


def computed_value(metric: Metric) -> Any:
    """Return the cached result of ``compute``, ``None`` where there is none."""
    return metric._computed


def compute_locally(metric: Metric) -> Any:
    """Compute the present state without asking other processes, leaving no cached result."""
    to_sync = metric._to_sync
    metric._to_sync = False
    metric._computed = None
    try:
        return metric.compute()
    finally:
        metric._to_sync = to_sync
        metric._computed = None


def extremum_of(metric: Metric) -> Literal["max", "min"] | None:
    """Return ``"max"`` or ``"min"`` for the metrics of that name, else ``None``."""
    if isinstance(metric, MaxMetric):
        return "max"
    return "min" if isinstance(metric, MinMetric) else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _weighted_mean(parts: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    shares = torch.tensor(rows if any(rows) else [1] * len(parts), dtype=torch.float64)
    total = torch.zeros_like(parts[0])
    for part, share in zip(parts, (shares / shares.sum()).tolist(), strict=True):
        total = total + part * share
    return total


def _joined(parts: Sequence[list[Any]]) -> list[Any]:
    """Join the entries that the parts appended, as one batch would have appended them."""
    entries = [entry for part in parts for entry in part]
    if len({len(part) for part in parts}) != 1 or not all(
        isinstance(entry, torch.Tensor) and entry.ndim for entry in entries
    ):
        return entries
    columns = list(zip(*parts, strict=True))
    if any(len({(e.shape[1:], e.dtype) for e in column}) != 1 for column in columns):
        return entries
    return [torch.cat(column) for column in columns]
