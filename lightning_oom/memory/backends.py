"""Readers for devices whose memory torch itself keeps account of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        self._peak_calls: dict[torch.device, tuple[Any, Any, Any]] = {}  # several times a step

    def read(self, device: torch.device) -> MemoryReading:
        """Return what the caching allocator and the driver say of ``device``."""
        module = getattr(torch, device.type, None)
        if not _is_in_use(module):
            # The allocator of this process holds nothing; to ask the driver would make a context.
            held = 0 if _ask(module, "is_available") else None
            return MemoryReading(
                device=f"{device.type}:{device.index or 0}",
                allocated_bytes=held,
                peak_allocated_bytes=held,
                reserved_bytes=held,
                peak_reserved_bytes=held,
            )
        device = _with_index(device, module)
        stats = _read_stats(device, module)
        free_bytes, total_bytes = _read_driver(device, module)
        reserved_bytes = stats(_RESERVED, "memory_reserved")
        return MemoryReading(
            device=str(device),
            allocated_bytes=stats(_ALLOCATED, "memory_allocated"),
            peak_allocated_bytes=stats(_PEAK_ALLOCATED, "max_memory_allocated"),
            reserved_bytes=reserved_bytes,
            peak_reserved_bytes=stats(_PEAK_RESERVED, "max_memory_reserved"),
            limit_bytes=_find_limit(
                total_bytes,
                free_bytes=free_bytes,
                reserved_bytes=reserved_bytes,
                cap_fraction=_ask(module, "get_per_process_memory_fraction", device),
            ),
            free_bytes=free_bytes,
            alloc_retries=stats(_RETRIES, None),
        )

    def read_peaks(self, device: torch.device) -> Peaks:
        """Return the peak counters of the allocator; the driver is not asked."""
        module = getattr(torch, device.type, None)
        return _read_peaks(device, module) if _is_in_use(module) else Peaks()

    def reset_peak(self, device: torch.device) -> None:
        """Reset the peak counters of the allocator."""
        module = getattr(torch, device.type, None)
        if _is_in_use(module):
            _reset_peak(device, module)

    def take_peaks(self, device: torch.device) -> Peaks:
        """Return the peak counters of the allocator, and reset them."""
        module = getattr(torch, device.type, None)
        known = self._peak_calls.get(device)
        if known is None or known[0] is not module:
            if not _is_in_use(module):
                return Peaks()
            known = module, *_peak_calls(device, module)
            if device.index is not None:
                self._peak_calls[device] = known
        _, read, reset = known
        peaks: Peaks = read()
        reset()
        return peaks

    def release_cached(self, device: torch.device) -> int | None:
        """Empty the cache of the allocator; return how much less is reserved."""
        module = getattr(torch, device.type, None)
        if not _is_in_use(module):
            return 0 if _ask(module, "is_available") else None
        device = _with_index(device, module)
        before = _read_stats(device, module)(_RESERVED, "memory_reserved")
        _ask(_first_with("empty_cache", device, module), "empty_cache")
        after = _read_stats(device, module)(_RESERVED, "memory_reserved")
        return None if before is None or after is None else max(before - after, 0)


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
    device = _with_index(device, module)
    stats = _ask(module, "memory_stats_as_nested_dict", device)
    if stats:  # on CUDA, the functions below are made of it and cost ten times as much
        return Peaks(
            allocated_bytes=_find_counter(stats, _PEAK_ALLOCATED),
            reserved_bytes=_find_counter(stats, _PEAK_RESERVED),
        )
    names = ("max_memory_allocated", "max_memory_reserved")
    peaks = [_ask(_first_with(name, device, module), name, device) for name in names]
    return Peaks(allocated_bytes=peaks[0], reserved_bytes=peaks[1])


def _peak_calls(
    device: torch.device, module: Any
) -> tuple[Callable[[], Peaks], Callable[[], None]]:
    """Return the calls that read and reset the peaks of a device in use, looked up once."""
    indexed = _with_index(device, module)
    stats = getattr(module, "memory_stats_as_nested_dict", None)
    reset = getattr(module, "reset_peak_memory_stats", None)

    def read_now() -> Peaks:
        try:
            found = stats(indexed)  # type: ignore[misc]  # not None: an error like any other
            allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
            return Peaks(allocated_bytes=allocated["peak"], reserved_bytes=reserved["peak"])
        except Exception:  # another form, or none: the slow way knows more
            return _read_peaks(indexed, module)

    def reset_now() -> None:
        try:
            reset(indexed)  # type: ignore[misc]  # as above
        except Exception:
            _reset_peak(indexed, module)

    return (
        (lambda: _read_peaks(indexed, module)) if stats is None else read_now,
        (lambda: _reset_peak(indexed, module)) if reset is None else reset_now,
    )


def _reset_peak(device: torch.device, module: Any) -> None:
    name = "reset_peak_memory_stats"
    _ask(_first_with(name, device, module), name, _with_index(device, module))


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
