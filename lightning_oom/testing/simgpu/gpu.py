"""Simulated GPUs for use without Lightning."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from lightning_oom.testing.simgpu.devices import DEVICE_TYPE, configure_devices, find_device
from lightning_oom.testing.simgpu.registration import install_backend
from lightning_oom.units import parse_bytes

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["SimulatedGPU"]


class SimulatedGPU:
    """Devices ``simgpu:0``, ``simgpu:1``, ... that compute on the CPU and run out of memory.

    Tensors on them are ordinary tensors with host and device kept apart: moving a batch or a model
    there allocates, freeing it gives memory back. Memory is accounted for as torch's CUDA caching
    allocator would, and past the limit ``torch.OutOfMemoryError`` is raised with CUDA's own message.
    ``torch.simgpu`` has the memory functions of ``torch.cuda``. Results are those of the CPU, random
    numbers included: the devices share the generator of the host.

    Args:
        limit: What each device can hold, in bytes or as text such as ``"64 MiB"``; above 0. ``None``
            never refuses.
        num_devices: How many devices there are, at least 1. Devices cannot be taken away again.
        expandable_segments: Model the allocator's ``expandable_segments:True``.

    Attributes:
        devices: The ``torch.device`` of each, in order.

    Raises:
        ValueError: An argument is outside its range.
        UnsupportedTorchError: torch before 2.10, or another package has taken torch's one slot for
            an outside device.

    Note:
        torch's slot is one for the whole process: the first object fills it, later ones set limits
        anew. Backward passes run on the calling thread. One stream; no workspaces of cuBLAS and the
        like; ``torch.compile`` and CUDA graphs are not there.

    Example:
        >>> import torch
        >>> with SimulatedGPU("64 MiB") as gpu:
        ...     x = torch.ones(1024, device=gpu.device)
        ...     assert torch.simgpu.memory_allocated() == 4096
        ...     torch.ones(17 * 2**20, device=gpu.device)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        torch.OutOfMemoryError: simgpu out of memory. Tried to allocate 68.00 MiB. ...
    """

    def __init__(
        self,
        limit: int | str | None = None,
        *,
        num_devices: int = 1,
        expandable_segments: bool = False,
    ) -> None:
        self.limit_bytes = None if limit is None else parse_bytes(limit)
        if self.limit_bytes == 0:
            raise ValueError(f"limit must be above 0, got {limit!r}")
        if num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {num_devices}")
        install_backend()
        gc.collect()  # tensors in dead cycles would still count
        configured = configure_devices(
            num_devices, limit_bytes=self.limit_bytes, expandable_segments=expandable_segments
        )
        self.devices = [torch.device(DEVICE_TYPE, device.index) for device in configured]

    @classmethod
    def enable(cls) -> torch.device:
        """Make ``simgpu:0`` exist, without a limit, and return it."""
        return cls().device

    @property
    def device(self) -> torch.device:
        """The first device."""
        return self.devices[0]

    def __enter__(self) -> Self:
        """Use the devices in a ``with`` block, after which they have no limit."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Lift the limits."""
        for device in self.devices:
            find_device(device).allocator.limit_bytes = None
