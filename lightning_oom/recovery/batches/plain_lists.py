"""Lists without tensors: file names, captions, token lists."""

from __future__ import annotations

from typing import Any

from lightning_oom.recovery.batches.batch_types import PLAIN_CLASSES, attribute_tensors, batch_type

__all__ = ["cut_plain", "is_plain", "plain_lengths", "slice_items"]


def is_plain(node: Any) -> bool:
    """Whether no item of a sequence has rows, nor is of an unknown type that may hold some."""
    return PLAIN_CLASSES.issuperset(map(type, node)) or all(map(_holds_no_rows, node))


def _holds_no_rows(item: Any) -> bool:
    kind = batch_type(item)
    if kind.role == "rows":
        return kind.rows(item) is None
    if kind.opaque:
        return not any(tensor.ndim for tensor in attribute_tensors(item))
    return all(_holds_no_rows(child) for _, child in kind.children(item))


def plain_lengths(node: Any, path: str) -> tuple[tuple[int, str], ...]:
    """Number of items and path of a plain list, or of the lists that a tuple holds side by side."""
    if isinstance(node, tuple):
        inner = [(i, item) for i, item in enumerate(node) if isinstance(item, (list, tuple))]
        return tuple(entry for i, item in inner for entry in plain_lengths(item, f"{path}[{i}]"))
    return ((len(node), path),) if isinstance(node, list) else ()


def cut_plain(node: Any, start: int, stop: int, rows: int) -> Any:
    """Cut a plain node whose items are as many as the rows; else its children that are.

    A list of tuples with ``rows`` items each holds columns side by side, not one item per row.
    """
    kind = batch_type(node)
    if kind.role == "items":
        are_columns = [isinstance(item, tuple) and len(item) == rows for item in node]
        if len(node) == rows and not (are_columns and all(are_columns)):
            return slice_items(node, start, stop)
    if kind.role in {"shared", "rows"}:
        return node
    children = [cut_plain(child, start, stop, rows) for _, child in kind.children(node)]
    return kind.rebuild(node, children)


def slice_items(node: Any, start: int, stop: int) -> Any:
    """The items ``[start, stop)`` of a sequence of any type, in a sequence of that type."""
    if type(node) in (list, tuple, range):
        return node[start:stop]
    return batch_type(node).rebuild(node, list(node)[start:stop])
