"""The module ``torch.simgpu``: what ``torch.cuda`` offers, for the simulated devices."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.testing.simgpu.devices import (
    DEVICE_TYPE,
    all_devices,
    current_index,
    find_device,
    num_devices,
    set_current_index,
)
from lightning_oom.testing.simgpu.statistics import collect_stats, format_summary

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["make_backend_module"]

DeviceLike = torch.device | int | str | None


def _find(device: DeviceLike) -> Any:
    return find_device(torch.device(device) if isinstance(device, str) else device)


def is_available() -> bool:
    """Say whether there is a device; there is at least one once the backend is installed."""
    return num_devices() > 0


def is_initialized() -> bool:
    """Say whether the backend is ready; it is from its installation on."""
    return True


def init() -> None:
    """Do nothing: the backend is ready."""


def device_count() -> int:
    """Count the devices."""
    return num_devices()


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return current_index()


def set_device(device: DeviceLike) -> None:
    """Make ``device`` the current device of this thread."""
    set_current_index(_find(device).index)


def get_device_name(device: DeviceLike = None) -> str:
    """Return a name to show."""
    return f"Simulated GPU {_find(device).index}"


def synchronize(device: DeviceLike = None) -> None:
    """Do nothing but check the device: every operator has finished when it returns."""
    _find(device)


class device:  # noqa: N801 - torch.cuda.device is spelled so
    """Make a device the current one inside a ``with`` block."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = None if device is None else _find(device).index

    def __enter__(self) -> None:
        self.previous = current_index()
        if self.index is not None:
            set_current_index(self.index)

    def __exit__(self, *_: object) -> None:
        set_current_index(self.previous)


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes in live blocks."""
    return int(_find(device).allocator.allocated_bytes)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes in live blocks since the peak was reset."""
    return int(_find(device).allocator.peak_allocated_bytes)


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that the allocator holds, cached ones included."""
    return int(_find(device).allocator.reserved_bytes)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes that the allocator held since the peak was reset."""
    return int(_find(device).allocator.peak_reserved_bytes)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let the peaks start again from what is held now."""
    _find(device).allocator.reset_peak()


def empty_cache() -> None:
    """Give wholly free segments of every device back."""
    for item in all_devices():
        item.release_cached()


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Return the counters under the names of ``torch.cuda.memory_stats``."""
    return collect_stats(_find(device).allocator)


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """Return the counters that the model keeps at hand, without a walk over its blocks."""
    allocator = _find(device).allocator
    return {
        "allocated_bytes": {
            "all": {
                "current": allocator.allocated_bytes,
                "peak": allocator.peak_allocated_bytes,
            }
        },
        "reserved_bytes": {
            "all": {"current": allocator.reserved_bytes, "peak": allocator.peak_reserved_bytes}
        },
        "num_alloc_retries": allocator.alloc_retries,
    }


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return a table of the counters for people."""
    chosen = _find(device)
    return format_summary(
        chosen.allocator, title=f"{DEVICE_TYPE}:{chosen.index}", abbreviated=abbreviated
    )


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return free and total bytes; without a limit, those of a device of 2**50 bytes."""
    allocator = _find(device).allocator
    total = allocator.limit_bytes or 1 << 50
    return max(0, total - allocator.reserved_bytes), total


def manual_seed(seed: int) -> None:
    """Seed the generator that the devices share with the host, so that results equal the CPU's."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> int:
    """Seed the shared generator at random."""
    return torch.default_generator.seed()


def initial_seed() -> int:
    """Return the seed of the shared generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of the generator that the devices share with the host."""
    _find(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the generator that the devices share with the host."""
    _find(device)
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the generator's state once per device."""
    return [get_rng_state() for _ in range(num_devices())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the generator's state from a list with one entry per device."""
    for state in new_states:
        set_rng_state(state)


def is_bf16_supported() -> bool:
    """Say that bfloat16 works."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast can compute in."""
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


_NAMES = (
    "device",
    "device_count",
    "current_device",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_peak_memory_stats",
    "seed",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
    "_is_in_bad_fork",
)


def make_backend_module() -> types.ModuleType:
    """Return the module that becomes ``torch.simgpu``."""
    module = types.ModuleType(f"torch.{DEVICE_TYPE}", __doc__)
    for name in _NAMES:
        setattr(module, name, globals()[name])
    return module
