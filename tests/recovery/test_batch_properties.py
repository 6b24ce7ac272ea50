"""What holds of a split for any batch."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from batch_cases import (
    Pair,
    rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_oom.recovery.batches import (
    batch_tensors,
    count_rows,
    split_batch,
    split_sizes,
    take_rows,
)


@given(num_rows=st.integers(0, 500), max_rows=st.integers(1, 60))
def test_sizes_are_balanced_and_fewest(num_rows, max_rows):
    """As few parts as the bound allows, whose sizes differ by at most one row."""
    sizes = split_sizes(num_rows, max_rows)

    assert num_rows == sum(sizes)
    assert max(1, math.ceil(num_rows / max_rows)) == len(sizes)
    assert max(sizes) <= max_rows
    assert max(sizes) - min(sizes) <= 1


def leaf_strategy(num_rows: int) -> st.SearchStrategy[Any]:
    """A leaf of a batch: with rows, or shared."""
    trailing = st.lists(st.integers(1, 3), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool])
    tensors = st.builds(lambda shape, dtype: rows(num_rows, *shape).to(dtype), trailing, dtypes)
    others = st.sampled_from([None, 3, 0.5, "abc", torch.tensor(2.0)])
    names = st.just([f"row {i}" for i in range(num_rows)])
    arrays = st.builds(lambda shape: rows(num_rows, *shape).numpy(), trailing)
    return st.one_of(tensors, others, names, arrays)


def batch_strategy(num_rows: int) -> st.SearchStrategy[Any]:
    """Mappings, named tuples and dataclasses around leaves, with a tensor at the top."""

    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(st.text("abc", min_size=1, max_size=2), children, max_size=3),
            st.builds(Pair, children, children),
            st.builds(lambda a, b: OrderedDict(a=a, b=b), children, children),
            st.builds(lambda a: (rows(num_rows, 2).double(), a), children),
        )

    inner = st.recursive(leaf_strategy(num_rows), extend, max_leaves=6)
    return st.builds(lambda top: {"top": rows(num_rows, 2), "inner": top}, inner)


def joined(parts: list[Any], like: Any) -> Any:
    """The inverse of a split, written without the code under test."""
    if isinstance(like, torch.Tensor):
        return torch.cat(parts) if like.ndim else parts[0]
    if isinstance(like, np.ndarray):
        return np.concatenate(parts)
    if isinstance(like, list) and all(isinstance(item, str) for item in like):
        return [item for part in parts for item in part]
    if isinstance(like, dict):
        return type(like)((k, joined([part[k] for part in parts], v)) for k, v in like.items())
    if isinstance(like, tuple):
        columns = zip(*parts, strict=True)
        items = (joined(list(c), v) for c, v in zip(columns, like, strict=True))
        return Pair(*items) if isinstance(like, Pair) else tuple(items)
    assert all(part == like for part in parts)
    return like


def same(left: Any, right: Any) -> bool:
    """Deep equality, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int]:
    """A random batch and its number of rows."""
    num_rows = draw(st.integers(1, 9))
    return draw(batch_strategy(num_rows)), num_rows


@settings(max_examples=150, deadline=None)
@given(drawn=batches(), max_rows=st.integers(1, 10))
def test_parts_put_together_are_the_batch(drawn, max_rows):
    """For any nesting: balanced parts, no row lost or repeated, structure kept, all views."""
    batch, num_rows = drawn

    parts = split_batch(batch, max_rows)

    assert num_rows == count_rows(batch)
    assert split_sizes(num_rows, max_rows) == [part["top"].shape[0] for part in parts]
    assert same(batch, joined(parts, batch))
    storages = {tensor.untyped_storage().data_ptr() for tensor in batch_tensors(batch)}
    assert all(t.untyped_storage().data_ptr() in storages for p in parts for t in batch_tensors(p))


@settings(max_examples=50, deadline=None)
@given(drawn=batches(), data=st.data())
def test_taken_rows_are_those_of_the_whole(drawn, data):
    """Any range of rows is what indexing the tensors gives."""
    batch, num_rows = drawn
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start + 1, num_rows))

    taken = take_rows(batch, start, stop)

    assert torch.equal(taken["top"], batch["top"][start:stop])
