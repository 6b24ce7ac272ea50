"""The batch of a step: its containers are copied, its tensors are watched."""

from __future__ import annotations

from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.batches import batch_tensors, copy_containers
from lightning_oom.recovery.batches.containers import batch_iterators
from lightning_oom.recovery.snapshot.copies import same_values, versions_of, write_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

__all__ = ["BatchContainers", "SavedBatch"]


class BatchContainers:
    """The containers of a batch, so that a retry sees what user code popped or replaced.

    Tensors are shared, not copied. One that the step writes to in place (``batch["image"].div_(255)``)
    cannot be given back and is reported as lost, unless ``copy_tensors`` keeps its values in host
    memory.

    Args:
        batch: The batch as the loop hands it over.
        copy_tensors: Keep the values of every tensor in host memory. Meant for a step that is known
            (:meth:`SavedBatch.moved`) to write to its batch.

    Note:
        Cost: 9 us for a dictionary of three tensors; with ``copy_tensors`` one copy of the batch to
        the host, which synchronises. Writes through ``.data`` and numpy aliases are not seen.

    Example:
        >>> import torch
        >>> batch = {"x": torch.zeros(2), "y": torch.ones(2)}
        >>> saved = BatchContainers(batch).take()
        >>> _ = batch.pop("y")
        >>> saved.restore()
        ()
        >>> sorted(saved.fresh())
        ['x', 'y']
    """

    def __init__(self, batch: Any, *, copy_tensors: bool = False) -> None:
        self._batch = batch
        self._copy_tensors = copy_tensors

    def take(self) -> SavedBatch:
        """Copy the containers and read the tensors' versions."""
        tensors = batch_tensors(self._batch)
        copies = None
        if self._copy_tensors:
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return SavedBatch(copy_containers(self._batch), tensors, versions_of(tensors), copies)


class SavedBatch:
    """A batch as the loop handed it over."""

    __slots__ = ("_containers", "_copies", "_tensors", "_versions")

    def __init__(
        self,
        containers: Any,
        tensors: list[torch.Tensor],
        versions: list[int | None],
        copies: list[torch.Tensor] | None,
    ) -> None:
        self._containers, self._tensors = containers, tensors
        self._versions, self._copies = versions, copies

    def fresh(self) -> Any:
        """Return the batch in new containers; the tensors are those of the batch itself."""
        return copy_containers(self._containers)

    def moved(self) -> tuple[str, ...]:
        """Name the tensors that were written to in place since."""
        now = versions_of(self._tensors)
        return tuple(
            f"batch tensor {i} {tuple(tensor.shape)}"
            for i, (tensor, a, b) in enumerate(zip(self._tensors, self._versions, now, strict=True))
            if a != b
        )

    def restore(self) -> tuple[str, ...]:
        """Give the tensors their values back where those were kept.

        Returns:
            Names of tensors that were written to in place and were not kept, and of iterators that
            may be spent.
        """
        spent = tuple(_spent(batch_iterators(self._containers)))
        if self._copies is None:
            return (*self.moved(), *spent)
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if not same_values(tensor, copy):
                write_back(tensor, copy)
        return spent


def _spent(iterators: Iterable[Any]) -> Iterator[str]:
    """Name the iterators that a step may have gone through; only a generator can tell."""
    for iterator in iterators:
        fresh = isinstance(iterator, GeneratorType) and getgeneratorstate(iterator) == GEN_CREATED
        if not fresh:
            yield f"batch {type(iterator).__name__}, which can be gone through only once"
