"""Lightning's view of a simulated GPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator

from lightning_oom._torch import setup_python_backend
from lightning_oom.testing.simgpu.backend import empty_cache, memory_stats, set_device
from lightning_oom.testing.simgpu.devices import DEVICE_TYPE

__all__ = ["SimulatedGPUAccelerator"]


class SimulatedGPUAccelerator(Accelerator):
    """Tells Lightning what it asks of any accelerator.

    Made by :class:`SimulatedGPUStrategy`; there is no need to make one.
    """

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current one."""
        if device.type != DEVICE_TYPE:
            raise MisconfigurationException(f"Device should be {DEVICE_TYPE}, got {device} instead")
        set_device(device)

    def teardown(self) -> None:
        """Give cached memory back, as Lightning does on CUDA."""
        empty_cache()

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Return the allocator's counters, for ``DeviceStatsMonitor``."""
        return memory_stats(device)

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Accept one device: the strategy chooses which."""
        if devices in (1, "1", [0]):
            return 1
        raise MisconfigurationException(
            f"a simulated GPU is trained on alone, got `Trainer(devices={devices!r})`: "
            "write `devices=1` and choose it with `SimulatedGPUStrategy(device_index=...)`"
        )

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return as many devices as :meth:`parse_devices` accepted."""
        return [torch.device(DEVICE_TYPE, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: a trainer uses one."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Say whether this torch can be given the device."""
        return setup_python_backend is not None

    @staticmethod
    def name() -> str:
        """Return ``"simgpu"``."""
        return DEVICE_TYPE
