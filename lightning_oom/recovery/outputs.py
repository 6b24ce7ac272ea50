"""Join what the micro-batches of one batch returned into what the whole batch would have returned."""

from __future__ import annotations

import cmath
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["merge_outputs"]


@torch.no_grad()
def merge_outputs(
    outputs: Sequence[Any], rows: Sequence[int], *, weights: Sequence[float] | None = None
) -> Any:
    """Join the outputs of the micro-batches of one batch.

    The first rule that applies decides, on each leaf of a nested output:

    ========================================================  =====================================
    What the parts returned                                   What is returned
    ========================================================  =====================================
    ``None``                                                  left out; ``None`` when all are
    tensors (arrays) with as many rows as their micro-batch   one tensor, rows in order
    whole numbers equal to the rows of their micro-batch      their sum (``len(batch)``)
    equal values                                              that value
    other whole numbers                                       their sum (a count)
    numbers and tensors of one shape                          mean, weighted
    mappings, named tuples, dataclasses                       joined field by field
    lists with one entry per row                              one list, rows in order
    other lists and tuples of one length                      joined entry by entry
    lists and tuples of different lengths                     chained
    row tensors whose further dimensions differ               list of the parts
    anything else                                             the value of the last part
    ========================================================  =====================================

    Args:
        outputs: What each micro-batch returned, in row order; at least one.
        rows: Rows of each micro-batch, at least 1 each.
        weights: Weight of each micro-batch in means, at least 0; ``None`` takes ``rows``. A part
            of weight 0 does not enter a mean, so that its NaN does not either.

    Returns:
        The joined output. Tensors are detached.

    Raises:
        ValueError: ``outputs`` is empty or its length differs from that of ``rows`` or ``weights``.

    Note:
        The kind of a number is inferred from its value: a count that happens to be equal in all
        parts is returned unchanged, a matrix with as many lines as each micro-batch has rows is
        taken for rows. Joining row tensors allocates as much as the output of the whole batch.

    Example:
        >>> parts = [{"loss": torch.tensor(1.0), "n": 5}, {"loss": torch.tensor(4.0), "n": 4}]
        >>> merge_outputs(parts, [5, 4])
        {'loss': tensor(2.3333), 'n': 9}
    """
    weights = rows if weights is None else weights
    if not outputs or not len(outputs) == len(rows) == len(weights):
        raise ValueError(
            f"one output, one number of rows and one weight per micro-batch, at least one: "
            f"got {len(outputs)}, {len(rows)} and {len(weights)}"
        )
    return _merge(list(outputs), list(rows), list(weights))


def _merge(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    kept = [i for i, part in enumerate(parts) if part is not None]
    if not kept:
        return None
    parts = [parts[i] for i in kept]
    rows, weights = [rows[i] for i in kept], [weights[i] for i in kept]
    for types, merge in _MERGES:
        if all(isinstance(part, types) for part in parts):
            return merge(parts, rows, weights)
    if is_dataclass(parts[0]) and all(type(part) is type(parts[0]) for part in parts):
        return _merge_dataclasses(parts, rows, weights)
    return parts[-1]


def _merge_tensors(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    parts = [part.detach() for part in parts]
    shapes = {part.shape for part in parts}
    if all(part.ndim and part.shape[0] == n for part, n in zip(parts, rows, strict=True)):
        return torch.cat(parts) if len({shape[1:] for shape in shapes}) == 1 else parts
    if len(shapes) > 1:
        return parts
    if parts[0].ndim == 0:
        return _merge_scalars(parts, rows, weights)
    if parts[0].dtype is torch.bool or all(torch.equal(part, parts[0]) for part in parts):
        return parts[-1]
    if not (parts[0].is_floating_point() or parts[0].is_complex()):
        return torch.stack(parts).sum(0)
    return _weighted_mean_tensor(parts, weights)


def _merge_scalars(parts: list[Tensor], rows: list[int], weights: list[float]) -> Tensor:
    merged = _merge_numbers([part.item() for part in parts], rows, weights)
    return torch.tensor(merged, dtype=parts[0].dtype, device=parts[0].device)


def _weighted_mean_tensor(parts: list[Tensor], weights: list[float]) -> Tensor:
    total = float(sum(weights))
    pairs = [(part, w / total) for part, w in zip(parts, weights, strict=True) if w > 0]
    if not pairs:
        return parts[-1]
    mean = pairs[0][0] * pairs[0][1]
    for part, share in pairs[1:]:
        mean = mean + part * share
    return mean


def _merge_arrays(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    if parts[0].dtype.kind in "biufc" and len({part.dtype for part in parts}) == 1:
        merged = _merge_tensors([torch.from_numpy(part) for part in parts], rows, weights)
        return merged.numpy() if isinstance(merged, Tensor) else parts
    if all(part.ndim and part.shape[0] == n for part, n in zip(parts, rows, strict=True)):
        return np.concatenate(parts) if len({part.shape[1:] for part in parts}) == 1 else parts
    return parts[-1]


def _merge_numbers(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    if any(isinstance(part, (bool, np.bool_)) for part in parts):
        return parts[-1]
    whole = all(isinstance(part, (int, np.integer)) for part in parts)
    if whole and parts == rows:
        return sum(parts[1:], parts[0])
    if all(part == parts[0] or (cmath.isnan(part) and cmath.isnan(parts[0])) for part in parts):
        return parts[0]
    if whole or parts == rows:
        return sum(parts[1:], parts[0])
    total = float(sum(weights))
    pairs = [(part, w / total) for part, w in zip(parts, weights, strict=True) if w > 0]
    return sum(part * share for part, share in pairs) if pairs else parts[-1]


def _merge_mappings(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    keys = dict.fromkeys(key for part in parts for key in part)
    merged = {key: _merge([part.get(key) for part in parts], rows, weights) for key in keys}
    if type(parts[0]) is dict:
        return merged
    joined = copy.copy(parts[0])
    for key, value in merged.items():
        joined[key] = value
    return joined


def _merge_dataclasses(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    joined = copy.copy(parts[0])
    for field in fields(joined):
        values = [getattr(part, field.name) for part in parts]
        object.__setattr__(joined, field.name, _merge(values, rows, weights))
    return joined


def _merge_sequences(parts: list[Any], rows: list[int], weights: list[float]) -> Any:
    first = parts[0]
    lengths = [len(part) for part in parts]
    if hasattr(first, "_fields"):
        return type(first)(*(_merge(list(c), rows, weights) for c in zip(*parts, strict=True)))
    chained = [item for part in parts for item in part]
    if len(set(lengths)) > 1 or _one_entry_per_row(parts, rows):
        return _rebuild(first, chained)
    return _rebuild(first, [_merge(list(c), rows, weights) for c in zip(*parts, strict=True)])


def _one_entry_per_row(parts: list[Any], rows: list[int]) -> bool:
    if [len(part) for part in parts] != rows:
        return False
    items = [(item, n) for part, n in zip(parts, rows, strict=True) for item in part]
    if not isinstance(parts[0], list):  # a tuple of results, unless it holds no result at all
        return all(isinstance(item, (str, bytes)) for item, _ in items)
    return not all(
        isinstance(item, (Tensor, np.ndarray)) and item.ndim > 0 and item.shape[0] == n
        for item, n in items
    )


def _rebuild(like: Any, items: list[Any]) -> Any:
    return items if type(like) is list else type(like)(items)


_MERGES: tuple[tuple[Any, Callable[[list[Any], list[int], list[float]], Any]], ...] = (
    (Tensor, _merge_tensors),
    (np.ndarray, _merge_arrays),
    (Number, _merge_numbers),
    (Mapping, _merge_mappings),
    ((list, tuple), _merge_sequences),
)
