"""Find the batch axis: which leaves have rows, and which lists hold one item per row.

A list of tensors can be read in two ways: as *fields* that each hold all rows (``[x, y]``), or as
*samples*, one item per row (the images of a detector, all of another size). Every reading under
which the whole batch agrees on one number of rows is kept; where several are left, the doubtful
lists are weighed (:mod:`~lightning_oom.recovery.batches.list_reading`), and where that does not decide,
there is no plan but an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches import tensor_types as _tensor_types  # noqa: F401 - enters its types
from lightning_oom.recovery.batches.batch_types import attribute_tensors, batch_type
from lightning_oom.recovery.batches.list_reading import are_alike, prefer_reading
from lightning_oom.recovery.batches.plain_lists import (
    cut_plain,
    is_plain,
    plain_lengths,
    slice_items,
)
from lightning_oom.recovery.batches.row_options import (
    SHARED_OPTION,
    Clash,
    Node,
    Option,
    combine_options,
    one_option,
)

__all__ = ["RowPlan", "plan_rows"]

_HINT = "say how to cut the batch with split_fn"
_TAKE, _CUT, _PLAIN = Node("take"), Node("cut"), Node("plain")


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
            ways, a part is of an unknown type that holds tensors, or a container of the batch
            cannot be read. The message names the paths.

    Note:
        Cost: about 10 us per container and leaf.

    Example:
        >>> import torch
        >>> images = [torch.zeros(3, 8, width) for width in (5, 6, 7)]
        >>> plan_rows({"images": images, "boxes": [torch.zeros(n, 4) for n in (2, 0, 1)]}).rows
        3
    """
    try:
        return _plan(batch)
    except BatchSplitError:
        raise
    except Exception as error:  # a container of the user's own, or one that contains itself
        raise BatchSplitError(
            f"the batch (a {type(batch).__qualname__}) cannot be read "
            f"({type(error).__qualname__}: {error}): {_HINT}"
        ) from error


def _plan(batch: Any) -> RowPlan:
    options = _options(batch, "batch")
    if isinstance(options, Clash):
        raise BatchSplitError(f"{options.message}: {_HINT}")
    chosen, rows = _choose(options)
    for path, node in chosen.opaque:
        _check_opaque(path, node, rows)
    return RowPlan(rows=rows, node=chosen.node)


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


def _choose(options: tuple[Option, ...]) -> tuple[Option, int | None]:
    saying = [option for option in options if option.rows is not None]
    if not saying:
        return options[0], _rows_of_plain_lists(options[0])
    best = min(option.cost() for option in saying)
    likeliest = [option for option in saying if option.cost() == best]
    if len(likeliest) > 1:  # a list of as many names decides between two readings
        likeliest = [o for o in likeliest if o.rows in [n for n, _ in o.plain]]
    if len(likeliest) != 1:
        raise BatchSplitError(f"{saying[0].doubted}: {_HINT}")
    return likeliest[0], likeliest[0].rows


def _rows_of_plain_lists(option: Option) -> int | None:
    """No tensor has rows: the lists of other things are all there is."""
    lengths = dict(option.plain)
    if len(lengths) > 1:
        (first, first_path), (second, second_path) = list(lengths.items())[:2]
        raise BatchSplitError(
            f"{first_path} has {first} items, {second_path} has {second} items: {_HINT}"
        )
    return next(iter(lengths), None)


def _options(node: Any, path: str) -> tuple[Option, ...] | Clash:
    kind = batch_type(node)
    if kind.role == "rows":
        rows = kind.rows(node)
        if rows is None:
            return SHARED_OPTION
        return one_option(_TAKE, rows=rows, said_by=f"{path} has {rows} rows {kind.shape(node)}")
    if kind.role == "shared":
        if kind.opaque:
            return (replace(SHARED_OPTION[0], opaque=((path, node),)),)
        return SHARED_OPTION
    if kind.role == "items" and is_plain(node):
        return (Option(node=_PLAIN, plain=plain_lengths(node, path)),)
    children = kind.children(node)
    as_fields = combine_options(_options(child, path + name) for name, child in children)
    return as_fields if kind.role == "fields" else _read_items(node, path, as_fields)


def _read_items(
    node: Any, path: str, as_fields: tuple[Option, ...] | Clash
) -> tuple[Option, ...] | Clash:
    items = list(node)
    if not are_alike(items):
        return as_fields
    rows = len(items)
    as_samples = Option(node=_CUT, rows=rows, said_by=f"{path} has {rows} items")
    if isinstance(as_fields, Clash) or all(option.rows is None for option in as_fields):
        return (replace(as_samples, samples_for_sure=1),)
    reading = prefer_reading(items, as_fields[0])
    doubted = (
        f"{path} may hold {rows} samples or {rows} fields of {as_fields[0].rows} rows each "
        f"({as_fields[0].said_by})"
    )
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
    return (*fields, samples)


def _take(batch: Any, node: Node, start: int, stop: int, rows: int | None) -> Any:
    if node.action == "share":
        return batch
    if node.action == "cut":
        return slice_items(batch, start, stop)
    if node.action == "plain":
        return batch if rows is None else cut_plain(batch, start, stop, rows)
    kind = batch_type(batch)
    if node.action == "take":
        return kind.take(batch, start, stop)
    pairs = zip(kind.children(batch), node.children, strict=True)
    children = [_take(child, part, start, stop, rows) for (_, child), part in pairs]
    return kind.rebuild(batch, children)
