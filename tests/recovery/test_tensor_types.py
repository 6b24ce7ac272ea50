"""Tensors of every layout, and packed sequences, are cut along their rows."""

from __future__ import annotations

import pytest
import torch
from batch_cases import (
    Y,
    rows,
)
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from lightning_oom.errors import BatchSplitError
from lightning_oom.recovery.batches import (
    split_batch,
)


@pytest.fixture(autouse=True)
def _compiler_cache(monkeypatch, tmp_path):
    """The first jagged tensor of a process makes torch name its compiler cache in the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_packed_sequence_is_cut_in_the_order_of_the_batch():
    """Rows of a packed sequence follow the other leaves, whatever order it is packed in."""
    sequences = [torch.arange(n) + 10 * n for n in (3, 5, 2, 5, 1)]
    batch = {"packed": pack_sequence(sequences, enforce_sorted=False), "y": Y}

    parts = split_batch(batch, 2)

    unpacked = []
    for part in parts:
        padded, lengths = pad_packed_sequence(part["packed"], batch_first=True)
        assert len(lengths) == len(part["y"])
        unpacked += [row[:n] for row, n in zip(padded, lengths, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(sequences, unpacked, strict=True))


def test_sorted_packed_sequence_is_cut():
    """A sequence that was packed sorted needs no order."""
    sequences = [torch.arange(n) for n in (4, 2, 1)]

    parts = split_batch(pack_sequence(sequences), 1)

    assert [pad_packed_sequence(p)[1].tolist() for p in parts] == [[4], [2], [1]]
    assert torch.equal(parts[1].data, sequences[1])


def test_jagged_tensor_is_cut_as_views():
    """Values of a jagged tensor are views; its rows are whole."""
    pieces = [rows(n, 2) for n in (2, 3, 1)]
    batch = {"j": torch.nested.nested_tensor(pieces, layout=torch.jagged), "y": rows(3)}

    parts = split_batch(batch, 2)

    cut = [piece for part in parts for piece in part["j"].unbind()]
    assert all(torch.equal(a, b) for a, b in zip(pieces, cut, strict=True))
    storage = batch["j"].values().untyped_storage().data_ptr()
    assert all(part["j"].values().untyped_storage().data_ptr() == storage for part in parts)


def test_jagged_tensor_with_gaps_is_cut():
    """A jagged view with lengths keeps them."""
    padded = rows(4, 5)
    jagged = torch.nested.narrow(
        padded, 1, torch.zeros(4).long(), torch.tensor([3, 1, 5, 2]), layout=torch.jagged
    )

    parts = split_batch(jagged, 3)

    cut = [piece for part in parts for piece in part.unbind()]
    assert [len(piece) for piece in cut] == [3, 1, 5, 2]
    assert all(torch.equal(piece, padded[i, : len(piece)]) for i, piece in enumerate(cut))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_tensor_is_cut():
    """Nested tensors of the older layout are cut too, by a copy."""
    pieces = [rows(n, 2) for n in (2, 3, 1)]

    parts = split_batch({"n": torch.nested.nested_tensor(pieces), "y": rows(3)}, 2)

    cut = [piece for part in parts for piece in part["n"].unbind()]
    assert all(torch.equal(a, b) for a, b in zip(pieces, cut, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensor_is_cut(layout):
    """Rows of a sparse tensor are cut without making it dense."""
    dense = torch.eye(5, 4) * rows(5, 1)
    sparse = dense.to_sparse(layout=layout)

    parts = split_batch({"s": sparse, "y": Y}, 2)

    assert all(part["s"].layout is layout for part in parts)
    assert torch.equal(torch.cat([part["s"].to_dense() for part in parts]), dense)


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta state")
def test_layout_without_rows_is_refused():
    """A layout that has no rows to take says so."""
    with pytest.raises(BatchSplitError, match=r"layout torch\.sparse_csc cannot be cut"):
        split_batch(torch.eye(4).to_sparse_csc(), 2)
