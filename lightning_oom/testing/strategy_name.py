"""Let Lightning know the strategy ``"simgpu"`` by name, before the simulated GPU is imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["register_strategy_name"]

_NAME = "simgpu"


def register_strategy_name() -> None:
    """Make ``Trainer(strategy="simgpu")`` work if Lightning has been imported; else do nothing.

    It costs a dictionary entry: the device and its kernels are imported when a Trainer uses it.
    """
    registry = getattr(sys.modules.get("lightning.pytorch.strategies"), "StrategyRegistry", None)
    if registry is not None and _NAME not in registry:
        registry.register(_NAME, _make_strategy, description="A simulated GPU with a memory limit")


def _make_strategy(**options: Any) -> Any:
    simgpu = importlib.import_module("lightning_oom.testing.simgpu")
    return simgpu.SimulatedGPUStrategy(**options)
