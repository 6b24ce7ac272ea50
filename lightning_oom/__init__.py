"""Callbacks for PyTorch Lightning that survive, foresee and explain CUDA out of memory.

The names below are imported when they are first used: the package brings a pytest plugin, which
must not make every test session of an environment import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_oom import errors, testing
    from lightning_oom.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_oom.callbacks.amp_switcher import AMPSwitcher
    from lightning_oom.callbacks.cache_cleaner import CacheCleaner
    from lightning_oom.callbacks.cpu_offload import CPUOffload
    from lightning_oom.callbacks.early_zero_grad import EarlyZeroGrad
    from lightning_oom.callbacks.gradient_accumulation import GradientAccumulation
    from lightning_oom.callbacks.inplace_activations import InplaceActivations
    from lightning_oom.callbacks.memory_advisor import MemoryAdvisor
    from lightning_oom.callbacks.memory_monitor import MemoryMonitor
    from lightning_oom.callbacks.memory_planner import MemoryPlanner
    from lightning_oom.callbacks.memory_profiler import MemoryProfiler
    from lightning_oom.callbacks.no_grad_enforcer import NoGradEnforcer
    from lightning_oom.callbacks.oom_recovery import OOMRecovery
    from lightning_oom.callbacks.oom_reporter import OOMReporter
    from lightning_oom.memory import MemoryReading, read_memory
    from lightning_oom.memory.step_memory import StepMemory
    from lightning_oom.planning.estimate import MemoryEstimate, estimate_peak
    from lightning_oom.planning.memory_plan import MemoryPlan, plan_memory
    from lightning_oom.recovery.classify import OOMCause, classify_oom
    from lightning_oom.recovery.events import RecoverySummary, StepOutcome
    from lightning_oom.reduction.drop_ins import (
        chunked_cross_entropy,
        replace_with_separable,
        tie_weights,
    )
    from lightning_oom.reduction.grad_mode import allow_grad
    from lightning_oom.report.record import OOMReport

__all__ = [
    "AMPSwitcher",
    "ActivationCheckpointing",
    "CPUOffload",
    "CacheCleaner",
    "EarlyZeroGrad",
    "GradientAccumulation",
    "InplaceActivations",
    "MemoryAdvisor",
    "MemoryEstimate",
    "MemoryMonitor",
    "MemoryPlan",
    "MemoryPlanner",
    "MemoryProfiler",
    "MemoryReading",
    "NoGradEnforcer",
    "OOMCause",
    "OOMRecovery",
    "OOMReport",
    "OOMReporter",
    "RecoverySummary",
    "StepMemory",
    "StepOutcome",
    "allow_grad",
    "chunked_cross_entropy",
    "classify_oom",
    "errors",
    "estimate_peak",
    "plan_memory",
    "read_memory",
    "replace_with_separable",
    "testing",
    "tie_weights",
]

_HOMES = {
    "ActivationCheckpointing": "lightning_oom.callbacks.activation_checkpointing",
    "AMPSwitcher": "lightning_oom.callbacks.amp_switcher",
    "CPUOffload": "lightning_oom.callbacks.cpu_offload",
    "CacheCleaner": "lightning_oom.callbacks.cache_cleaner",
    "EarlyZeroGrad": "lightning_oom.callbacks.early_zero_grad",
    "GradientAccumulation": "lightning_oom.callbacks.gradient_accumulation",
    "InplaceActivations": "lightning_oom.callbacks.inplace_activations",
    "MemoryAdvisor": "lightning_oom.callbacks.memory_advisor",
    "MemoryEstimate": "lightning_oom.planning.estimate",
    "MemoryMonitor": "lightning_oom.callbacks.memory_monitor",
    "MemoryPlan": "lightning_oom.planning.memory_plan",
    "MemoryPlanner": "lightning_oom.callbacks.memory_planner",
    "MemoryProfiler": "lightning_oom.callbacks.memory_profiler",
    "MemoryReading": "lightning_oom.memory",
    "NoGradEnforcer": "lightning_oom.callbacks.no_grad_enforcer",
    "OOMCause": "lightning_oom.recovery.classify",
    "OOMRecovery": "lightning_oom.callbacks.oom_recovery",
    "OOMReport": "lightning_oom.report.record",
    "OOMReporter": "lightning_oom.callbacks.oom_reporter",
    "RecoverySummary": "lightning_oom.recovery.events",
    "StepMemory": "lightning_oom.memory.step_memory",
    "StepOutcome": "lightning_oom.recovery.events",
    "chunked_cross_entropy": "lightning_oom.reduction.drop_ins",
    "allow_grad": "lightning_oom.reduction.grad_mode",
    "classify_oom": "lightning_oom.recovery.classify",
    "plan_memory": "lightning_oom.planning.memory_plan",
    "estimate_peak": "lightning_oom.planning.estimate",
    "read_memory": "lightning_oom.memory",
    "replace_with_separable": "lightning_oom.reduction.drop_ins",
    "tie_weights": "lightning_oom.reduction.drop_ins",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        if _HOMES[name].startswith("lightning_oom.callbacks"):  # a YAML file may name both
            names = importlib.import_module("lightning_oom.testing.strategy_name")
            names.register_strategy_name()
    elif name in __all__:
        found = importlib.import_module(f"lightning_oom.{name}")
    else:
        raise AttributeError(f"module 'lightning_oom' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
