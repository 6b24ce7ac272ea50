"""A split loses and repeats no row, takes views, and refuses to guess."""

from __future__ import annotations

from collections import UserList, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import (
    AMBIGUOUS,
    COUNTED,
    Encoding,
    Graphs,
    Sample,
    X,
    Y,
    boxes,
    images,
    rows,
)

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches import (
    batch_tensors,
    count_rows,
    register_splitter,
    split_batch,
    split_sizes,
    take_rows,
)


@pytest.mark.parametrize(("batch", "expected"), COUNTED.values(), ids=COUNTED)
def test_rows_are_counted(batch, expected):
    """The batch axis is found in every shape that data loaders hand out."""
    assert expected == count_rows(batch)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(batch, n) for batch, n in COUNTED.values() if n],
    ids=[name for name, (_, n) in COUNTED.items() if n],
)
@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_split_gives_the_counted_rows(batch, expected, max_rows):
    """There are as many parts as the rows ask for, with all elements of the batch between them."""
    parts = split_batch(batch, max_rows)

    assert len(split_sizes(expected, max_rows)) == len(parts)
    assert num_elements([batch]) == num_elements(parts)
    assert all(type(part) is type(batch) for part in parts)


def num_elements(batches: list[Any]) -> int:
    """Elements of all tensors that have rows."""
    tensors = [tensor for batch in batches for tensor in batch_tensors(batch)]
    return sum(tensor.numel() for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize("batch", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_list_with_two_readings_is_refused(batch):
    """A list that may hold samples as well as fields is never cut by a guess."""
    with pytest.raises(BatchSplitError, match=r"batch may hold \d+ samples or .*split_fn"):
        count_rows(batch)


def test_disagreement_names_both_paths_and_the_hook():
    """Twelve against six rows is an error with both paths and shapes, and what to do."""
    batch = {"x": rows(12, 3), "nested": {"y": rows(6)}}

    with pytest.raises(BatchSplitError) as caught:
        split_batch(batch, 4)

    assert str(caught.value) == (
        "batch['x'] has 12 rows (12, 3), batch['nested']['y'] has 6 rows (6,): "
        "say how to cut the batch with split_fn"
    )


@pytest.mark.parametrize(
    "extra",
    [rows(8, 8), rows(1, 8), np.zeros((4, 2)), images(5, 6, 7)],
    ids=["mask", "broadcast", "array", "list"],
)
def test_leaf_with_other_rows_is_refused(extra):
    """A leaf that seems to have no batch axis is not silently shared, nor cut."""
    with pytest.raises(BatchSplitError, match=r"batch\['x'\] has 5 rows .*batch\['extra'\]"):
        split_batch({"x": X, "extra": extra}, 2)


def test_batch_without_rows_is_refused():
    """There is nothing to split in a batch of text and numbers."""
    with pytest.raises(BatchSplitError, match=r"no leaf of the batch \(a dict\) has rows"):
        split_batch({"a": 0.5, "b": "text"}, 2)
    with pytest.raises(BatchSplitError, match="no leaf"):
        take_rows({"a": 0.5}, 0, 1)


def test_unknown_type_with_tensors_is_refused():
    """A graph batch of unknown type holds rows that cannot be told."""
    batch = {"x": X, "graphs": Graphs(rows(9, 2))}

    with pytest.raises(BatchSplitError, match=r"batch\['graphs'\] is a Graphs .*register_splitter"):
        split_batch(batch, 2)


def test_unknown_type_with_as_many_items_as_rows_is_refused():
    """A frame of five lines in a batch of five rows is not given whole to every micro-batch."""

    class Frame:
        def __len__(self):
            return 5

    assert count_rows({"x": rows(4, 2), "frame": Frame()}) == 4
    with pytest.raises(BatchSplitError, match="has 5 items, as many as the batch has rows"):
        count_rows({"x": X, "frame": Frame()})


def test_columns_of_unequal_length_are_refused():
    """Lists of names that disagree are an error too."""
    with pytest.raises(BatchSplitError, match=r"batch\['a'\] has 2 items, batch\['b'\] has 3"):
        count_rows({"a": ["x", "y"], "b": ["x", "y", "z"]})


def test_names_do_not_turn_fields_into_samples():
    """Two class names beside ``[x, y]`` do not make two samples of x and y."""
    batch = {"inputs": [rows(5, 3), rows(5, 1)], "classes": ["cat", "dog"]}

    assert count_rows(batch) == 5
    assert split_batch(batch, 3)[1]["classes"] == ["cat", "dog"]


def test_type_inside_a_sample_need_not_be_known():
    """A list that is cut between its items is never looked into."""
    batch = (images(5, 6, 7, 8), [{"boxes": rows(n, 4), "g": Graphs(X)} for n in (2, 0, 1, 3)])

    assert count_rows(batch) == 4


def test_batch_that_cannot_be_read_is_refused():
    """A batch that contains itself, or a type of the user's that fails, says so."""

    class Failing:
        pass

    def fail(_node):
        raise KeyError("rows")

    register_splitter(Failing, rows=fail, take=fail)
    circular: list[Any] = [X]
    circular.append(circular)

    with pytest.raises(BatchSplitError, match=r"cannot be read \(KeyError: 'rows'\)") as caught:
        count_rows({"x": X, "f": Failing()})
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(BatchSplitError, match="RecursionError"):
        count_rows(circular)


@pytest.mark.parametrize("max_rows", [0, -1])
def test_max_rows_below_one_is_refused(max_rows):
    """The bound is named with its value."""
    with pytest.raises(ValueError, match=f"max_rows is at least 1, got {max_rows}"):
        split_batch(X, max_rows)
    with pytest.raises(ValueError, match="at least 1"):
        split_sizes(4, max_rows)


def test_negative_rows_are_refused():
    """A number of rows is never negative."""
    with pytest.raises(ValueError, match="at least 0, got -1"):
        split_sizes(-1, 2)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 6)])
def test_rows_outside_the_batch_are_refused(start, stop):
    """A range that is empty or reaches outside says so."""
    with pytest.raises(ValueError, match=r"are not within the 5 of the batch"):
        take_rows(X, start, stop)


def test_parts_are_views():
    """A split allocates no device memory: every tensor shares the storage of the original."""
    batch = {"x": X, "y": [Y, (X, 1)], "images": np.zeros((5, 2))}

    parts = split_batch(batch, 2)

    storages = {tensor.untyped_storage().data_ptr() for tensor in batch_tensors(batch)}
    assert storages == {t.untyped_storage().data_ptr() for p in parts for t in batch_tensors(p)}
    assert all(np.shares_memory(part["images"], batch["images"]) for part in parts)


def test_ragged_items_are_handed_on():
    """A list of samples is sliced; its tensors are the very same objects."""
    batch = (images(5, 6, 7), boxes(2, 0, 1))

    first, second = split_batch(batch, 2)

    assert [first[0][0] is batch[0][0], first[0][1] is batch[0][1]] == [True, True]
    assert [second[0][0] is batch[0][2], second[1][0] is batch[1][2]] == [True, True]


def test_small_batch_is_returned_as_it_is():
    """Nothing is cut, copied or refused when everything fits."""
    batch = {"x": X}

    assert split_batch(batch, 5)[0] is batch
    assert split_batch(rows(0, 3), 2)[0].shape == (0, 3)


def test_shared_leaves_are_shared():
    """Leaves without rows go to every part as the same object; sets are untouched."""
    shared = {"text": "abcde", "none": None, "set": {1, 2, 3, 4, 5}, "s": torch.tensor(1.0)}
    shared["size"] = torch.Size([5, 3, 1, 1, 1])

    parts = split_batch({"x": X, **shared}, 3)

    assert all(part[name] is value for part in parts for name, value in shared.items())


def test_containers_keep_their_type_and_extras():
    """Frozen fields, default factories and attributes of a container survive the cut."""
    sample = split_batch(Sample(X, list("abcde")), 3)[1]
    encoding = split_batch(Encoding({"ids": Y}, encodings="kept"), 3)[1]
    default = split_batch(defaultdict(list, x=X), 3)[1]
    chain = split_batch({"x": X, "names": UserList("abcde"), "q": deque("abcde")}, 3)[1]

    assert (sample.name, sample.total) == (["d", "e"], 3)
    assert torch.equal(sample.x, X[3:])
    assert encoding._encodings == "kept"
    assert torch.equal(encoding.ids, Y[3:])
    assert default.default_factory is list
    assert chain["names"] == UserList("de")
    assert chain["q"] == deque("de")


def test_plain_columns_are_cut_by_the_rows_of_the_tensors():
    """Names, tuples of names, ranges and lists of token lists follow the tensors; others stay."""
    batch = {
        "x": X,
        "names": tuple("abcde"),
        "indices": range(5),
        "tokens": [[1], [2, 3], [], [4], [5]],
        "columns": [("a", "b", "c", "d", "e"), (1, 2, 3, 4, 5)],
        "classes": ["cat", "dog"],
    }

    part = split_batch(batch, 3)[1]

    assert part["names"] == ("d", "e")
    assert part["indices"] == range(3, 5)
    assert part["tokens"] == [[4], [5]]
    assert part["columns"] == [("d", "e"), (4, 5)]
    assert part["classes"] == ["cat", "dog"]


def test_batch_of_two_pairs_is_cut_along_the_rows():
    """A pair of two rows is not taken for two samples."""
    x, y = rows(2, 3), rows(2, 3) + 10

    first, second = split_batch([x, y], 1)

    assert torch.equal(first[0], x[:1])
    assert torch.equal(second[1], y[1:])


def test_registered_type_is_cut():
    """A type of the user's own, and its subclasses, are cut once entered."""

    class Cloud:
        def __init__(self, points):
            self.points = points

    class Scan(Cloud):
        pass

    batch = {"cloud": Scan(rows(5, 3)), "y": Y}
    with pytest.raises(BatchSplitError, match="Scan"):
        count_rows(batch)

    register_splitter(
        Cloud,
        rows=lambda cloud: len(cloud.points),
        take=lambda cloud, start, stop: type(cloud)(cloud.points[start:stop]),
    )
    parts = split_batch(batch, 3)

    assert [len(part["cloud"].points) for part in parts] == [3, 2]
    assert type(parts[0]["cloud"]) is Scan
    assert [tensor.shape[0] for tensor in batch_tensors(batch)] == [5, 5]


def test_split_fn_cuts_instead():
    """The user's function sees the batch and the bound, and is not second-guessed."""
    seen = []

    def split_fn(batch, max_rows):
        seen.append((batch, max_rows))
        return [batch[:1], batch[1:]]

    assert split_batch("text", 3, split_fn=split_fn) == ["t", "ext"]
    assert seen == [("text", 3)]


@pytest.mark.parametrize("answer", [None, [], X], ids=["none", "empty", "tensor"])
def test_split_fn_must_return_batches(answer):
    """A function that returns something else is named."""
    with pytest.raises(BatchSplitError, match="split_fn returns a list of at least one"):
        split_batch(X, 2, split_fn=lambda _batch, _max_rows: answer)
