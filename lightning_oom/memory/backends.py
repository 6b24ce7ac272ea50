"""Readers for devices whose memory torch itself keeps account of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_oom.memory.peak_ledger import Peaks
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.memory.registry import DeviceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MPSReader", "TorchModuleReader", "current_device"]

_ALLOCATED = ("allocated_bytes", "all", "current")
_PEAK_ALLOCATED = ("allocated_bytes", "all", "peak")
_RESERVED = ("reserved_bytes", "all", "current")
_PEAK_RESERVED = ("reserved_bytes", "all", "peak")
_RETRIES = ("num_alloc_retries",)


class TorchModuleReader(DeviceReader):
    """Reads a device through ``torch.<type>``, or through ``torch.accelerator`` where that is it.

    CUDA (and ROCm), XPU and the simulated GPU have a module with the same function names; another
    backend is read with as many of them as it has. From torch 2.9 on, ``torch.accelerator`` answers
    for a backend whose module does not.
    """

    def __init__(self) -> None:
        self._in_use: dict[torch.device, _DeviceInUse] = {}  # asked several times a step

    def read(self, device: torch.device) -> MemoryReading:
        """Return what the caching allocator and the driver say of ``device``."""
        used = self._find(device)
        if used is None:
            # The allocator of this process holds nothing; to ask the driver would make a context.
            held = 0 if _ask(getattr(torch, device.type, None), "is_available") else None
            return MemoryReading(
                device=f"{device.type}:{device.index or 0}",
                allocated_bytes=held,
                peak_allocated_bytes=held,
                reserved_bytes=held,
                peak_reserved_bytes=held,
            )
        return used.read()

    def read_again(self, device: torch.device, before: MemoryReading) -> MemoryReading:
        """Ask the allocator alone; what the driver could still give is what it was, less what was taken."""
        used = self._find(device)
        return self.read(device) if used is None else used.read_again(before)

    def read_peaks(self, device: torch.device) -> Peaks:
        """Return the peak counters of the allocator; the driver is not asked."""
        used = self._find(device)
        return Peaks() if used is None else used.read_peaks()

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak counters of the allocator."""
        used = self._find(device)
        if used is not None:
            used.reset_peak()

    def take_peaks(self, device: torch.device) -> Peaks:
        """Return the peak counters of the allocator, and reset them."""
        used = self._find(device)
        return Peaks() if used is None else used.take_peaks()

    def release_cached(self, device: torch.device) -> int | None:
        """Empty the cache of the allocator; return how much less is reserved."""
        used = self._find(device)
        if used is None:
            return 0 if _ask(getattr(torch, device.type, None), "is_available") else None
        before = used.count().reserved_bytes
        _ask(_first_with("empty_cache", used.device, used.module), "empty_cache")
        after = used.count().reserved_bytes
        return None if before is None or after is None else max(before - after, 0)

    def _find(self, device: torch.device) -> _DeviceInUse | None:
        """Return the device, if this process has made a context on it."""
        module = getattr(torch, device.type, None)
        used = self._in_use.get(device)
        if used is None or used.module is not module:
            if not _is_in_use(module):
                return None
            used = _DeviceInUse(_with_index(device, module), module)
            if device.index is not None:
                self._in_use[device] = used
        return used


class _Counts(NamedTuple):
    """What an allocator counts; ``None`` for what it does not."""

    allocated_bytes: int | None
    peak_allocated_bytes: int | None
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    alloc_retries: int | None


class _DeviceInUse:
    """A device with a context, and the module that answers for it.

    Args:
        device: With its index.
        module: ``torch.<type>``, ``None`` where there is none.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self.module = module
        self._name = str(device)

    def read(self) -> MemoryReading:
        """Ask the allocator, and the driver."""
        counts = self.count()
        free_bytes, total_bytes = _read_driver(self.device, self.module)
        return MemoryReading(
            device=self._name,
            allocated_bytes=counts.allocated_bytes,
            peak_allocated_bytes=counts.peak_allocated_bytes,
            reserved_bytes=counts.reserved_bytes,
            peak_reserved_bytes=counts.peak_reserved_bytes,
            limit_bytes=_find_limit(
                total_bytes,
                free_bytes=free_bytes,
                reserved_bytes=counts.reserved_bytes,
                cap_fraction=_ask(self.module, "get_per_process_memory_fraction", self.device),
            ),
            free_bytes=free_bytes,
            alloc_retries=counts.alloc_retries,
        )

    def read_again(self, before: MemoryReading) -> MemoryReading:
        """Ask the allocator, and believe what the driver said before."""
        counts = self.count()
        free_bytes = before.free_bytes
        if free_bytes is not None and before.reserved_bytes and counts.reserved_bytes is not None:
            free_bytes = max(free_bytes + before.reserved_bytes - counts.reserved_bytes, 0)
        return MemoryReading(
            device=self._name,
            allocated_bytes=counts.allocated_bytes,
            peak_allocated_bytes=counts.peak_allocated_bytes,
            reserved_bytes=counts.reserved_bytes,
            peak_reserved_bytes=counts.peak_reserved_bytes,
            limit_bytes=before.limit_bytes,
            free_bytes=free_bytes,
            alloc_retries=counts.alloc_retries,
        )

    def count(self) -> _Counts:
        """Read all counters at once, in whichever form the backend has them."""
        try:
            stats = self.module.memory_stats_as_nested_dict(self.device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return _Counts(
                allocated["current"],
                allocated["peak"],
                reserved["current"],
                reserved["peak"],
                stats["num_alloc_retries"],
            )
        except Exception:  # another form, or none: the slow way knows more
            return self._count_slowly()

    def _count_slowly(self) -> _Counts:
        look_up = _read_stats(self.device, self.module)
        return _Counts(
            look_up(_ALLOCATED, "memory_allocated"),
            look_up(_PEAK_ALLOCATED, "max_memory_allocated"),
            look_up(_RESERVED, "memory_reserved"),
            look_up(_PEAK_RESERVED, "max_memory_reserved"),
            look_up(_RETRIES, None),
        )

    def read_peaks(self) -> Peaks:
        """Read the peaks alone, which is cheaper than all counters where they are not nested."""
        return _read_peaks(self.device, self.module)

    def take_peaks(self) -> Peaks:
        """Read the peaks and start them again."""
        try:
            stats = self.module.memory_stats_as_nested_dict(self.device)
            peaks = Peaks(
                stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["peak"]
            )
            self.module.reset_peak_memory_stats(self.device)
        except Exception:  # another form, or none
            peaks = _read_peaks(self.device, self.module)
            self.reset_peak()
        return peaks

    def reset_peak(self) -> None:
        """Start the peaks again."""
        try:
            self.module.reset_peak_memory_stats(self.device)
        except Exception:  # not there, or broken: torch.accelerator may have it
            name = "reset_peak_memory_stats"
            _ask(_first_with(name, self.device, self.module), name, self.device)


class MPSReader(DeviceReader):
    """Reads Apple's GPU, which has no peak and shares the memory of the host."""

    def read(self, device: torch.device) -> MemoryReading:
        """Return what Metal says of the process."""
        module = torch.mps if torch.backends.mps.is_available() else None
        return MemoryReading(
            device="mps:0",
            allocated_bytes=_ask(module, "current_allocated_memory"),
            reserved_bytes=_ask(module, "driver_allocated_memory"),
            limit_bytes=_ask(module, "recommended_max_memory"),
        )

    def release_cached(self, device: torch.device) -> int | None:
        """Empty the cache; return how much less the driver has allocated."""
        if not torch.backends.mps.is_available():
            return None
        before = _ask(torch.mps, "driver_allocated_memory")
        _ask(torch.mps, "empty_cache")
        after = _ask(torch.mps, "driver_allocated_memory")
        return None if before is None or after is None else max(before - after, 0)


def current_device(device_type: str) -> str:
    """Name the current device of a type, without making a context."""
    module = getattr(torch, device_type, None)
    index = _ask(module, "current_device") if _is_in_use(module) else 0
    return f"{device_type}:{index or 0}"


def _ask(module: Any, name: str, *args: Any) -> Any:
    """Call ``module.name``; ``None`` where it is missing or the backend cannot answer."""
    function = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(*args)
    except Exception:  # whatever a backend raises: it cannot tell
        return None


def _is_in_use(module: Any) -> bool:
    """Say whether the backend is there and this process has already made a context on it."""
    if module is None:
        return False
    if hasattr(module, "is_initialized"):
        return bool(_ask(module, "is_initialized"))
    return _ask(module, "is_available") is not False


def _with_index(device: torch.device, module: Any) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, _ask(module, "current_device") or 0)


def _first_with(name: str, device: torch.device, module: Any) -> Any:
    """Return the module of the device, or ``torch.accelerator``, whichever has ``name``."""
    if hasattr(module, name):
        return module
    accelerator = getattr(torch, "accelerator", None)
    current = _ask(accelerator, "current_accelerator")
    return accelerator if current is not None and current.type == device.type else None


def _read_stats(
    device: torch.device, module: Any
) -> Callable[[tuple[str, ...], str | None], int | None]:
    """Read all counters at once; return a look-up by counter, or else by function name."""
    stats = _ask(module, "memory_stats_as_nested_dict", device)
    if stats is None:
        stats = _ask(_first_with("memory_stats", device, module), "memory_stats", device)

    def look_up(counter: tuple[str, ...], function: str | None) -> int | None:
        number = _find_counter(stats or {}, counter)
        if number is None and function is not None:
            number = _ask(_first_with(function, device, module), function, device)
        return None if number is None else int(number)

    return look_up


def _find_counter(stats: Mapping[str, Any], counter: tuple[str, ...]) -> Any:
    found: Any = stats
    try:
        for key in counter:
            found = found[key]
    except (KeyError, TypeError):
        return stats.get(".".join(counter))  # the flat form
    return found


def _read_peaks(device: torch.device, module: Any) -> Peaks:
    stats = _ask(module, "memory_stats_as_nested_dict", device)
    if stats:  # on CUDA, the functions below are made of it and cost ten times as much
        return Peaks(
            allocated_bytes=_find_counter(stats, _PEAK_ALLOCATED),
            reserved_bytes=_find_counter(stats, _PEAK_RESERVED),
        )
    names = ("max_memory_allocated", "max_memory_reserved")
    peaks = [_ask(_first_with(name, device, module), name, device) for name in names]
    return Peaks(allocated_bytes=peaks[0], reserved_bytes=peaks[1])


def _read_driver(device: torch.device, module: Any) -> tuple[int | None, int | None]:
    answer = _ask(module, "mem_get_info", device)
    if answer is None:
        answer = _ask(_first_with("get_memory_info", device, None), "get_memory_info", device)
    return (None, None) if answer is None else (int(answer[0]), int(answer[1]))


def _find_limit(
    total_bytes: int | None,
    *,
    free_bytes: int | None,
    reserved_bytes: int | None,
    cap_fraction: float | None,
) -> int | None:
    if total_bytes is None:
        return None
    limit_bytes = int(total_bytes * cap_fraction) if cap_fraction is not None else total_bytes
    if free_bytes is not None and reserved_bytes is not None:
        limit_bytes = min(limit_bytes, free_bytes + reserved_bytes)
    return limit_bytes
