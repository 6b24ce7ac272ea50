"""``read_memory`` and its siblings, on the backends that are here and on ones that are not."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from lightning_oom.memory import (
    DeviceReader,
    MemoryReading,
    read_memory,
    register_reader,
    release_cached,
    reset_peak,
)
from lightning_oom.memory.devices import reader_of

if TYPE_CHECKING:
    from collections.abc import Callable

UNKNOWN = ("peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "alloc_retries")


class Fixed(DeviceReader):
    """Reads one number, for one index or for all."""

    def __init__(self, number: int, index: int | None = None) -> None:
        self.number = number
        self.index = index
        self.resets = 0

    def covers(self, device: torch.device) -> bool:
        """Say whether it is the index."""
        return self.index is None or device.index == self.index

    def read(self, device: torch.device) -> MemoryReading:
        """Give the number."""
        return MemoryReading(device=str(device), allocated_bytes=self.number)

    def reset_peak(self, device: torch.device) -> None:
        """Count the call."""
        self.resets += 1


def test_the_cpu_reads_the_process_against_the_machine() -> None:
    """Resident set, limit and what is available; the host has no caching allocator."""
    reading = read_memory("cpu")

    assert reading.device == "cpu"
    assert reading.allocated_bytes is not None
    assert reading.limit_bytes is not None
    assert 0 < reading.allocated_bytes < reading.limit_bytes <= psutil.virtual_memory().total
    assert reading.free_bytes is not None
    assert 0 < reading.free_bytes < reading.limit_bytes
    assert [getattr(reading, name) for name in UNKNOWN] == [None] * 4


def test_a_device_may_be_a_name_or_a_device() -> None:
    """Both spellings read the same device."""
    assert read_memory(torch.device("cpu")).device == read_memory("cpu").device == "cpu"


@pytest.mark.parametrize("name", ["cuda:0", "xpu", "mps", "meta", "mtia:1", "hpu"])
def test_a_backend_that_is_not_here_knows_nothing(name: str) -> None:
    """Every quantity is ``None``, and no call raises."""
    module = getattr(torch, name.split(":", maxsplit=1)[0], None)
    if module is not None and module.is_available():
        pytest.skip(f"this machine has {name}")

    reading = read_memory(name)
    reset_peak(name)

    numbers = [getattr(reading, field) for field in MemoryReading.__slots__ if field != "device"]
    assert numbers == [None] * 7
    assert release_cached(name) is None


@pytest.mark.parametrize("call", [read_memory, reset_peak, release_cached])
def test_an_unknown_name_is_refused(call: Callable[[str], Any]) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match="'gpu:0' is not a device"):
        call("gpu:0")


def test_the_reader_registered_last_reads() -> None:
    """Undoing one entry leaves the others, in any order and more than once."""
    first, second = Fixed(1), Fixed(2)
    undo_first, undo_second = register_reader("cpu", first), register_reader("cpu", second)
    assert read_memory("cpu").allocated_bytes == 2
    undo_first()
    undo_first()
    assert read_memory("cpu").allocated_bytes == 2
    reset_peak("cpu")
    assert (first.resets, second.resets) == (0, 1)
    undo_second()

    assert read_memory("cpu").allocated_bytes not in (1, 2)


def test_a_reader_may_cover_some_devices_only() -> None:
    """The next reader is asked for the others."""
    undos = [register_reader("meta", Fixed(7)), register_reader("meta", Fixed(8, index=1))]
    numbers = [read_memory(f"meta:{index}").allocated_bytes for index in (0, 1)]
    for undo in undos:
        undo()

    assert numbers == [7, 8]


class FakeModule:
    """A ``torch.<type>`` with the counters nested, as CUDA's newer releases have them."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.initialized = initialized
        self.reserved = 500
        self.asked: list[str] = []

    def is_available(self) -> bool:
        """It is there."""
        return True

    def is_initialized(self) -> bool:
        """Say whether the process has used it."""
        return self.initialized

    def current_device(self) -> int:
        """The current index."""
        return 3

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        """The counters."""
        self.asked.append(f"stats {device}")
        return {
            "allocated_bytes": {"all": {"current": 300, "peak": 400}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": 600}},
            "num_alloc_retries": 4,
        }

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Free and total."""
        return 200, 2000

    def empty_cache(self) -> None:
        """Give 150 back."""
        self.reserved -= 150


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """A backend that this machine has not."""
    fake = FakeModule()
    monkeypatch.setattr(torch, "hpu", fake, raising=False)
    return fake


def test_a_backend_is_read_through_its_module(module: FakeModule) -> None:
    """Counters and driver figures land in the reading; the limit is what the process could have."""
    assert read_memory("hpu") == MemoryReading(
        device="hpu:3",
        allocated_bytes=300,
        peak_allocated_bytes=400,
        reserved_bytes=500,
        peak_reserved_bytes=600,
        limit_bytes=700,  # reserved and free, others have the rest
        free_bytes=200,
        alloc_retries=4,
    )


def test_a_second_reading_does_not_ask_the_driver(module: FakeModule) -> None:
    """What the driver could give is what it was, less what the process has taken since."""
    device = torch.device("hpu:0")
    before = read_memory(device)
    module.mem_get_info = None  # type: ignore[assignment]  # a call would be seen: free is None
    module.reserved += 50

    again = reader_of(device).read_again(device, before)

    assert (before.free_bytes, again.free_bytes) == (200, 150)
    assert (again.reserved_bytes, again.limit_bytes) == (550, before.limit_bytes)


def test_a_cap_on_the_process_is_its_limit(module: FakeModule) -> None:
    """The fraction that the process was given counts."""
    module.get_per_process_memory_fraction = lambda device: 0.25

    assert read_memory("hpu:1").limit_bytes == 500


def test_releasing_says_how_much_went_back(module: FakeModule) -> None:
    """The difference of what is reserved."""
    assert release_cached("hpu:0") == 150


def test_a_device_that_was_not_used_yet_is_not_touched(module: FakeModule) -> None:
    """Nothing is held, and the driver is not asked: that would make a context."""
    module.initialized = False

    reading = read_memory("hpu:1")

    assert (reading.device, reading.allocated_bytes, reading.reserved_bytes) == ("hpu:1", 0, 0)
    assert (reading.limit_bytes, reading.free_bytes, reading.alloc_retries) == (None, None, None)
    assert release_cached("hpu:1") == 0
    assert module.asked == []


def test_a_backend_that_fails_knows_nothing(module: FakeModule) -> None:
    """What a broken device raises is not passed on: readings are taken while errors are handled."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    module.memory_stats_as_nested_dict = broken
    module.mem_get_info = broken
    module.empty_cache = broken

    reading = read_memory("hpu:0")

    assert (reading.allocated_bytes, reading.limit_bytes) == (None, None)
    assert release_cached("hpu:0") is None


def test_importing_touches_no_device() -> None:
    """``import lightning_oom.memory`` makes no context on any device."""
    program = (
        "import lightning_oom.memory, torch;"
        "assert not torch.cuda.is_initialized();"
        "lightning_oom.memory.read_memory('cuda:0');"
        "lightning_oom.memory.release_cached('cuda:0');"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)  # noqa: S603 our own program


@pytest.mark.gpu
def test_cuda_is_read_without_a_mode() -> None:
    """The allocator's counters and the driver's figures, after the device was used."""
    kept = torch.zeros(2**20, device="cuda")
    reading = read_memory("cuda")

    assert reading.allocated_bytes is not None
    assert reading.reserved_bytes is not None
    assert reading.limit_bytes is not None
    assert kept.nbytes <= reading.allocated_bytes <= reading.reserved_bytes < reading.limit_bytes
    assert reading.alloc_retries is not None
