"""A limit while it is active, and the kind that caps the real allocator of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.memory import DeviceReader, MemoryReading, register_reader
from lightning_oom.memory.devices import reader_of
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CappedLimit", "MemoryLimit", "can_cap", "is_there"]

_NEEDED = (
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)


class MemoryLimit(ABC):
    """A limit on the memory of one device, active inside a ``with`` block.

    Made by :func:`memory_limit`.

    Attributes:
        limit_bytes: The limit.
        device: The device that it limits.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes = limit_bytes
        self.device = device
        self._undo: ExitStack | None = None

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes that are alive on the device and count."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was alive at once, in the block or since :meth:`reset_peak`."""

    @property
    @abstractmethod
    def num_refused(self) -> int:
        """How many allocations were refused."""

    @abstractmethod
    def register(self, *objects: Any) -> int:
        """Count what existed before the block; return the bytes that were not counted yet.

        Args:
            objects: Modules (their parameters, gradients and buffers), optimizers (their state),
                tensors, or any nesting of these.
        """

    @abstractmethod
    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""

    @abstractmethod
    def _start(self, undo: ExitStack) -> None:
        """Let the limit act, and push what ends it."""

    def __enter__(self) -> Self:
        """Let the limit act from here on."""
        if self._undo is not None:
            raise RuntimeError(f"this limit on {self.device} is already active: make another")
        with ExitStack() as undo:
            undo.callback(register_reader(self.device.type, _LimitReader(self)))
            self._start(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_details: object) -> None:
        """Take the limit away and put back what was there before."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


class CappedLimit(MemoryLimit):
    """A limit that the allocator of the device keeps itself."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__(limit_bytes, device)
        self._module = getattr(torch, device.type)
        total_bytes = self._module.mem_get_info(device)[1]
        if limit_bytes > total_bytes:
            raise ValueError(
                f"a limit of {format_bytes(limit_bytes)} is more than the "
                f"{format_bytes(total_bytes)} of {device}"
            )
        self._fraction = limit_bytes / total_bytes
        self._refused_before = 0
        self._final: tuple[int, int] | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes that the allocator has given to tensors."""
        return int(self._module.memory_allocated(self.device))

    @property
    def peak_bytes(self) -> int:
        """The most that tensors had at once."""
        if self._final is not None:
            return self._final[0]
        return int(self._module.max_memory_allocated(self.device))

    @property
    def num_refused(self) -> int:
        """How many out-of-memory errors the allocator has raised."""
        if self._final is not None:
            return self._final[1]
        return self._read_refused() - self._refused_before

    def register(self, *objects: Any) -> int:
        """Do nothing: the allocator counts whatever it has given out."""
        return 0

    def reset_peak(self) -> None:
        """Reset the peak counters of the allocator."""
        self._module.reset_peak_memory_stats(self.device)

    def _start(self, undo: ExitStack) -> None:
        self._module.empty_cache()  # what is cached would count against the cap
        get_fraction = getattr(self._module, "get_per_process_memory_fraction", None)
        before = 1.0 if get_fraction is None else get_fraction(self.device)
        self._module.set_per_process_memory_fraction(self._fraction, self.device)
        undo.callback(self._module.set_per_process_memory_fraction, before, self.device)
        self.reset_peak()
        self._final, self._refused_before = None, self._read_refused()
        undo.callback(self._remember)

    def _remember(self) -> None:
        self._final = (self.peak_bytes, self.num_refused)

    def _read_refused(self) -> int:
        return int(self._module.memory_stats(self.device).get("num_ooms", 0))


class _LimitReader(DeviceReader):
    """Reports an active limit in the readings of its device."""

    def __init__(self, limit: MemoryLimit) -> None:
        self._limit = limit

    def covers(self, device: torch.device) -> bool:
        mine = self._limit.device.index
        return mine is None or device.index is None or mine == device.index

    def read(self, device: torch.device) -> MemoryReading:
        limit = self._limit
        below = reader_of(device, below=self).read(device)
        live_bytes, limit_bytes = limit.live_bytes, limit.limit_bytes
        if isinstance(limit, CappedLimit):
            cap_bytes = min(limit_bytes, below.limit_bytes or limit_bytes)
            return replace(below, limit_bytes=cap_bytes)
        return MemoryReading(
            device=below.device,
            allocated_bytes=live_bytes,
            peak_allocated_bytes=limit.peak_bytes,
            limit_bytes=limit_bytes,
            free_bytes=max(limit_bytes - live_bytes, 0),
        )

    def reset_peak(self, device: torch.device) -> None:
        self._limit.reset_peak()

    def release_cached(self, device: torch.device) -> int | None:
        return reader_of(device, below=self).release_cached(device)


def is_there(device: torch.device) -> bool:
    """Say whether this machine has devices of the type of ``device``."""
    if device.type == "cpu":
        return True
    module = getattr(torch, device.type, None)
    return module is not None and bool(getattr(module, "is_available", lambda: True)())


def can_cap(device: torch.device) -> bool:
    """Say whether the allocator of ``device`` takes a cap and keeps the counters for it."""
    module = getattr(torch, device.type, None)
    return device.type not in ("cpu", "mps") and all(hasattr(module, name) for name in _NEEDED)
