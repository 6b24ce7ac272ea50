"""A byte limit on any device: torch runs out of memory where the test says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_oom._torch import OutOfMemoryError, tree_leaves
from lightning_oom.memory.allocations import AllocationWatcher, storages_in
from lightning_oom.testing.active import CappedLimit, MemoryLimit, can_cap, is_there
from lightning_oom.testing.messages import cuda_oom_message
from lightning_oom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

__all__ = ["MemoryLimit", "memory_limit"]


def memory_limit(limit: int | str, *, device: torch.device | str | None = None) -> MemoryLimit:
    """Let a device run out of memory at ``limit`` bytes for the length of a ``with`` block.

    On the CPU and on any device without an allocator that takes a cap, the storages that torch
    makes in the block are counted, and one too many raises :class:`torch.OutOfMemoryError` with
    the text of CUDA's. On CUDA and XPU the real allocator is capped. It works around a whole ``trainer.fit``: backward passes, foreach optimizers, autocast, checkpointing
    and data loader workers (in which it never raises) included.

    Args:
        limit: The limit, as bytes or as text such as ``"64 MiB"``; above 0.
        device: The device to limit. ``None`` takes the current CUDA device if there is one, else
            the CPU.

    Returns:
        The limit, to be entered once. Its ``live_bytes``, ``peak_bytes`` and ``num_refused`` can
        also be read after the block.

    Raises:
        ValueError: ``limit`` is no amount of memory, is 0, or is more than a capped device has; the
            device is not there.

    Note:
        What was made before the block counts only once it is given to
        :meth:`MemoryLimit.register` (where the real allocator is capped it counts anyway). While
        the block is active, :func:`lightning_oom.memory.read_memory` reports the limit for this
        device. Counting costs about as much as an empty dispatch mode, some 10 us per operator;
        memory that an operator allocates and frees within itself is not seen, and other Python
        threads are not limited. Where storages are counted, the operator has run before it is
        refused: the machine needs a little more than ``limit``.

    Example:
        >>> import torch
        >>> with memory_limit("1 MiB", device="cpu") as limit:
        ...     small = torch.zeros(1024)
        ...     try:
        ...         torch.zeros(1024, 1024)
        ...     except RuntimeError as error:
        ...         print(str(error).split(" GPU")[0])
        CUDA out of memory. Tried to allocate 4.00 MiB.
        >>> limit.peak_bytes, limit.live_bytes, limit.num_refused
        (4096, 4096, 1)
    """
    limit_bytes = parse_bytes(limit)
    if limit_bytes < 1:
        raise ValueError(f"a memory limit is above 0 bytes, got {limit!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if not is_there(device):
        raise ValueError(f"{device} is not available on this machine: name another device")
    if can_cap(device):
        return CappedLimit(limit_bytes, device)
    return WatchedLimit(limit_bytes, device)


class WatchedLimit(MemoryLimit):
    """A limit on the storages that torch makes, counted one by one."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__(limit_bytes, device)
        self._watcher = _LimitWatcher(limit_bytes, device)

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are alive."""
        return self._watcher.ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once, in the block or since :meth:`reset_peak`."""
        return self._watcher.update_peak()

    @property
    def num_refused(self) -> int:
        """How many allocations were refused."""
        return self._watcher.num_refused

    def register(self, *objects: Any) -> int:
        """Count what existed before the block."""
        before = self.live_bytes
        for tensor in _tensors_in(objects):
            for storage in storages_in(tensor, self._watcher):
                self._watcher.ledger.add(storage)
        self._watcher.update_peak()
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self._watcher.peak_bytes = self.live_bytes

    def _start(self, undo: ExitStack) -> None:
        undo.enter_context(self._watcher)


class _LimitWatcher(AllocationWatcher):
    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__(device=device)
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.num_refused = 0

    def update_peak(self) -> int:
        self.peak_bytes = max(self.peak_bytes, self.ledger.live_bytes)
        return self.peak_bytes

    def refuses(self, operator: Any, num_bytes: int) -> bool:
        live_bytes = self.ledger.live_bytes
        if live_bytes > self.limit_bytes:
            self.num_refused += 1
            return True
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        return False

    def make_error(self, operator: Any, num_bytes: int) -> BaseException:
        assert self.device is not None  # noqa: S101 - the constructor takes no None
        return OutOfMemoryError(
            cuda_oom_message(
                requested_bytes=num_bytes,
                limit_bytes=self.limit_bytes,
                live_bytes=self.ledger.live_bytes,
                device_index=self.device.index or 0,
                remark=f"memory_limit of {format_bytes(self.limit_bytes)} on {self.device}, "
                f"operator {operator}",
            )
        )


def _tensors_in(objects: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(objects):
        if isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
            yield from (p.grad for p in leaf.parameters() if p.grad is not None)
        elif isinstance(leaf, torch.optim.Optimizer):
            yield from _tensors_in(list(leaf.state.values()))
        elif isinstance(leaf, torch.Tensor):
            yield leaf
