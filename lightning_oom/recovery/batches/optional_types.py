"""Batches of packages that need not be installed; entered when the first such object is met."""

from __future__ import annotations

import copy
import sys
from typing import Any

from lightning_oom.recovery.batches.batch_types import (
    BatchType,
    attribute_tensors,
    register_batch_type,
)

__all__ = ["register"]


def register() -> None:
    """Enter the types of every package of this module that the process has imported."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None:
        register_batch_type(tensordict.TensorDictBase, _tensordict_type)
    geometric = sys.modules.get("torch_geometric.data")
    if geometric is not None:
        register_batch_type(geometric.Batch, _GRAPHS)


def _tensordict_rows(node: Any) -> int:
    return int(node.batch_size[0])


def _tensordict_take(node: Any, start: int, stop: int) -> Any:
    return node[start:stop]


def _tensordict_tensors(node: Any) -> list[Any]:
    return list(node.values(include_nested=True, leaves_only=True))


def _tensordict_copied(node: Any) -> Any:
    return node.copy()


def _batch_shape(node: Any) -> str:
    return f"(batch_size {tuple(node.batch_size)})"


def _tensordict_children(node: Any) -> list[tuple[str, Any]]:
    return [(f"[{key!r}]", value) for key, value in node.items()]


def _tensordict_rebuild(node: Any, values: list[Any]) -> Any:
    rebuilt = node.empty()
    for key, value in zip(node.keys(), values, strict=True):
        rebuilt[key] = value
    return rebuilt


def _tensordict_type(node: Any) -> BatchType:
    return _ROWS_DICT if len(node.batch_size) else _FIELDS_DICT


_FIELDS_DICT = BatchType(role="fields", children=_tensordict_children, rebuild=_tensordict_rebuild)
_ROWS_DICT = BatchType(
    role="rows",
    rows=_tensordict_rows,
    take=_tensordict_take,
    tensors=_tensordict_tensors,
    shape=_batch_shape,
    copied=_tensordict_copied,
)


def _graph_rows(batch: Any) -> int:
    return int(batch.num_graphs)


def _graph_take(batch: Any, start: int, stop: int) -> Any:
    """Graphs [start, stop) in a new batch; their tensors are copied, as edges are renumbered."""
    graphs = [batch.get_example(index) for index in range(start, stop)]
    return sys.modules["torch_geometric.data"].Batch.from_data_list(graphs)


def _graph_shape(batch: Any) -> str:
    return f"({batch.num_graphs} graphs)"


_GRAPHS = BatchType(
    role="rows",
    rows=_graph_rows,
    take=_graph_take,
    tensors=attribute_tensors,
    shape=_graph_shape,
    copied=copy.copy,
)
