"""``memory_limit`` where the allocator of a device keeps the limit itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_oom.memory import read_memory
from lightning_oom.testing import memory_limit
from lightning_oom.testing.active import CappedLimit
from lightning_oom.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

TOTAL = 1024 * MIB


class FakeAllocator:
    """The functions of ``torch.cuda`` that a cap needs, over numbers that the test sets."""

    def __init__(self) -> None:
        self.fraction = 0.5
        self.allocated = 10 * MIB
        self.peak = 700 * MIB
        self.reserved = 20 * MIB
        self.num_ooms = 3
        self.calls: list[str] = []

    def is_available(self) -> bool:
        """The device is there."""
        return True

    def is_initialized(self) -> bool:
        """The process has used it."""
        return True

    def current_device(self) -> int:
        """The only one."""
        return 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free and total."""
        return TOTAL - self.reserved, TOTAL

    def memory_allocated(self, device: torch.device) -> int:
        """Held now."""
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        """Most held."""
        return self.peak

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """The counters, flat."""
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved,
            "num_alloc_retries": 2,
            "num_ooms": self.num_ooms,
        }

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Start again."""
        self.peak = self.allocated

    def empty_cache(self) -> None:
        """Nothing is cached."""
        self.calls.append("empty_cache")

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        """Cap the process."""
        self.fraction = fraction
        self.calls.append(f"cap {fraction}")

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        """Tell the cap."""
        return self.fraction


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAllocator]:
    """A device type that this machine has not, with a fake allocator."""
    fake = FakeAllocator()
    monkeypatch.setattr(torch, "hpu", fake, raising=False)
    return fake


def test_the_real_allocator_is_capped_and_put_back(allocator: FakeAllocator) -> None:
    """The fraction is the limit's share of the device; afterwards it is what it was."""
    with memory_limit("256 MiB", device="hpu:0") as limit:
        assert isinstance(limit, CappedLimit)
        assert allocator.fraction == 0.25
        assert allocator.calls[0] == "empty_cache"
        reading = read_memory("hpu:0")
        assert (reading.limit_bytes, reading.alloc_retries) == (256 * MIB, 2)

    assert allocator.fraction == 0.5


def test_peak_and_refusals_are_those_of_the_block(allocator: FakeAllocator) -> None:
    """Both start at the block's beginning, and stay what they were at its end."""
    with memory_limit("256 MiB", device="hpu:0") as limit:
        assert (limit.live_bytes, limit.peak_bytes, limit.num_refused) == (10 * MIB, 10 * MIB, 0)
        allocator.peak, allocator.num_ooms = 200 * MIB, 5
        assert limit.register(torch.zeros(4)) == 0
    allocator.peak, allocator.num_ooms = 900 * MIB, 9

    assert (limit.peak_bytes, limit.num_refused) == (200 * MIB, 2)


def test_a_block_that_raises_puts_the_cap_back(allocator: FakeAllocator) -> None:
    """An error passes through, and the cap is gone."""
    with pytest.raises(KeyError), memory_limit("256 MiB", device="hpu"):
        raise KeyError

    assert allocator.fraction == 0.5


def test_a_limit_above_the_device_is_refused(allocator: FakeAllocator) -> None:
    """The message has both figures."""
    with pytest.raises(ValueError, match=r"2\.00 GiB is more than the 1\.00 GiB of hpu:0"):
        memory_limit("2 GiB", device="hpu:0")


@pytest.mark.gpu
def test_cuda_runs_out_at_the_cap() -> None:
    """CUDA's own allocator refuses, with its own message."""
    device: Any = torch.device("cuda", torch.cuda.current_device())
    with memory_limit("64 MiB", device=device) as limit:
        kept = torch.zeros(8 * MIB // 4, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros(128 * MIB // 4, device=device)
        assert limit.num_refused == 1
        assert read_memory(device).limit_bytes == 64 * MIB
    del kept

    assert torch.zeros(128 * MIB // 4, device=device).numel() == 32 * MIB
