"""The batch that needs most, found without training and without moving any random state."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from lightning_oom.planning.clone_run import isolated_randomness
from lightning_oom.planning.skeleton import Skeleton

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FoundBatch", "longest_batch", "size_of"]

_MOST_BATCHES = 20_000
_MOST_READ = 64


class FoundBatch(NamedTuple):
    """A batch with where it comes from.

    Attributes:
        batch: As the module gets it, on the CPU where it was made here.
        origin: In words.
    """

    batch: Any
    origin: str


def longest_batch(source: Any) -> FoundBatch:
    """Find the batch of a data loader that needs most memory, or take a batch as it is.

    Where lengths of items are known (a ``lengths`` attribute of the dataset, a dataset that is a list
    or tuple), a batch of the longest items is made: as many as the loader takes. A batch sampler of
    one's own is passed over once, its lists of indices only, and the list with the largest product
    of items and longest length is taken. Otherwise up to 64 items, spread evenly, are read and the
    longest of them taken. Random states and generators are put back.

    Args:
        source: A DataLoader, something with ``train_dataloader()`` (which is prepared and set up
            first, as Lightning does), or a batch.

    Returns:
        The batch.

    Raises:
        ValueError: The loader gives no batch; one line.

    Note:
        An iterable dataset shows its first batch only. Items are read in this process.

    Example:
        >>> items = [torch.zeros(n) for n in (3, 9, 5, 7)]
        >>> pad = torch.nn.utils.rnn.pad_sequence
        >>> loader = DataLoader(items, batch_size=2, collate_fn=lambda rows: pad(rows, True))
        >>> found = longest_batch(loader)
        >>> found.batch.shape, found.origin
        (torch.Size([2, 9]), 'the 2 longest of 4 items')
    """
    loader = _loader_of(source)
    if loader is None:
        return FoundBatch(source, "the batch as given")
    try:
        with _untouched_generators(loader), isolated_randomness():
            return _from_loader(loader)
    except Exception as error:
        raise ValueError(
            f"{type(source).__name__} gives no batch: {type(error).__name__}: {error}"
        ) from error


def size_of(value: Any) -> int:
    """Return how much there is in an item or batch: elements of tensors, entries of lists.

    Example:
        >>> size_of({"ids": [4, 5, 6], "label": 1, "picture": torch.zeros(3, 8, 8)})
        196
    """
    if isinstance(value, (int, float, str, bytes)) or value is None:
        return len(value) if isinstance(value, (str, bytes)) else 1
    if isinstance(value, dict):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value)
    if hasattr(value, "numel") or hasattr(value, "size"):
        size = value.numel() if hasattr(value, "numel") else value.size
        return int(size) if isinstance(size, int) else 1
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    Skeleton(add).value(value)
    return total


def _loader_of(source: Any) -> Any:
    if isinstance(source, DataLoader):
        return source
    if not callable(getattr(source, "train_dataloader", None)):
        return None
    if not isinstance(source, torch.nn.Module):
        source.prepare_data()
        source.setup("fit")
    return source.train_dataloader()


def _from_loader(loader: Any) -> FoundBatch:
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        return FoundBatch(next(iter(loader)), "the first batch")
    num_items = len(loader.dataset)  # type: ignore[arg-type] # no iterable one
    sizes = _known_sizes(loader.dataset)
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return _of_own_batch_sampler(loader, sizes)
    rows = loader.batch_size or 1
    if sizes is None:
        positions = _spread(num_items, max(_MOST_READ, rows))
        read = {position: size_of(loader.dataset[position]) for position in positions}
        what = (
            f"{len(read)} of {num_items} items" if len(read) < num_items else f"{num_items} items"
        )
        sizes = read
    else:
        what = f"{num_items} items"
    longest = sorted(sizes, key=lambda position: -sizes[position])[:rows]
    if len(set(sizes.values())) == 1:
        longest, origin = sorted(longest), "the first items: all are of one length"
    else:
        origin = f"the {len(longest)} longest of {what}"
    return FoundBatch(_collate(loader, longest), origin)


def _of_own_batch_sampler(loader: DataLoader[Any], sizes: dict[int, int] | None) -> FoundBatch:
    lists = [list(indices) for indices in islice(loader.batch_sampler or (), _MOST_BATCHES)]
    known = sizes or {}
    largest = max(lists, key=lambda indices: len(indices) * max(known.get(i, 1) for i in indices))
    return FoundBatch(_collate(loader, largest), f"the largest of {len(lists)} batches")


def _collate(loader: DataLoader[Any], positions: Sequence[int]) -> Any:
    if loader.batch_sampler is None:  # items are batches
        return loader.collate_fn(loader.dataset[positions[0]])
    return loader.collate_fn([loader.dataset[position] for position in positions])


def _known_sizes(dataset: Any) -> dict[int, int] | None:
    """Return position -> size where that is known without reading."""
    if isinstance(dataset, Subset):
        inner = _known_sizes(dataset.dataset)
        if inner is None:
            return None
        return {position: inner[index] for position, index in enumerate(dataset.indices)}
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None and hasattr(lengths, "__len__") and len(lengths) == len(dataset):
        return {position: int(length) for position, length in enumerate(lengths)}
    if type(dataset) in (list, tuple):
        return {position: size_of(item) for position, item in enumerate(dataset)}
    return None


def _spread(num_items: int, most: int) -> list[int]:
    count = min(num_items, most)
    return sorted({number * num_items // count for number in range(count)})


@contextmanager
def _untouched_generators(loader: Any) -> Iterator[None]:
    """Put the states of the generators back that a loader and its samplers draw from."""
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
