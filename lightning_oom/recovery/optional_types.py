"""Batches of packages that need not be installed; entered when the first such object is met."""

from __future__ import annotations

import sys
from typing import Any

from lightning_oom.recovery.batch_types import (
    BatchType,
    attribute_tensors,
    register_batch_type,
)

__all__ = ["register"]


def register() -> None:
    """Enter the types of every package of this module that the process has imported."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None:
        register_batch_type(tensordict.TensorDictBase, _TENSORDICT)
    geometric = sys.modules.get("torch_geometric.data")
    if geometric is not None:
        register_batch_type(geometric.Batch, _GRAPHS)


def _tensordict_rows(node: Any) -> int | None:
    return int(node.batch_size[0]) if len(node.batch_size) else None


def _tensordict_take(node: Any, start: int, stop: int) -> Any:
    return node[start:stop]


def _tensordict_tensors(node: Any) -> list[Any]:
    return list(node.values(include_nested=True, leaves_only=True))


def _batch_shape(node: Any) -> str:
    return f"(batch_size {tuple(node.batch_size)})"


_TENSORDICT = BatchType(
    role="rows",
    rows=_tensordict_rows,
    take=_tensordict_take,
    tensors=_tensordict_tensors,
    shape=_batch_shape,
)


def _graph_rows(batch: Any) -> int:
    return int(batch.num_graphs)


def _graph_take(batch: Any, start: int, stop: int) -> Any:
    """Graphs [start, stop) in a new batch; their tensors are copied, as edges are renumbered."""
    graphs = [batch.get_example(index) for index in range(start, stop)]
    return type(batch).from_data_list(graphs)


def _graph_shape(batch: Any) -> str:
    return f"({batch.num_graphs} graphs)"


_GRAPHS = BatchType(
    role="rows", rows=_graph_rows, take=_graph_take, tensors=attribute_tensors, shape=_graph_shape
)
