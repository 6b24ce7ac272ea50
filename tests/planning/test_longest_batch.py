"""The longest batch of many kinds of data, with every random state where it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_oom.planning.light_batch import light_copy
from lightning_oom.planning.longest_batch import longest_batch, size_of

LENGTHS = [3, 9, 5, 7, 2, 8]


def pad(rows):
    """Pad to the longest."""
    return pad_sequence(list(rows), batch_first=True)


class Counted(Dataset):
    """Counts what is read; its lengths are known only where they are wanted."""

    def __init__(self, *, knows=False, size=6) -> None:
        self.read = []
        self.items = [LENGTHS[index % len(LENGTHS)] for index in range(size)]
        if knows:
            self.lengths = list(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        """Draw, as augmentations do."""
        self.read.append(index)
        random.random(), np.random.rand()  # noqa: NPY002, S311
        return torch.randn(self.items[index])


class Buckets:
    """A batch sampler of one's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        """Shuffle the batches."""
        batches = [[0, 4], [2, 3, 0], [1], [5, 1]]
        order = torch.randperm(len(batches), generator=self.generator)
        return iter([batches[number] for number in order])

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset):
    """Shows one after the other."""

    def __iter__(self):
        """Give three."""
        return iter([torch.zeros(4)] * 3)


class Data:
    """Like a data module."""

    def __init__(self) -> None:
        self.calls = []

    def prepare_data(self) -> None:
        """Note."""
        self.calls.append("prepare_data")

    def setup(self, stage) -> None:
        """Note."""
        self.calls.append(stage)

    def train_dataloader(self):
        """Give a list of sequences, shuffled."""
        items = [torch.zeros(length) for length in LENGTHS]
        return DataLoader(items, batch_size=2, collate_fn=pad, shuffle=True)


def test_a_list_of_sequences():
    """No item is read to know its length, however the loader shuffles."""
    data = Data()
    found = longest_batch(data)

    assert found.batch.shape == (2, 9)
    assert found.origin == "the 2 longest of 6 items"
    assert data.calls == ["prepare_data", "fit"]


def test_a_lengths_attribute_spares_reading():
    """Only the chosen items are read; through a subset too."""
    dataset = Counted(knows=True)
    assert longest_batch(DataLoader(dataset, batch_size=3, collate_fn=pad)).batch.shape == (3, 9)
    assert sorted(dataset.read) == [1, 3, 5]

    subset = Subset(Counted(knows=True), [0, 2, 4])
    assert longest_batch(DataLoader(subset, batch_size=1, collate_fn=pad)).batch.shape == (1, 5)


def test_unknown_lengths_are_read_up_to_a_bound():
    """A few items, spread over the data."""
    dataset = Counted(size=1000)
    found = longest_batch(DataLoader(dataset, batch_size=2, collate_fn=pad))

    assert found.batch.shape == (2, 9)
    assert len(dataset.read) == 64 + 2
    assert found.origin == "the 2 longest of 64 of 1000 items"


def test_a_batch_sampler_of_ones_own_is_passed_over():
    """Three of length 7 at most are more than two of length 9 at most."""
    loader = DataLoader(Counted(knows=True), batch_sampler=Buckets(), collate_fn=pad)
    found = longest_batch(loader)

    assert found.batch.shape == (3, 7)
    assert found.origin == "the largest of 4 batches"


def test_equal_items_streams_and_plain_batches():
    """The first ones."""
    equal = longest_batch(DataLoader(TensorDataset(torch.zeros(9, 4)), batch_size=4))
    assert equal.batch[0].shape == (4, 4)
    assert equal.origin == "the first items: all are of one length"
    assert longest_batch(DataLoader(Stream(), batch_size=2)).batch.shape == (2, 4)
    batch = {"x": torch.zeros(2)}
    assert longest_batch(batch).batch is batch


def test_no_random_state_moves():
    """Global ones, and the generators of loader and samplers: the next epoch is the same."""
    generator = torch.Generator().manual_seed(1)
    shuffled = DataLoader(
        Counted(), batch_size=2, collate_fn=pad, shuffle=True, generator=generator
    )
    own = DataLoader(Counted(knows=True), batch_sampler=Buckets(), collate_fn=pad)
    states = [g.get_state() for g in (generator, own.batch_sampler.generator)]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    longest_batch(shuffled)
    longest_batch(own)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002
    for now, then in zip((generator, own.batch_sampler.generator), states, strict=True):
        assert torch.equal(now.get_state(), then)


def test_data_that_break():
    """One line that names the source."""
    with pytest.raises(ValueError, match="DataLoader gives no batch: "):
        longest_batch(DataLoader(Counted(), batch_size=2))  # cannot be stacked


def test_a_light_copy_holds_shapes_and_small_whole_numbers():
    """What a dry run asks of a batch, and no storage of it."""
    from lightning_oom.planning.known_values import value_of

    batch = {"x": torch.randn(3, 2), "n": torch.tensor([2, 1, 0]), "name": "a"}
    copy = light_copy(batch, "meta")  # one that cannot be faked is taken for the CPU
    assert size_of(copy) == size_of(batch)
    assert copy["x"].device.type == "cpu"
    assert value_of(copy["n"]).tolist() == [2, 1, 0]
    assert value_of(copy["x"]) is None
