"""Run out of memory without a GPU, in the tests of this package and in yours.

- :func:`memory_limit`: a limit in bytes on any device;
- :func:`fail_at`, :func:`fail_on`: an error at a chosen allocation, or in a chosen phase;
- :class:`SimulatedGPUStrategy`: a device with its own memory, also as ``Trainer(strategy="simgpu")``
  once this package has been imported after Lightning;
- pytest fixtures, by the plugin that the package brings: see :mod:`lightning_oom.testing.plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_oom.testing.strategy_name import register_strategy_name

if TYPE_CHECKING:
    from lightning_oom.testing.faults import AllocationFault, fail_at
    from lightning_oom.testing.limit import MemoryLimit, memory_limit
    from lightning_oom.testing.phases import PhaseFault, fail_on
    from lightning_oom.testing.simgpu import SimulatedGPU, SimulatedGPUStrategy

__all__ = [
    "AllocationFault",
    "MemoryLimit",
    "PhaseFault",
    "SimulatedGPU",
    "SimulatedGPUStrategy",
    "fail_at",
    "fail_on",
    "memory_limit",
]

# pytest imports this package in every session to find the fixtures; torch is imported on first use.
_MODULES = {
    "AllocationFault": "lightning_oom.testing.faults",
    "MemoryLimit": "lightning_oom.testing.limit",
    "PhaseFault": "lightning_oom.testing.phases",
    "SimulatedGPU": "lightning_oom.testing.simgpu",
    "SimulatedGPUStrategy": "lightning_oom.testing.simgpu",
    "fail_at": "lightning_oom.testing.faults",
    "fail_on": "lightning_oom.testing.phases",
    "memory_limit": "lightning_oom.testing.limit",
}

register_strategy_name()


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
