"""Outputs of micro-batches are joined into what the whole batch would have returned."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_oom.recovery.batches import split_batch
from lightning_oom.recovery.outputs import merge_outputs

Scores = namedtuple("Scores", ["logits", "names"])  # noqa: PYI024 - the untyped form is a case


@dataclass(frozen=True)
class Output:
    """An output record."""

    loss: torch.Tensor
    preds: torch.Tensor


MERGED = {
    "nothing": ([None, None], [5, 4], None),
    "loss": ([torch.tensor(1.0), torch.tensor(4.0)], [5, 4], torch.tensor(21 / 9)),
    "equal values": ([torch.tensor(0.1), torch.tensor(0.1)], [5, 4], torch.tensor(0.1)),
    "one part": ([torch.tensor(0.3)], [9], torch.tensor(0.3)),
    "rows": (
        [torch.zeros(2, 3), torch.ones(1, 3)],
        [2, 1],
        torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3]),
    ),
    "vector that is no row": (
        [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])],
        [2, 1],
        torch.tensor([2.0, 3.0, 4.0]),
    ),
    "confusion counts": (
        [torch.eye(3).long(), torch.ones(3, 3).long()],
        [5, 4],
        torch.eye(3).long() + 1,
    ),
    "len(batch)": ([5, 4], [5, 4], 9),
    "len(batch), equal parts": ([4, 4], [4, 4], 8),
    "len(batch) as a tensor": ([torch.tensor(5), torch.tensor(4)], [5, 4], torch.tensor(9)),
    "len(batch) as a float": ([5.0, 4.0], [5, 4], 9.0),
    "number correct": ([torch.tensor(3), torch.tensor(2)], [5, 4], torch.tensor(5)),
    "epoch number": ([7, 7], [5, 4], 7),
    "fraction": ([0.0, 0.9], [5, 4], 0.4),
    "equal fractions of one": ([1.0, 1.0], [1, 1], 1.0),
    "flag": ([True, True], [1, 1], True),
    "text": (["cat", "cat"], [5, 4], "cat"),
    "names": ([["a", "b"], ["c"]], [2, 1], ["a", "b", "c"]),
    "names in a tuple": ([("a",), ("b",)], [1, 1], ("a", "b")),
    "detections": ([["x"], ["y", "z"]], [2, 2], ["x", "y", "z"]),
    "pair of results": ([(1.0, 0.0), (4.0, 0.9)], [5, 4], (21 / 9, 0.4)),
    "pair of results, two rows each": ([(1.0, 0.0), (3.0, 1.0)], [2, 2], (2.0, 0.5)),
    "list of outputs": (
        [[torch.zeros(2, 1), torch.zeros(2)], [torch.zeros(1, 1), torch.zeros(1)]],
        [2, 1],
        [torch.zeros(3, 1), torch.zeros(3)],
    ),
    "named tuple": (
        [Scores(torch.zeros(2), ["a", "b"]), Scores(torch.ones(1), ["c"])],
        [2, 1],
        Scores(torch.tensor([0.0, 0.0, 1.0]), ["a", "b", "c"]),
    ),
    "mapping": (
        [OrderedDict(loss=torch.tensor(1.0), n=5), OrderedDict(loss=torch.tensor(4.0), n=4)],
        [5, 4],
        OrderedDict(loss=torch.tensor(21 / 9), n=9),
    ),
    "key of one part": ([{"a": 1.0}, {"a": 1.0, "b": 2.0}], [5, 4], {"a": 1.0, "b": 2.0}),
    "None in one part": ([None, torch.tensor(2.0)], [5, 4], torch.tensor(2.0)),
    "arrays": ([np.zeros((2, 1)), np.ones((1, 1))], [2, 1], np.array([[0.0], [0.0], [1.0]])),
    "texts in an array": ([np.array(["a"]), np.array(["b"])], [1, 1], np.array(["a", "b"])),
    "rows of unequal width": (
        [torch.zeros(2, 3), torch.zeros(1, 4)],
        [2, 1],
        [torch.zeros(2, 3), torch.zeros(1, 4)],
    ),
}


def assert_same(expected, actual):
    """Deep equality to 1e-6, types included."""
    assert type(expected) is type(actual)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(expected, actual)
    elif isinstance(expected, dict):
        assert list(expected) == list(actual)
        for key, value in expected.items():
            assert_same(value, actual[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for left, right in zip(expected, actual, strict=True):
            assert_same(left, right)
    elif isinstance(expected, float):
        assert expected == pytest.approx(actual)
    else:
        assert expected == actual


@pytest.mark.parametrize(("parts", "rows", "expected"), MERGED.values(), ids=MERGED)
def test_outputs_are_joined(parts, rows, expected):
    """One row of the table of rules each."""
    assert_same(expected, merge_outputs(parts, rows))


def test_dataclass_is_joined_field_by_field():
    """A record keeps its type."""
    parts = [Output(torch.tensor(1.0), torch.zeros(2)), Output(torch.tensor(4.0), torch.ones(1))]

    merged = merge_outputs(parts, [2, 1])

    assert isinstance(merged, Output)
    assert merged.loss == 2.0
    assert torch.equal(merged.preds, torch.tensor([0.0, 0.0, 1.0]))


def test_means_take_the_weights_and_sums_do_not():
    """A token mean is weighted by tokens; rows are still rows, and len(batch) their number."""
    parts = [
        {"loss": torch.tensor(1.0), "n": 5, "p": torch.zeros(5)},
        {"loss": torch.tensor(4.0), "n": 4, "p": torch.zeros(4)},
    ]

    merged = merge_outputs(parts, [5, 4], weights=[1.0, 2.0])

    assert merged["loss"] == 3.0
    assert merged["n"] == 9
    assert merged["p"].shape == (9,)


def test_part_without_weight_does_not_enter_a_mean():
    """The NaN of a fully masked part stays out; all parts without weight give the last value."""
    nan, two = torch.tensor(math.nan), torch.tensor(2.0)

    assert merge_outputs([nan, two], [5, 4], weights=[0, 3]) == 2.0
    assert merge_outputs([[nan] * 1, [two] * 1], [5, 4], weights=[0, 3])[0] == 2.0
    assert merge_outputs([torch.tensor(1.0), two], [5, 4], weights=[0, 0]) == 2.0
    vectors = [torch.full((3,), math.nan), torch.ones(3)]
    assert torch.equal(merge_outputs(vectors, [5, 4], weights=[0, 1]), torch.ones(3))
    assert torch.equal(merge_outputs(vectors, [5, 4], weights=[0, 0]), torch.ones(3))


def test_nan_in_all_parts_stays_nan():
    """Equal values are returned unchanged, NaN too."""
    nan = torch.tensor(math.nan)

    assert merge_outputs([nan, nan.clone()], [5, 4]).isnan()


def test_joined_tensors_carry_no_graph():
    """A joined output does not keep the activations of the micro-batches alive."""
    x = torch.ones(3, requires_grad=True)

    merged = merge_outputs([{"p": x * 2, "l": (x * 2).sum()}] * 2, [3, 3])

    assert not merged["p"].requires_grad
    assert not merged["l"].requires_grad


@pytest.mark.parametrize(
    ("outputs", "rows", "weights"),
    [([], [], None), ([1.0], [1, 2], None), ([1.0, 2.0], [1, 1], [1.0])],
    ids=["empty", "rows", "weights"],
)
def test_lengths_must_agree(outputs, rows, weights):
    """The message counts what was given."""
    with pytest.raises(ValueError, match=f"got {len(outputs)}, {len(rows)}"):
        merge_outputs(outputs, rows, weights=weights)


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 20), max_rows=st.integers(1, 8), seed=st.integers(0, 99))
def test_row_wise_step_gives_what_the_whole_batch_gives(num_rows, max_rows, seed):
    """Split, run and join equals one run, for a step whose loss is a mean over rows."""
    x = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed)).double()

    def step(batch):
        preds = batch.sum(1)
        names = [f"{value:.3f}" for value in preds]
        return {"loss": (preds**2).mean(), "preds": preds, "names": names, "n": len(batch)}

    parts = split_batch(x, max_rows)
    merged = merge_outputs([step(part) for part in parts], [len(part) for part in parts])

    whole = step(x)
    assert merged["n"] == whole["n"]
    assert merged["names"] == whole["names"]
    assert torch.equal(merged["preds"], whole["preds"])
    torch.testing.assert_close(merged["loss"], whole["loss"])
