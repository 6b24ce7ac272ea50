"""Walk through the containers of a batch without cutting it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from lightning_oom.recovery.batches import tensor_types as _tensor_types  # noqa: F401 - enters its types
from lightning_oom.recovery.batches.batch_types import PLAIN_CLASSES, attribute_tensors, batch_type

__all__ = ["batch_iterators", "batch_tensors", "clone_batch", "copy_containers"]


def copy_containers(batch: Any) -> Any:
    """Copy the containers of a batch and share its leaves.

    What user code does to a container (``batch.pop("labels")``) does not reach the copy; what it
    does to a tensor in place does.

    Args:
        batch: Any batch.

    Example:
        >>> batch = {"x": [1, 2], "y": {"z": "a"}}
        >>> copied = copy_containers(batch)
        >>> batch["y"].pop("z"), copied
        ('a', {'x': [1, 2], 'y': {'z': 'a'}})
    """
    kind = batch_type(batch)
    if kind.role in ("fields", "items"):
        if type(batch) is list and PLAIN_CLASSES.issuperset(map(type, batch)):
            return batch.copy()
        children = [copy_containers(child) for _, child in kind.children(batch)]
        return kind.rebuild(batch, children)
    return batch.copy() if isinstance(batch, set) else kind.copied(batch)


def clone_batch(batch: Any) -> Any:
    """Copy a batch with its tensors, for a run that may write to them and that does not count.

    Args:
        batch: A few rows of any batch. What holds rows in its own way (a packed sequence, an array)
            is copied as ``copy.deepcopy`` copies it; what has no rows is shared.

    Example:
        >>> import torch
        >>> batch = {"x": torch.ones(2), "names": ["a", "b"]}
        >>> cloned = clone_batch(batch)
        >>> _ = cloned["x"].zero_()
        >>> batch["x"].tolist()
        [1.0, 1.0]
    """
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    kind = batch_type(batch)
    if kind.role in ("fields", "items"):
        return kind.rebuild(batch, [clone_batch(child) for _, child in kind.children(batch)])
    return copy.deepcopy(batch) if kind.role == "rows" else batch


def batch_tensors(batch: Any) -> list[Tensor]:
    """List every tensor of a batch, in order, also those without rows.

    Args:
        batch: Any batch.

    Example:
        >>> import torch
        >>> [tensor.ndim for tensor in batch_tensors({"x": torch.zeros(2, 3), "s": torch.tensor(1)})]
        [2, 0]
    """
    if isinstance(batch, Tensor):
        return [batch]
    kind = batch_type(batch)
    if kind.role == "rows":
        return kind.tensors(batch)
    if kind.role == "shared":
        return attribute_tensors(batch) if kind.opaque else []
    return [tensor for _, child in kind.children(batch) for tensor in batch_tensors(child)]


def batch_iterators(batch: Any) -> list[Any]:
    """List what a batch holds that can be gone through only once: generators, open files.

    Args:
        batch: Any batch.

    Example:
        >>> [type(found).__name__ for found in batch_iterators({"x": [1, 2], "y": iter([3])})]
        ['list_iterator']
    """
    kind = batch_type(batch)
    if kind.role in ("fields", "items"):
        return [found for _, child in kind.children(batch) for found in batch_iterators(child)]
    return [batch] if hasattr(type(batch), "__next__") else []
