"""The one door to private torchmetrics: every private name that the package uses is taken here.

Checked on torchmetrics 1.0 to 1.9. ``tests/test_torchmetrics_door.py`` asserts each name on the
installed version, so that a release that moves one breaks this file and its test, nothing else.
"""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric, MetricCollection

__all__ = [
    "CONSTANT_NAMES",
    "Metric",
    "MetricCollection",
    "add_state",
    "batch_value",
    "can_merge_states",
    "compute_batch_value",
    "count_update",
    "forget_computed",
    "is_metric",
    "set_batch_value",
    "state_names",
    "state_of",
]


CONSTANT_NAMES = frozenset(
    {"_defaults", "_persistent", "_reductions", "_update_signature", "update", "compute"}
)
"""Attributes of a metric that stay as its constructor leaves them."""


def is_metric(module: object) -> bool:
    """Tell whether a module is torchmetrics' own kind: its state lies in plain attributes."""
    return isinstance(module, (Metric, MetricCollection)) or (
        type(module).__module__.partition(".")[0] == "torchmetrics"
    )


def state_names(metric: Metric) -> tuple[str, ...]:
    """Return the names of the attributes that hold the accumulated state."""
    return tuple(metric._defaults)


def state_of(metric: Metric) -> dict[str, Any]:
    """Return the accumulated state; lists are copied, tensors are not."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in ((name, getattr(metric, name)) for name in metric._defaults)
    }


def can_merge_states(metric: Metric) -> bool:
    """Tell whether the state of many batches is a reduction of the states of each."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def batch_value(metric: Metric) -> Any:
    """Return what the last ``forward`` computed for its batch alone."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Say what ``forward`` computed for its batch; it is what ``self.log(on_step=True)`` reads."""
    metric._forward_cache = value


def forget_computed(metric: Metric) -> None:
    """Drop the cached result of ``compute``."""
    metric._computed = None


def count_update(metric: Metric, num_updates: int) -> None:
    """Say how many batches the accumulated state has seen."""
    metric._update_count = num_updates


def add_state(metric: Metric, incoming: dict[str, Any]) -> None:
    """Reduce an earlier state into the present one, as ``forward`` does after a batch."""
    metric._reduce_states(incoming)


def compute_batch_value(metric: Metric) -> Any:
    """Compute the present state without asking other processes, leaving no cached result."""
    to_sync = metric._to_sync
    metric._to_sync = False
    metric._computed = None
    try:
        return metric.compute()
    finally:
        metric._to_sync = to_sync
        metric._computed = None
