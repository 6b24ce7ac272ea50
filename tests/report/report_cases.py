"""Reports with one fact changed at a time."""

from __future__ import annotations

from typing import Any

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.memory.kinds import MemoryByKind
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.recovery.classify import classify_oom
from lightning_oom.report.record import ModuleMemory, OOMReport, OptimizerMemory, TimelinePoint
from lightning_oom.units import GIB, MIB, format_bytes

__all__ = ["cuda_report", "oom_message", "steps"]


def oom_message(*, requested: int, limit: int, free: int, allocated: int, unallocated: int) -> str:
    """What torch says when a CUDA device is full."""
    return (
        f"CUDA out of memory. Tried to allocate {format_bytes(requested)}. GPU 0 has a total capacity "
        f"of {format_bytes(limit)} of which {format_bytes(free)} is free. Of the allocated memory "
        f"{format_bytes(allocated)} is allocated by PyTorch, and {format_bytes(unallocated)} is "
        "reserved by PyTorch but unallocated."
    )


def cuda_report(
    *,
    requested: int = 1 * GIB,
    limit: int = 24 * GIB,
    free: int = 256 * MIB,
    allocated: int = 22 * GIB,
    unallocated: int = 128 * MIB,
    **facts: Any,
) -> OOMReport:
    """A full CUDA device in the backward pass of step 7 with 64 rows; override any fact."""
    message = oom_message(
        requested=requested, limit=limit, free=free, allocated=allocated, unallocated=unallocated
    )
    cause = classify_oom(OutOfMemoryError(message))
    assert cause is not None
    known: dict[str, Any] = {
        "device": "cuda:0",
        "phase": "backward",
        "stage": "fit",
        "step": 7,
        "rows": 64,
        "is_mig": False,
        "platform": "linux",
        "torch_version": "2.8.0",
        "precision": "32-true",
        "uses_graph": True,
        "accumulate": 1,
        "reading": MemoryReading(
            device="cuda:0",
            allocated_bytes=allocated,
            reserved_bytes=allocated + unallocated,
            limit_bytes=allocated + unallocated + free,
            free_bytes=free,
        ),
        "kinds": MemoryByKind(
            parameters_bytes=GIB,
            buffers_bytes=0,
            gradients_bytes=GIB,
            optimizer_bytes=2 * GIB,
            batch_bytes=64 * MIB,
            activations_bytes=max(allocated - 5 * GIB, 0),
            other_bytes=GIB - 64 * MIB,
        ),
        "optimizers": (
            OptimizerMemory(type_name="AdamW", state_bytes=2 * GIB, expected_bytes=2 * GIB),
        ),
        "modules": (
            ModuleMemory(
                path="blocks",
                type_name="Sequential",
                parameters_bytes=GIB,
                saved_bytes=16 * GIB,
                is_leaf=False,
            ),
            ModuleMemory(
                path="blocks.0",
                type_name="Block",
                parameters_bytes=GIB // 2,
                saved_bytes=8 * GIB,
                is_leaf=False,
            ),
        ),
    }
    return OOMReport(cause=cause, **{**known, **facts})


def steps(allocated: list[int]) -> tuple[TimelinePoint, ...]:
    """A timeline with these amounts at the end of steps 1, 2, ..."""
    return tuple(
        TimelinePoint(step=step, allocated_bytes=amount) for step, amount in enumerate(allocated, 1)
    )
