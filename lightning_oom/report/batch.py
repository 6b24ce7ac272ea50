"""What a batch is made of: paths, shapes and dtypes; numbers only where they were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.recovery.batches.batch_types import batch_type
from lightning_oom.report.record import BatchLeaf

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["describe_leaves", "host_copy"]

_MAX_LEAVES, _MAX_ITEMS, _MAX_DEPTH = 100, 8, 12
_NUM_VALUES = 8
_MAX_COPY_BYTES = 2**30


def describe_leaves(batch: Any, *, include_values: bool = False) -> tuple[BatchLeaf, ...]:
    """Describe every leaf of a batch.

    Args:
        batch: Any nesting of what :func:`~lightning_oom.recovery.batches.split_batch` knows.
        include_values: Add the first numbers of each tensor.

    Returns:
        Up to 100 leaves; of a longer list that holds more than 8 items, the first 8.

    Note:
        Nothing is allocated on the device.

    Example:
        >>> import torch
        >>> for leaf in describe_leaves({"x": torch.zeros(9, 3), "name": "a"}):
        ...     print(leaf.path, leaf.kind, leaf.shape)
        batch['x'] Tensor (9, 3)
        batch['name'] str None
    """
    leaves = []
    for path, node in _walk(batch, "batch", 0):
        leaves.append(_describe(path, node, include_values=include_values))
        if len(leaves) == _MAX_LEAVES:
            break
    return tuple(leaves)


def host_copy(batch: Any) -> Any:
    """Copy a batch to the host, without an allocation on its device; ``None`` for a huge one."""
    nodes = [node for _, node in _walk(batch, "batch", 0) if isinstance(node, torch.Tensor)]
    if sum(node.numel() * node.element_size() for node in nodes) > _MAX_COPY_BYTES:
        return None
    return _copied(batch, 0)


def _copied(node: Any, depth: int) -> Any:
    if isinstance(node, torch.Tensor):
        return _to_host(node)
    kind = batch_type(node)
    if kind.role not in ("fields", "items") or depth > _MAX_DEPTH:
        return node if isinstance(node, (str, bytes, int, float, bool, type(None))) else repr(node)
    return kind.rebuild(node, [_copied(child, depth + 1) for _, child in kind.children(node)])


def _walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    kind = batch_type(node)
    if isinstance(node, torch.Tensor) or kind.role not in ("fields", "items") or depth > _MAX_DEPTH:
        yield path, node
        return
    children = kind.children(node)
    for suffix, child in children if kind.role == "fields" else children[:_MAX_ITEMS]:
        yield from _walk(child, path + suffix, depth + 1)


def _describe(path: str, node: Any, *, include_values: bool) -> BatchLeaf:
    if not isinstance(node, torch.Tensor):
        values = (repr(node)[:80],) if include_values else None
        return BatchLeaf(path=path, kind=type(node).__name__, values=values)
    return BatchLeaf(
        path=path,
        kind=type(node).__name__,
        shape=tuple(int(extent) for extent in node.shape),
        dtype=str(node.dtype).removeprefix("torch."),
        device=str(node.device),
        num_bytes=node.numel() * node.element_size(),
        values=_first_values(node) if include_values else None,
    )


def _first_values(tensor: torch.Tensor) -> tuple[str, ...] | None:
    if tensor.layout is not torch.strided:
        return None
    first = tensor.detach()
    while first.dim() > 1 and first.shape[0]:
        first = first[0]  # a view
    host = _to_host(first[:_NUM_VALUES] if first.dim() else first)
    return tuple(
        f"{value:.6g}" if isinstance(value, float) else str(value) for value in _flat(host)
    )


def _flat(host: torch.Tensor) -> list[Any]:
    return list(host.reshape(-1).tolist())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host; a tensor with gaps goes with its storage, lest the device packs it first."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.cpu()
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(
        tensor.untyped_storage().cpu(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
