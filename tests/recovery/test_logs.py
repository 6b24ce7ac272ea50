"""Merging what micro-batches logged: one table of cases for values, one for batch sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_oom.recovery.logs import (
    LoggedValue,
    check_log_merge,
    merge_batch_sizes,
    merge_logged,
    merge_values,
    reduction_of,
)


def logged(
    values: list[Any], rows: list[int], batch_sizes: list[int | None] | None = None
) -> list[LoggedValue]:
    """One call per micro-batch."""
    sizes = batch_sizes or [None] * len(values)
    return [
        LoggedValue(value=torch.as_tensor(v), rows=n, weight=n, batch_size=b)
        for v, n, b in zip(values, rows, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("mean", 3.0), ("sum", 8.0), ("last", 6.0), ("max", 6.0), ("min", 2.0)],
)
def test_each_rule_merges_as_its_name_says(rule: Any, expected: float) -> None:
    """A mean is weighted by rows, the others are what they are called."""
    value, batch_size = merge_logged(logged([2.0, 6.0], [3, 1]), rule=rule, total_rows=4)

    assert value.item() == expected
    assert batch_size is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_equal_values_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """A constant is logged as it was, with its dtype."""
    value = torch.tensor(0.1).to(dtype)

    merged = merge_values([value, value.clone(), value.clone()], [3, 2, 2], "mean")

    assert merged.dtype == dtype
    assert torch.equal(merged, value)


def test_a_mean_of_integers_is_a_float() -> None:
    """As Lightning would have made of it."""
    merged = merge_values([torch.tensor(1), torch.tensor(2)], [1, 1], "mean")

    assert merged.dtype == torch.float32
    assert merged.item() == 1.5


def test_a_sum_of_integers_is_an_integer() -> None:
    """Nothing is rounded."""
    big = torch.tensor(2**60 + 1)

    assert merge_values([big, big], [1, 1], "sum").item() == 2**61 + 2


def test_half_precision_values_are_merged_in_single_precision() -> None:
    """So that a merge adds no rounding of its own."""
    values = [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)]

    merged = merge_values(values, [2, 1], "mean")

    assert merged.dtype == torch.float32
    assert merged.item() == pytest.approx(4 / 3)


def test_nan_is_kept() -> None:
    """In means, sums and maxima; and NaN everywhere is a constant."""
    nan, one = torch.tensor(math.nan), torch.tensor(1.0)

    for rule in ("mean", "sum", "max", "min"):
        assert merge_values([nan, one], [1, 1], rule).isnan()
    assert merge_values([nan, nan], [1, 1], "mean") is nan


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(-1e3, 1e3, width=32)), min_size=2, max_size=6)
)
def test_means_of_parts_give_the_mean_of_the_whole(parts: list[tuple[int, float]]) -> None:
    """Whatever the parts, to the last digits of single precision."""
    rows = [n for n, _ in parts]
    values = [torch.tensor(v) for _, v in parts]

    merged = merge_values(values, rows, "mean").item()

    expected = math.fsum(n * v for n, v in parts) / sum(rows)
    assert merged == pytest.approx(expected, rel=1e-6, abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "values", "earlier", "expected"),
    [
        ([5, 4], [5, 4], None, 9),
        ([5, 5], [5, 5], None, 10),
        ([5, 5], [5, 5], 10, 10),
        ([5, 5], [5, 5], 5, 5),
        ([1, 1], [1, 1], None, 1),
        ([1, 1], [1, 1], 8, 2),
        ([5, 4], [5, 5], None, 5),
    ],
    ids=[
        "rows", "equal rows", "an earlier batch logged its rows", "a constant, as before",
        "one row at a time", "one row at a time, earlier known", "a constant",
    ],
)  # fmt: skip
def test_a_number_of_rows_is_that_of_the_batch(
    rows: list[int], values: list[int], earlier: int | None, expected: int
) -> None:
    """``self.log("rows", len(batch))`` adds up; a constant that looks the same does not."""
    value, _ = merge_logged(
        logged([float(v) for v in values], rows),
        rule="mean",
        total_rows=sum(rows),
        earlier=None if earlier is None else torch.tensor(float(earlier)),
    )

    assert value.item() == expected


@pytest.mark.parametrize(
    ("rows", "sizes", "earlier", "expected"),
    [
        ([5, 4], [5, 4], None, 9),
        ([5, 5], [5, 5], None, 10),
        ([5, 4], [35, 28], None, 63),
        ([5, 5], [35, 35], None, 70),
        ([5, 5], [10, 10], None, 10),
        ([5, 5], [1, 1], None, 1),
        ([5, 4], [32, 32], None, 32),
        ([5, 5], [32, 32], None, 32),
        ([1, 1], [1, 1], None, 2),
        ([1, 1], [1, 1], 1.0, 1),
        ([4, 4], [32, 32], 32.0, 32),
        ([3, 2], [17, 40], None, 57),
        ([5], [3], None, 3),
        ([0, 0], [4, 4], None, 4),
        ([5, 4], [None, None], None, None),
    ],
)
def test_explicit_batch_sizes_count_or_stay(
    rows: list[int], sizes: list[int | None], earlier: float | None, expected: int | None
) -> None:
    """Rows and tokens add up; the rows of a full batch, 1 and settings are constants."""
    entries = logged([0.0] * len(rows), rows, sizes)

    batch_size, _ = merge_batch_sizes(entries, total_rows=sum(rows), earlier=earlier)

    assert batch_size == expected


def test_tokens_are_the_weights_of_a_mean_where_they_are_given() -> None:
    """A token mean of 2 over 30 tokens and of 5 over 10 is 2.75, whatever the rows."""
    value, batch_size = merge_logged(
        logged([2.0, 5.0], [3, 2], [30, 10]), rule="mean", total_rows=5
    )

    assert value.item() == 2.75
    assert batch_size == 40


def test_constants_leave_the_rows_as_weights() -> None:
    """``batch_size=1`` does not make micro-batches equal."""
    value, _ = merge_logged(logged([2.0, 6.0], [3, 1], [1, 1]), rule="mean", total_rows=4)

    assert value.item() == 3.0


def test_weights_that_are_all_zero_count_alike() -> None:
    """No division by zero where no micro-batch has a token."""
    entries = [
        LoggedValue(value=torch.tensor(v), rows=1, weight=0.0, batch_size=0) for v in (1.0, 3.0)
    ]

    value, _ = merge_logged(entries, rule="mean", total_rows=2)

    assert value.item() == 2.0


@pytest.mark.parametrize(
    ("reduce_fx", "rule"),
    [
        ("mean", "mean"), ("avg", "mean"), ("SUM", "sum"), ("max", "max"), ("min", "min"),
        (torch.mean, "mean"), (torch.sum, "sum"), (torch.max, "max"), (torch.min, "min"),
        (sum, "sum"), (max, "max"), (min, "min"), (torch.amax, "max"),
    ],
)  # fmt: skip
def test_every_reduction_of_lightning_is_known(reduce_fx: Any, rule: str) -> None:
    """Strings and functions of torch and Python."""
    assert reduction_of(reduce_fx) == rule


def test_a_wrong_rule_is_refused_with_what_is_allowed() -> None:
    """In the constructor, naming key and value."""
    with pytest.raises(ValueError, match=r"log_merge\['n'\] must be one of 'mean'.*got 'avg'"):
        check_log_merge({"n": "avg"})
    assert check_log_merge(None) == {}
