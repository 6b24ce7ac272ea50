"""Find the batch axis: which leaves have rows, and which lists hold one item per row.

A list of tensors can be read in two ways: as *fields* that each hold all rows (``[x, y]``), or as
*samples*, one item per row (the images of a detector, all of another size). Every reading under
which the whole batch agrees on one number of rows is kept; where several are left, the doubtful
lists are weighed (:func:`_prefer`), and where that does not decide, there is no plan but an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery import tensor_types as _tensor_types  # noqa: F401 - enters its types
from lightning_oom.recovery.batch_types import BatchType, attribute_tensors, batch_type

__all__ = ["MANY_ITEMS", "Node", "RowPlan", "plan_rows"]

Reading = Literal["fields", "samples", "doubt"]

_HINT = "say how to cut the batch with split_fn"
_MOST_OPTIONS = 16
_IMAGE_CHANNELS = (1, 3)
MANY_ITEMS = 4


@dataclass(frozen=True, slots=True)
class Node:
    """How one node of the batch is cut."""

    action: Literal["share", "take", "fields", "cut", "plain"]
    children: tuple[Node, ...] = ()


_SHARE = Node("share")
_TAKE = Node("take")
_CUT = Node("cut")
_PLAIN = Node("plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to read a node. ``rows`` is ``None`` where the node says nothing about the rows."""

    node: Node
    rows: int | None = None
    said_by: str = ""
    unlikely: int = 0
    fields_in_doubt: int = 0
    samples_in_doubt: int = 0
    samples_for_sure: int = 0
    doubted: str = ""

    def cost(self) -> int:
        """Lower is likelier. Where one list surely holds samples, so do the doubtful ones."""
        if self.samples_for_sure:
            return 2 * (self.unlikely + self.fields_in_doubt)
        return 2 * self.unlikely + self.fields_in_doubt + self.samples_in_doubt


@dataclass(frozen=True, slots=True)
class Clash:
    """Two parts of the batch that cannot have the same rows."""

    message: str


@dataclass(slots=True)
class Notes:
    """What was met on the way down."""

    plain_lengths: list[int] = field(default_factory=list)
    plain_said_by: list[str] = field(default_factory=list)
    opaque: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How a batch is cut. ``rows`` is ``None`` when no leaf of it has rows."""

    rows: int | None
    node: Node

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """The rows ``[start, stop)`` of the batch the plan was made for."""
        return _take(batch, self.node, start, stop, self.rows)


def plan_rows(batch: Any) -> RowPlan:
    """Find out how ``batch`` is cut into rows.

    Args:
        batch: Any batch.

    Raises:
        BatchSplitError: Two leaves disagree on the number of rows, a list can be read in two
            ways, or a part is of an unknown type that holds tensors. The message names the paths.

    Example:
        >>> import torch
        >>> images = [torch.zeros(3, 8, width) for width in (5, 6, 7)]
        >>> plan_rows({"images": images, "boxes": [torch.zeros(n, 4) for n in (2, 0, 1)]}).rows
        3
    """
    notes = Notes()
    options = _options(batch, "batch", notes)
    if isinstance(options, Clash):
        raise BatchSplitError(f"{options.message}: {_HINT}")
    plan = _choose(options, notes)
    for path, node in notes.opaque:
        _check_opaque(path, node, plan.rows)
    return plan


def _check_opaque(path: str, node: Any, rows: int | None) -> None:
    reason = None
    if any(tensor.ndim for tensor in attribute_tensors(node)):
        reason = "holds tensors"
    elif rows is not None and hasattr(node, "__len__") and len(node) == rows:
        reason = f"has {rows} items, as many as the batch has rows"
    if reason is not None:
        raise BatchSplitError(
            f"{path} is a {type(node).__qualname__} and {reason}, but how to cut that type is not "
            f"known: enter it with register_splitter, or {_HINT}"
        )


def _choose(options: list[Option], notes: Notes) -> RowPlan:
    saying = [option for option in options if option.rows is not None]
    if not saying:
        return _choose_by_plain_lists(options[0], notes)
    best = min(option.cost() for option in saying)
    likeliest = [option for option in saying if option.cost() == best]
    counts = {option.rows for option in saying}
    if len(counts) > 1:
        voted = counts & set(notes.plain_lengths)
        if len(voted) == 1:
            likeliest = [option for option in saying if option.rows in voted]
            best = min(option.cost() for option in likeliest)
            likeliest = [option for option in likeliest if option.cost() == best]
    if len(likeliest) > 1:
        raise BatchSplitError(f"{likeliest[0].doubted}: {_HINT}")
    return RowPlan(rows=likeliest[0].rows, node=likeliest[0].node)


def _choose_by_plain_lists(option: Option, notes: Notes) -> RowPlan:
    """No tensor has rows: the lists of other things are all there is."""
    lengths = dict(zip(notes.plain_lengths, notes.plain_said_by, strict=True))
    if len(lengths) > 1:
        (first, first_path), (second, second_path) = list(lengths.items())[:2]
        raise BatchSplitError(
            f"{first_path} has {first} items, {second_path} has {second} items: {_HINT}"
        )
    return RowPlan(rows=next(iter(lengths), None), node=option.node)


# ------------------------------------------------------------------------------ reading


def _options(node: Any, path: str, notes: Notes) -> list[Option] | Clash:
    kind = batch_type(node)
    if kind.role == "rows":
        rows = kind.rows(node)
        if rows is None:
            return [Option(node=_SHARE)]
        said_by = f"{path} has {rows} rows {kind.shape(node)}"
        return [Option(node=_TAKE, rows=rows, said_by=said_by)]
    if kind.role == "shared":
        if kind.opaque:
            notes.opaque.append((path, node))
        return [Option(node=_SHARE)]
    if kind.role == "items" and _is_plain(node):
        _note_plain(node, path, notes)
        return [Option(node=_PLAIN)]
    children = kind.children(node)
    as_fields = _combine([_options(child, path + name, notes) for name, child in children])
    if kind.role == "fields":
        return as_fields
    return _read_items(node, path, as_fields)


def _combine(parts: list[list[Option] | Clash]) -> list[Option] | Clash:
    """Every choice of one option per part under which all parts agree on the rows."""
    combined = [Option(node=Node("fields"))]
    for part in parts:
        if isinstance(part, Clash):
            return part
        agreeing = [
            _join(left, right)
            for left in combined
            for right in part
            if left.rows is None or right.rows is None or left.rows == right.rows
        ]
        if not agreeing:
            return Clash(f"{combined[0].said_by}, {part[0].said_by}")
        combined = sorted(agreeing, key=Option.cost)[:_MOST_OPTIONS]
    return combined


def _join(left: Option, right: Option) -> Option:
    rows, said_by = (
        (left.rows, left.said_by) if left.rows is not None else (right.rows, right.said_by)
    )
    return Option(
        node=Node("fields", (*left.node.children, right.node)),
        rows=rows,
        said_by=said_by,
        unlikely=left.unlikely + right.unlikely,
        fields_in_doubt=left.fields_in_doubt + right.fields_in_doubt,
        samples_in_doubt=left.samples_in_doubt + right.samples_in_doubt,
        samples_for_sure=left.samples_for_sure + right.samples_for_sure,
        doubted=left.doubted or right.doubted,
    )


def _read_items(node: Any, path: str, as_fields: list[Option] | Clash) -> list[Option] | Clash:
    if not _are_alike(list(node)):
        return as_fields
    rows = len(node)
    as_samples = Option(node=_CUT, rows=rows, said_by=f"{path} has {rows} items")
    if isinstance(as_fields, Clash) or all(option.rows is None for option in as_fields):
        return [replace(as_samples, samples_for_sure=1)]
    doubted = (
        f"{path} may hold {rows} samples or {rows} fields of {as_fields[0].rows} rows each "
        f"({as_fields[0].said_by})"
    )
    reading = _prefer(list(node), as_fields[0])
    fields = [
        replace(
            option,
            unlikely=option.unlikely + (reading == "samples"),
            fields_in_doubt=option.fields_in_doubt + (reading == "doubt"),
            doubted=doubted,
        )
        for option in as_fields
    ]
    samples = replace(
        as_samples,
        unlikely=int(reading == "fields"),
        samples_in_doubt=int(reading == "doubt"),
        doubted=doubted,
    )
    return [*fields, samples]


def _prefer(items: list[Any], as_fields: Option) -> Reading:
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
    if all(len(shape) == 3 and shape[0] in _IMAGE_CHANNELS for shape in leaves):  # noqa: PLR2004 - channels, height, width
        return "samples" if many else "doubt"
    are_tensors = all(isinstance(item, Tensor) for item in items)
    if not are_tensors and many:
        return "samples"
    if len(items) == 1 or all(item == shapes[0] for item in shapes):
        return "fields" if are_tensors or len(items) < MANY_ITEMS - 1 else "doubt"
    return "fields" if are_tensors and not many else "doubt"


def _row_shapes(item: Any, node: Node) -> list[tuple[int, ...]]:
    if node.action == "take":
        return [tuple(item.shape)] if isinstance(item, Tensor) and not item.is_nested else [()]
    if node.action != "fields":
        return []
    children = [child for _, child in batch_type(item).children(item)]
    pairs = zip(children, node.children, strict=True)
    return [shape for child, part in pairs for shape in _row_shapes(child, part)]


def _are_alike(items: list[Any]) -> bool:
    present = [item for item in items if item is not None]
    if len(present) == 1 < len(items):  # (x, None)
        return False
    return len({_likeness(item) for item in present}) == 1


def _likeness(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Tensor):
        return ("tensor", item.ndim, item.dtype)
    kind = batch_type(item)
    if kind.role == "fields":
        return (type(item), tuple(sorted(name for name, _ in kind.children(item))))
    if kind.role == "items":
        length = len(item) if isinstance(item, tuple) else None
        return (type(item), length, _likeness(item[0]) if len(item) else None)
    return (type(item),)


# ------------------------------------------------------------------------------ plain lists


def _is_plain(node: Any) -> bool:
    """No part of the node has rows, and none is of an unknown type that may hold some."""
    return all(_holds_no_rows(item) for item in node)


def _holds_no_rows(item: Any) -> bool:
    kind: BatchType = batch_type(item)
    if kind.role == "rows":
        return kind.rows(item) is None
    if kind.opaque:
        return not any(tensor.ndim for tensor in attribute_tensors(item))
    return all(_holds_no_rows(child) for _, child in kind.children(item))


def _note_plain(node: Any, path: str, notes: Notes) -> None:
    """A list of plain items has rows; a list or tuple of such lists may be fields side by side."""
    inner = [item for item in node if isinstance(item, (list, tuple))]
    if isinstance(node, tuple) and inner:
        for index, item in enumerate(node):
            if isinstance(item, (list, tuple)):
                _note_plain(item, f"{path}[{index}]", notes)
    elif isinstance(node, list):
        notes.plain_lengths.append(len(node))
        notes.plain_said_by.append(path)


def _cut_plain(node: Any, start: int, stop: int, rows: int) -> Any:
    kind = batch_type(node)
    if kind.role == "items":
        inner = [isinstance(item, tuple) and len(item) == rows for item in node]
        if len(node) == rows and not (inner and all(inner)):
            return _slice(node, start, stop)
    if kind.role in {"shared", "rows"}:
        return node
    children = [_cut_plain(child, start, stop, rows) for _, child in kind.children(node)]
    return kind.rebuild(node, children)


def _slice(node: Any, start: int, stop: int) -> Any:
    if type(node) in (list, tuple, range):
        return node[start:stop]
    return batch_type(node).rebuild(node, list(node)[start:stop])


# ------------------------------------------------------------------------------ cutting


def _take(batch: Any, node: Node, start: int, stop: int, rows: int | None) -> Any:
    if node.action == "share":
        return batch
    kind = batch_type(batch)
    if node.action == "take":
        return kind.take(batch, start, stop)
    if node.action == "cut":
        return _slice(batch, start, stop)
    if node.action == "plain":
        return batch if rows is None else _cut_plain(batch, start, stop, rows)
    pairs = zip(kind.children(batch), node.children, strict=True)
    children = [_take(child, part, start, stop, rows) for (_, child), part in pairs]
    return kind.rebuild(batch, children)
