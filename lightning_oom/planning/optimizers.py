"""Optimizers and schedulers out of whatever ``configure_optimizers`` returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["optimizers_of", "schedulers_of", "stateful_tensors"]


def optimizers_of(configured: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in what ``configure_optimizers`` returned, in order.

    Args:
        configured: An optimizer, a list or tuple of them, a dictionary with ``optimizer``, several of
            those, a pair of lists (optimizers, schedulers), or ``None``.

    Raises:
        TypeError: It is none of these.

    Example:
        >>> sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        >>> [optimizers_of(form) == [sgd] for form in (sgd, [sgd], {"optimizer": sgd}, ([sgd], []))]
        [True, True, True, True]
    """
    if configured is None:
        return []
    if isinstance(configured, dict):
        return [configured["optimizer"]]
    if _is_optimizer(configured):
        return [configured]
    if isinstance(configured, (list, tuple)):
        if len(configured) and isinstance(configured[0], (list, tuple)):
            return list(configured[0])
        return [optimizer for entry in configured for optimizer in optimizers_of(entry)]
    raise TypeError(
        "configure_optimizers returns an optimizer, a list of them, a dictionary with `optimizer`, "
        f"or two lists, got {type(configured).__name__}"
    )


def schedulers_of(configured: Any) -> list[Any]:
    """Return the learning-rate schedulers in what ``configure_optimizers`` returned, in order."""
    if isinstance(configured, dict):
        return [_scheduler(configured["lr_scheduler"])] if "lr_scheduler" in configured else []
    if isinstance(configured, (list, tuple)) and configured:
        if isinstance(configured[0], (list, tuple)):
            entries = configured[1] if len(configured) > 1 else []
            entries = entries if isinstance(entries, (list, tuple)) else [entries]
            return [_scheduler(entry) for entry in entries]
        return [scheduler for entry in configured for scheduler in schedulers_of(entry)]
    return []


def stateful_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Give the tensors that optimizers keep between steps, and that they did not get as parameters."""
    for optimizer in optimizers:
        for leaf in tree_leaves(list(optimizer.state.values())):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "step")


def _scheduler(entry: Any) -> Any:
    return entry["scheduler"] if isinstance(entry, dict) else entry
