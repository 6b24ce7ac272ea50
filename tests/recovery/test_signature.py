"""A signature tells batches apart by what their memory depends on, cheaply and without raising."""

from __future__ import annotations

import json
import pickle
from collections import UserDict

import numpy as np
import pytest
import torch
from batch_cases import AMBIGUOUS, COUNTED, Graphs, X, Y, boxes, images, rows
from torch.nn.utils.rnn import pack_sequence

from lightning_oom.recovery.batches import BatchSignature, count_rows, describe_batch
from lightning_oom.recovery.batches.row_plan import plan_rows
from lightning_oom.recovery.batches.signature import quick_rows


@pytest.fixture(autouse=True)
def _compiler_cache(monkeypatch, tmp_path):
    """The first jagged tensor of a process makes torch name its compiler cache in the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Unreadable(UserDict):
    """A mapping that cannot be walked."""

    def __iter__(self):
        raise KeyError("broken")


def test_signature_of_a_mapping():
    """Structure, trailing shapes, dtypes and elements per row."""
    signature = describe_batch({"x": rows(8, 3, 2), "y": rows(8).long(), "s": torch.tensor(1.0)})

    assert signature == BatchSignature(
        structure="dict('x': rows, 'y': rows, 's': scalar)",
        shapes=((3, 2), ()),
        dtypes=("float32", "int64"),
        elements_per_row=7,
    )


def test_number_of_rows_does_not_count():
    """Batches that differ in rows alone have one signature; all else tells them apart."""
    base = describe_batch({"x": rows(8, 3)})
    others = [
        {"x": rows(8, 4)},
        {"x": rows(8, 3).double()},
        {"z": rows(8, 3)},
        [rows(8, 3)],
        {"x": rows(8, 3), "s": 1.0},
    ]

    assert base == describe_batch({"x": rows(5, 3)})
    assert hash(base) == hash(describe_batch({"x": rows(5, 3)}))
    assert base not in [describe_batch(other) for other in others]


def test_ragged_samples_are_described_by_their_largest_extents():
    """One column per tensor of a sample; the elements are shared out over the rows."""
    signature = describe_batch((images(5, 6, 8, 7), boxes(2, 0, 1, 3)))

    assert signature.structure == "tuple(list of samples, list of samples)"
    assert signature.shapes == ((3, 4, 8), (3, 4), (3,))
    assert signature.dtypes == ("float32", "float32", "int64")
    assert signature.elements_per_row == -(-(3 * 4 * 26 + 6 * 4 + 6) // 4)


def test_other_leaves_are_described():
    """Packed sequences and jagged tensors count their values, arrays their elements."""
    packed = pack_sequence([rows(4, 2), rows(2, 2)])
    jagged = torch.nested.nested_tensor([rows(3, 2), rows(1, 2)], layout=torch.jagged)

    signature = describe_batch({"p": packed, "j": jagged, "a": np.zeros((2, 5))})

    assert signature.shapes == ((2,), (2,), (5,))
    assert signature.dtypes == ("float32", "float32", "float64")
    assert signature.elements_per_row == (12 + 8 + 10) // 2


@pytest.mark.parametrize(
    "batch",
    [
        *AMBIGUOUS.values(),
        {"x": rows(4, 2), "y": rows(3)},
        Graphs(rows(3, 2)),
        Unreadable(),
        {"x": X, "u": Unreadable()},
        {"x": X, "g": Graphs(Y)},
        "text",
        {"a": 0.5},
        [],
        None,
        torch.tensor(1.0),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_batch_that_cannot_be_cut_is_described_whole(batch):
    """A description never raises: whole shapes, all elements."""
    signature = describe_batch(batch)

    assert hash(signature) == hash(describe_batch(batch))
    assert signature.elements_per_row >= 0


@pytest.mark.parametrize("batch", [batch for batch, _ in COUNTED.values()], ids=COUNTED)
def test_quick_count_agrees_with_the_plan(batch):
    """The shortcut for simple batches gives what the full search gives, or nothing."""
    quick = quick_rows(batch)

    assert quick is None or quick == plan_rows(batch).rows == count_rows(batch)


def test_simple_batches_take_the_shortcut():
    """The everyday shapes are not searched each step."""
    everyday = [
        X,
        {"x": X, "y": Y, "names": list("abcde")},
        (X, Y),
        [rows(5, 3), rows(5, 1)],
        {"a": {"b": (X, None)}},
    ]

    assert [5] * len(everyday) == [quick_rows(batch) for batch in everyday]


def test_plain_form_survives_json():
    """A signature in a checkpoint is plain data and comes back equal."""
    signature = describe_batch({"x": X, "y": Y})

    plain = json.loads(json.dumps(signature.to_plain()))

    assert BatchSignature.from_plain(plain) == signature
    assert pickle.loads(pickle.dumps(signature)) == signature  # noqa: S301 - own bytes
