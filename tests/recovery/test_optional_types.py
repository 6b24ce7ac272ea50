"""Batches of packages that need not be installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from batch_cases import X, Y, rows

from lightning_oom.recovery.batches import (
    batch_tensors,
    copy_containers,
    count_rows,
    describe_batch,
    split_batch,
)


def test_types_are_entered_when_first_met(monkeypatch):
    """An object whose class comes from an optional package is recognised without an import."""
    package = ModuleType("tensordict")

    class TensorDictBase:
        """Stands in for the base class of the package."""

        def __init__(self, entries, batch_size):
            self.entries, self.batch_size = entries, batch_size

        def __getitem__(self, index):
            cut = {name: value[index] for name, value in self.entries.items()}
            return type(self)(cut, [len(range(*index.indices(self.batch_size[0])))])

        def values(self, *, include_nested, leaves_only):
            """All tensors."""
            assert include_nested
            assert leaves_only
            return self.entries.values()

        def copy(self):
            """A copy that shares its tensors."""
            return type(self)(dict(self.entries), self.batch_size)

    TensorDictBase.__module__ = "tensordict.base"
    package.TensorDictBase = TensorDictBase
    package.is_tensor_collection = lambda node: isinstance(node, TensorDictBase)
    monkeypatch.setitem(sys.modules, "tensordict", package)
    batch = {"td": TensorDictBase({"x": X}, [5]), "y": Y}

    parts = split_batch(batch, 3)

    assert torch.equal(parts[1]["td"].entries["x"], X[3:])
    assert batch_tensors(batch)[0] is X
    copied = copy_containers(batch)
    batch["td"].entries.clear()
    assert copied["td"].entries["x"] is X


def test_tensordict_is_cut_as_views():
    """With or without a batch size, as a dictionary or as a class."""
    tensordict = pytest.importorskip("tensordict")
    with_rows = tensordict.TensorDict({"x": X, "n": {"y": Y}}, batch_size=[5])
    without = tensordict.TensorDict({"x": X, "y": Y}, batch_size=[])

    assert count_rows(with_rows) == count_rows(without) == 5
    part = split_batch({"a": with_rows, "b": without}, 3)[1]
    assert torch.equal(part["a"]["n", "y"], Y[3:])
    assert torch.equal(part["b"]["x"], X[3:])
    storage = X.untyped_storage().data_ptr()
    assert part["a"]["x"].untyped_storage().data_ptr() == storage
    assert describe_batch(with_rows).shapes == ((3,), ())


def test_graph_batch_is_cut_by_graphs():
    """Graphs are renumbered, labels follow."""
    geometric = pytest.importorskip("torch_geometric.data")
    graphs = [
        geometric.Data(
            x=rows(n, 2) + n, edge_index=torch.tensor([[0], [n - 1]]), y=torch.tensor([n])
        )
        for n in (2, 3, 4)
    ]
    batch = {"graphs": geometric.Batch.from_data_list(graphs), "y": rows(3)}

    first, second = split_batch(batch, 2)

    assert [part["graphs"].num_graphs for part in (first, second)] == [2, 1]
    assert type(second["graphs"]) is type(batch["graphs"])
    assert torch.equal(second["graphs"].x, graphs[2].x)
    assert second["graphs"].edge_index.tolist() == [[0], [3]]
