"""Looking at a batch and copying its containers leaves its leaves alone."""

from __future__ import annotations

import torch
from batch_cases import (
    Graphs,
    Pair,
    Sample,
    X,
    Y,
)
from torch.nn.utils.rnn import pack_sequence

from lightning_oom.recovery.batches import (
    batch_tensors,
    copy_containers,
)


def test_copied_containers_share_their_leaves():
    """What user code pops from a batch is still in the copy; the tensors are the same objects."""
    batch = {"x": X, "y": [Y, {"z": X}], "pair": Pair(X, Y), "s": Sample(X, ["a"]), "set": {1}}

    copied = copy_containers(batch)
    batch["y"][1].pop("z")
    batch["s"].name.append("b")
    batch["set"].add(2)
    del batch["x"]

    assert copied["x"] is X
    assert copied["y"][1]["z"] is X
    assert copied["pair"].y is Y
    assert copied["s"].name == ["a"]
    assert copied["set"] == {1}


def test_batch_tensors_lists_every_tensor_in_order():
    """Also those without rows, of packed sequences and of unknown types."""
    scale = torch.tensor(2.0)
    packed = pack_sequence([X[0], X[1]])

    tensors = batch_tensors({"a": [X, "text", scale], "p": packed, "g": Graphs({"n": Y})})

    assert [id(t) for t in tensors] == [id(X), id(scale), id(packed[0]), id(packed[1]), id(Y)]
