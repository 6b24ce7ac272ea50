"""Notice storages that grow or shrink in place, which no operator's result shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_oom._torch import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ResizeListener", "TensorGeometry", "notice_resizes", "written_tensors"]


class ResizeListener(Protocol):
    """Who wants to hear of storages that were resized in place."""

    def saw_resize(self, storage: torch.UntypedStorage, bytes_before: int) -> bool:
        """Count the storage as it is now; say whether it must not be."""

    def make_error(self, operator: Any, num_bytes: int) -> BaseException:
        """Make the error for a resize that was taken back."""


_listeners: list[ResizeListener] = []


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """A tensor, its storage and how it lay in it before an operator that may resize it."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    num_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorGeometry:
        """Remember ``tensor`` as it is now."""
        storage = tensor.untyped_storage()
        return cls(
            tensor,
            storage,
            storage.nbytes(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    def put_back(self) -> None:
        """Give the tensor its former shape, and the storage its former bytes."""
        with torch.no_grad():
            self.tensor.set_(self.storage, self.offset, self.shape, self.stride)
        resize_storage(self.storage, self.num_bytes)


def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Resize ``storage`` without telling the listeners."""
    super(torch.UntypedStorage, storage).resize_(num_bytes)


def notice_resizes(listener: ResizeListener) -> Callable[[], None]:
    """Tell ``listener`` of each ``UntypedStorage.resize_`` in this process.

    ``resize_`` of a storage is no operator, so a dispatch mode cannot see it. The method is
    shadowed on ``torch.UntypedStorage``, which only inherits it, while there is a listener.

    Returns:
        A function that ends it, and takes the shadow off with the last listener.
    """
    _listeners.append(listener)
    if len(_listeners) == 1:
        torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment] # a shadow, undone below

    def stop() -> None:
        _listeners.remove(listener)
        if not _listeners:
            del torch.UntypedStorage.resize_

    return stop


def _resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    bytes_before = storage.nbytes()
    resize_storage(storage, num_bytes)
    refusing = [heard for heard in tuple(_listeners) if heard.saw_resize(storage, bytes_before)]
    if refusing:
        resize_storage(storage, bytes_before)
        for heard in tuple(_listeners):
            heard.saw_resize(storage, num_bytes)
        raise refusing[0].make_error("UntypedStorage.resize_", num_bytes - bytes_before)
    return storage


def written_tensors(
    writes: Iterable[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Collect the strided tensors among the arguments at ``writes``."""
    values = [
        args[position] if position < len(args) else kwargs.get(name) for position, name in writes
    ]
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
