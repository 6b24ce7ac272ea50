"""The one table of error forms: what an out-of-memory error looks like, and what only looks like one.

The first row whose pattern is found in the message decides. A row of kind ``"none"`` says that the
message is *not* out of memory although it resembles one. Where the words alone could come from a
person, a pattern stands at the start of a line (after an optional ``SomeError:``, as in a traceback
sent from another process), so that an error that merely mentions the words is not taken for one.
"""

from __future__ import annotations

from lightning_oom.recovery.classify.device_forms import ALLOCATOR_FORMS, DEVICE_FORMS
from lightning_oom.recovery.classify.host_forms import HOST_FORMS, SHARED_MEMORY_FORMS
from lightning_oom.recovery.classify.oom_form import OOMPattern, form

__all__ = ["OOM_PATTERNS", "SPLIT_ON_CPU_KINDS", "OOMPattern", "pattern_table"]

SPLIT_ON_CPU_KINDS = ("host", "host_allocator")
"""Kinds of host memory that a smaller attempt needs less of, when the training device is the CPU."""

_NOT_MEMORY = (
    form(
        r"Tried to allocate more than 1 ?EB",
        "none",
        example="CUDA out of memory. Tried to allocate more than 1EB memory.",
    ),
    form(
        r"Ran out of memory in memory space (?:vmem|smem|sflag)",
        "none",
        example="RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. "
        "Ran out of memory in memory space vmem.",
    ),
    form(
        r"Too many open files",
        "none",
        example="unable to open shared memory object </torch_1_2> in read-write mode: "
        "Too many open files (24)",
    ),
)

_COLLECTIVES = (
    form(
        r"(?is)(?:nccl|rccl|hccl|xccl|oneccl).*"
        r"(?:failure (?:\d+ )?'?out of memory|Failed to CUDA \w+(?: async)?|"
        r"CUDA(?: driver)? error: out of memory|(?:CUDA|HIP|XPU|NPU) out of memory)",
        "collective",
        recoverable=False,
        example="NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error, NCCL version "
        "2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
    ),
    form(
        r"(?i)\bcuda failure (?:\d+ )?'out of memory'",
        "collective",
        recoverable=False,
        example="Cuda failure 'out of memory'",
    ),
    form(
        r"(?is)(?:nccl|/dev/shm/nccl).*shared memory segment.*No space left on device",
        "collective",
        "host_shm",
        example="ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
        " or device error.\nLast error:\nError while creating shared memory segment "
        "/dev/shm/nccl-x (size 9637888), error: No space left on device (28)",
    ),
)

OOM_PATTERNS: tuple[OOMPattern, ...] = (
    *_NOT_MEMORY,
    *_COLLECTIVES,
    *SHARED_MEMORY_FORMS,
    *ALLOCATOR_FORMS,
    *HOST_FORMS,
    *DEVICE_FORMS,
)
"""Every row, in the order in which they are tried."""


def pattern_table() -> str:
    """Render :data:`OOM_PATTERNS` as a Markdown table, one line per row.

    Example:
        >>> print(pattern_table().splitlines()[0])
        | Message (example) | Kind | Scope | Confidence | A smaller attempt may help |
    """
    lines = [
        "| Message (example) | Kind | Scope | Confidence | A smaller attempt may help |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [_table_line(row) for row in OOM_PATTERNS]
    return "\n".join(lines)


def _table_line(row: OOMPattern) -> str:
    text = " ".join(row.example.split()).replace("|", "\\|").replace("`", "'")
    if row.kind == "none":
        return f"| `{text}` | not out of memory | | | |"
    helps = "yes" if row.recoverable else "no"
    helps = "on a CPU run" if row.kind in SPLIT_ON_CPU_KINDS else helps
    return f"| `{text}` | {row.kind} | {row.scope} | {row.confidence} | {helps} |"
