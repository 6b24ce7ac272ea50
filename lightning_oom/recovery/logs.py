"""What a batch would have logged, from what its micro-batches logged.

One call of ``self.log`` in a training step becomes one call per micro-batch. The rules here turn
those back into one value and one batch size; they know no trainer.

===================================  ==============================================================
the micro-batches logged             the batch logs
===================================  ==============================================================
a value named in ``log_merge``       what the user says: mean, sum, last, max or min
``reduce_fx`` sum, max or min        their sum, maximum or minimum
their number of rows                 the number of rows of the batch (one row at a time, or where an
                                     earlier batch logged the same value: that value)
the same value every time            that value, unchanged bit for bit
anything else                        the mean, weighted by rows (or by the user's weights); an
                                     explicit ``batch_size`` that counts something is the weight
===================================  ==============================================================

What a mean cannot give - counts logged as means, a quantity that is not linear in the rows - needs
``log_merge``. A :class:`torchmetrics.Metric` is merged by its states, elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MERGE_RULES",
    "LoggedValue",
    "MergeRule",
    "check_log_merge",
    "merge_batch_sizes",
    "merge_logged",
    "merge_values",
    "reduction_of",
]

MergeRule = Literal["mean", "sum", "last", "max", "min"]

MERGE_RULES: tuple[MergeRule, ...] = ("mean", "sum", "last", "max", "min")
"""What ``log_merge`` may say of a logged name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedValue:
    """One call of ``self.log`` inside one micro-batch.

    Attributes:
        value: What was logged, detached unless its graph was asked for.
        rows: Rows of the micro-batch.
        weight: What the micro-batch counts in a mean; its rows unless the user weighs otherwise.
        batch_size: The explicit ``batch_size`` of the call, ``None`` when it is inferred.
    """

    value: torch.Tensor
    rows: int
    weight: float
    batch_size: int | None = None


def check_log_merge(log_merge: Mapping[str, str] | None) -> dict[str, MergeRule]:
    """Return ``log_merge`` as a dictionary of its own.

    Raises:
        ValueError: A rule is not one of :data:`MERGE_RULES`.

    Example:
        >>> check_log_merge({"num_tokens": "sum"})
        {'num_tokens': 'sum'}
        >>> check_log_merge({"num_tokens": "total"})
        Traceback (most recent call last):
            ...
        ValueError: log_merge['num_tokens'] must be one of 'mean', 'sum', 'last', 'max', 'min', got 'total'
    """
    checked: dict[str, MergeRule] = {}
    for name, rule in (log_merge or {}).items():
        if rule not in MERGE_RULES:
            allowed = ", ".join(map(repr, MERGE_RULES))
            raise ValueError(f"log_merge[{name!r}] must be one of {allowed}, got {rule!r}")
        checked[name] = rule
    return checked


def reduction_of(reduce_fx: Any) -> MergeRule:
    """Return the rule that a ``reduce_fx`` of ``self.log`` means.

    Strings (any case, ``"avg"`` too) and functions of torch or Python go by their name.

    Example:
        >>> reduction_of("AVG"), reduction_of(torch.max), reduction_of(sum)
        ('mean', 'max', 'sum')
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    rules: dict[str, MergeRule] = {
        "sum": "sum",
        "max": "max",
        "amax": "max",
        "min": "min",
        "amin": "min",
    }
    return rules.get(name.lower(), "mean")


def merge_logged(
    logged: Sequence[LoggedValue],
    *,
    rule: MergeRule,
    total_rows: int,
    earlier: torch.Tensor | None = None,
    earlier_batch_size: float | None = None,
) -> tuple[torch.Tensor, int | None]:
    """Merge the calls of one name, one per micro-batch, into one.

    Args:
        logged: In the order of the micro-batches. A micro-batch may be missing.
        rule: What to do with the values, see :func:`reduction_of`.
        total_rows: Rows of the whole batch.
        earlier: What the last whole batch logged under this name, if it is known. It decides
            whether equal values are a constant or the number of rows of equal micro-batches.
        earlier_batch_size: Mean of the batch sizes that whole batches gave before, if it is known.
            It decides whether an explicit batch size is a constant or counts something, where the
            micro-batches leave that open.

    Returns:
        The value, and the explicit batch size (``None`` when it is to be inferred).

    Example:
        >>> logged = [
        ...     LoggedValue(value=torch.tensor(1.0), rows=3, weight=3),
        ...     LoggedValue(value=torch.tensor(5.0), rows=1, weight=1),
        ... ]
        >>> merge_logged(logged, rule="mean", total_rows=4)
        (tensor(2.), None)
    """
    batch_size, weights = merge_batch_sizes(
        logged, total_rows=total_rows, earlier=earlier_batch_size
    )
    values = [entry.value for entry in logged]
    rows = [entry.rows for entry in logged]
    if rule == "mean" and sum(rows) == total_rows and _are_row_counts(values, rows, earlier):
        rule = "sum"
    return merge_values(values, weights, rule), batch_size


def merge_values(
    values: Sequence[torch.Tensor], weights: Sequence[float], rule: MergeRule
) -> torch.Tensor:
    """Merge values by a rule.

    Sums and means are accumulated in float64 where the device has it and rounded once. A single
    value, and a mean of equal values, come back as they are.

    Args:
        values: One per micro-batch, of one shape.
        weights: Used by ``"mean"`` alone, where a value of weight 0 counts for nothing, not even
            when it is not finite (the mean loss of a micro-batch without tokens); not all zero.
        rule: One of :data:`MERGE_RULES`.

    Returns:
        A tensor of the values' dtype; a mean of integers, and anything below 32 bits, in the
        default dtype.
    """
    if rule == "mean":
        counted = [(value, w) for value, w in zip(values, weights, strict=True) if w]
        values, weights = [value for value, _ in counted], [w for _, w in counted]
    first, last = values[0], values[-1]
    if len(values) == 1 or rule == "last":
        return last
    if rule == "mean" and all(_equal(first, value) for value in values[1:]):
        return first
    stacked = torch.stack([value.to(first.device) for value in values])
    if rule == "max":
        return stacked.amax(0)
    if rule == "min":
        return stacked.amin(0)
    if rule == "sum" and not stacked.is_floating_point():
        return stacked.sum(0)
    dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else _default_dtype()
    wide = torch.float64 if first.device.type != "mps" else torch.float32
    stacked = stacked.to(wide)
    if rule == "mean":
        share = torch.tensor(list(weights), dtype=wide, device=first.device) / math.fsum(weights)
        stacked = stacked * share.reshape(-1, *[1] * first.ndim)
    return stacked.sum(0).to(dtype)


def merge_batch_sizes(
    logged: Sequence[LoggedValue], *, total_rows: int, earlier: float | None = None
) -> tuple[int | None, list[float]]:
    """Work out the batch size of the whole batch and the weights of a mean.

    An explicit ``batch_size`` may count something (rows, tokens), or be a constant: the rows of a
    full batch, 1, or a setting. What counts adds up and is the weight; a constant stays and the
    rows are the weight.

    Returns:
        The explicit batch size or ``None``, and one weight per entry.
    """
    weights = [float(entry.weight) for entry in logged]
    if not any(weights):
        weights = [1.0] * len(logged)
    sizes = [entry.batch_size for entry in logged]
    known = [size for size in sizes if size is not None]
    if len(known) != len(sizes):
        return (known[-1] if known else None), weights
    if _is_constant(known, [entry.rows for entry in logged], total_rows, earlier):
        return known[0], weights
    counts = list(map(float, known))
    return sum(known), counts if any(counts) else weights


def _is_constant(
    sizes: Sequence[int], rows: Sequence[int], total_rows: int, earlier: float | None
) -> bool:
    size = sizes[0]
    if len(sizes) == 1 or any(other != size for other in sizes):
        return len(sizes) == 1
    if size == total_rows or (size == 1 and max(rows) > 1):
        return True
    if min(rows) != max(rows):
        return True  # a count would have followed the rows
    if earlier is not None:
        return size == earlier
    return rows[0] == 0 or size % rows[0] != 0  # no whole number of anything per row


def _are_row_counts(
    values: Sequence[torch.Tensor], rows: Sequence[int], earlier: torch.Tensor | None
) -> bool:
    if len(values) == 1 or any(value.numel() != 1 for value in values):
        return False
    if any(float(value) != count for value, count in zip(values, rows, strict=True)):
        return False
    if min(rows) != max(rows):
        return True
    if earlier is not None:
        return not _equal(earlier, values[0])
    return rows[0] > 1


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same numbers; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN


def _default_dtype() -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
