"""The storages behind tensors: what memory counts, each one once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import sparse_parts
from lightning_oom.memory.blocks import ROUND_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["StorageCount", "strided_parts"]

_EXACT_TYPES = frozenset({"cpu", "mps", "meta"})


class StorageCount:
    """Adds up the storages of tensors on one device and counts none of them twice.

    Args:
        device: Only tensors there count.

    Note:
        On devices with a caching allocator a storage counts as the block that it occupies: rounded
        up to 512 bytes.

    Example:
        >>> import torch
        >>> x = torch.zeros(256)
        >>> count = StorageCount(torch.device("cpu"))
        >>> count.add([x, x[3:]]), count.add([x])
        (1024, 0)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._round_bytes = 1 if device.type in _EXACT_TYPES else ROUND_BYTES
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[Any]) -> int:
        """Count storages that were not counted before; return their bytes.

        Args:
            tensors: Tensors of any layout; anything else is passed over.
        """
        return sum(
            self._add_part(part)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
            for part in strided_parts(tensor)
        )

    def _add_part(self, tensor: torch.Tensor) -> int:
        if not self._is_here(tensor.device):
            return 0
        try:
            storage = tensor.untyped_storage()
            address, num_bytes = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # no storage of its own
            return 0
        if not num_bytes or not address or address in self._seen:
            return 0
        self._seen.add(address)
        return -(-num_bytes // self._round_bytes) * self._round_bytes

    def _is_here(self, device: torch.device) -> bool:
        return device.type == self._device.type and (
            self._device.index is None or (device.index or 0) == self._device.index
        )


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the strided tensors that hold the numbers of a tensor: itself, for most.

    Args:
        tensor: A strided or sparse tensor, or one of a class that wraps others (``DTensor``).
    """
    parts = sparse_parts(tensor)
    if parts:
        yield from parts
        return
    names = _wrapped_names(tensor)
    if not names:
        yield tensor
    for name in names:
        inner = getattr(tensor, name, None)
        if isinstance(inner, torch.Tensor):
            yield from strided_parts(inner)


def _wrapped_names(tensor: Any) -> list[str]:
    """Return the attributes of a wrapper subclass that hold its tensors."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    try:
        return list(flatten()[0])
    except Exception:  # a class with another idea of it counts as one tensor
        return []
