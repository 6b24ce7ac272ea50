"""Does a list hold fields side by side, or one item per row?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightning_oom.recovery.batch_types import batch_type

if TYPE_CHECKING:
    from lightning_oom.recovery.row_options import Node, Option

__all__ = ["MANY_ITEMS", "Reading", "are_alike", "prefer_reading"]

Reading = Literal["fields", "samples", "doubt"]

MANY_ITEMS = 4
"""From so many alike items on, a list is rather one of samples."""

_IMAGE_CHANNELS = (1, 3)
_IMAGE_DIMENSIONS = 3


def are_alike(items: list[Any]) -> bool:
    """Whether the items could be samples of one batch: of one type, structure and dtype."""
    present = [item for item in items if item is not None]
    if len(present) == 1 < len(items):  # (x, None)
        return False
    if len(set(map(type, present))) > 1:
        return False
    return len({_likeness(item) for item in present}) == 1


def _likeness(item: Any) -> Any:
    if isinstance(item, Tensor):
        return (item.ndim, item.dtype)
    if isinstance(item, dict):
        return frozenset(item)
    kind = batch_type(item)
    if kind.role == "fields":
        return frozenset([name for name, _ in kind.children(item)])
    if kind.role == "items":
        length = len(item) if isinstance(item, tuple) else None
        return (length, _likeness(item[0]) if len(item) else None)
    return None


def prefer_reading(items: list[Any], as_fields: Option) -> Reading:
    """Weigh a list whose items are alike and could be fields as well as samples.

    What looks like images (three dimensions, one or three channels) is read as samples if there
    are four or more. Otherwise equal shapes speak for fields (a pair of views, token ids and their
    mask), as do up to three tensors of unequal ones (``x`` and ``y`` of a regression). A list of
    four or more mappings or tuples holds samples. The rest is left in doubt.
    """
    pairs = zip(items, as_fields.node.children, strict=True)
    shapes = [_row_shapes(item, node) for item, node in pairs if item is not None]
    items = [item for item in items if item is not None]
    leaves = [shape for item in shapes for shape in item]
    many = len(items) >= MANY_ITEMS
    if not leaves:  # each item is itself a list of samples
        return "fields"
    if all(_may_be_image(shape) for shape in leaves):
        return "samples" if many else "doubt"
    are_tensors = all(isinstance(item, Tensor) for item in items)
    if not are_tensors and many:
        return "samples"
    if len(items) == 1 or all(item == shapes[0] for item in shapes):
        return "fields" if are_tensors or len(items) < MANY_ITEMS - 1 else "doubt"
    return "fields" if are_tensors and not many else "doubt"


def _may_be_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == _IMAGE_DIMENSIONS and shape[0] in _IMAGE_CHANNELS


def _row_shapes(item: Any, node: Node) -> list[tuple[int, ...]]:
    if node.action == "take":
        return [tuple(item.shape)] if isinstance(item, Tensor) and not item.is_nested else [()]
    if node.action != "fields":
        return []
    children = [child for _, child in batch_type(item).children(item)]
    pairs = zip(children, node.children, strict=True)
    return [shape for child, part in pairs for shape in _row_shapes(child, part)]
