"""Does a list hold fields side by side, or one item per row?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightning_oom.recovery.batches.batch_types import batch_type

if TYPE_CHECKING:
    from lightning_oom.recovery.batches.row_options import Node, Option

__all__ = ["MANY_ITEMS", "Reading", "are_alike", "may_be_image", "prefer_reading"]

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
    are four or more. Otherwise up to three tensors are fields (``x`` and ``y`` of a regression), as
    are up to seven of integers of one shape (token ids, their mask, their types). Four or more
    mappings or tuples are samples; one or two are fields (two views) if their shapes are equal and
    none holds a number or a text of its own, as a sample would. The rest is left in doubt.

    Args:
        items: The items of the list.
        as_fields: How they are read as fields.
    """
    pairs = [(i, n) for i, n in zip(items, as_fields.node.children, strict=True) if i is not None]
    shapes = [_row_shapes(item, node) for item, node in pairs]
    leaves = [shape for item in shapes for shape in item]
    if not leaves:  # each item is itself a list of samples
        return "fields"
    if all(may_be_image(shape) for shape in leaves):
        return "samples" if len(pairs) >= MANY_ITEMS else "doubt"
    are_equal = all(shape == shapes[0] for shape in shapes)
    if all(isinstance(item, Tensor) for item, _ in pairs):
        return _prefer_for_tensors([item for item, _ in pairs], are_equal=are_equal)
    if len(pairs) >= MANY_ITEMS:
        return "samples"
    are_two_views = len(pairs) < MANY_ITEMS - 1 and are_equal
    return (
        "fields" if are_two_views and not any(_has_own_value(i, n) for i, n in pairs) else "doubt"
    )


def _prefer_for_tensors(tensors: list[Tensor], *, are_equal: bool) -> Reading:
    if len(tensors) < MANY_ITEMS:
        return "fields"
    is_floating = tensors[0].is_floating_point() or tensors[0].is_complex()
    return "fields" if are_equal and not is_floating and len(tensors) < 2 * MANY_ITEMS else "doubt"


def _has_own_value(item: Any, node: Node) -> bool:
    """Whether a field of the item is one value instead of one per row."""
    if node.action == "share":
        return item is not None
    if node.action != "fields":
        return False
    children = [child for _, child in batch_type(item).children(item)]
    return any(map(_has_own_value, children, node.children))


def may_be_image(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of that shape could be one image: channels, height, width."""
    return len(shape) == _IMAGE_DIMENSIONS and shape[0] in _IMAGE_CHANNELS


def _row_shapes(item: Any, node: Node) -> list[tuple[int, ...]]:
    if node.action == "take":
        return [tuple(item.shape)] if isinstance(item, Tensor) and not item.is_nested else [()]
    if node.action != "fields":
        return []
    children = [child for _, child in batch_type(item).children(item)]
    pairs = zip(children, node.children, strict=True)
    return [shape for child, part in pairs for shape in _row_shapes(child, part)]
