"""One row of the table of error forms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["LINE_START", "Confidence", "OOMPattern", "Scope", "form"]

Scope = Literal["device", "host", "host_shm"]
Confidence = Literal["certain", "likely"]

LINE_START = r"^\s*(?:\[\w+\]:? *)?(?:[\w.]*(?:Error|Exception): +)?"
"""Start of a line, after an optional ``[rank0]:`` and ``SomeError:``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OOMPattern:
    """One row of the table.

    Attributes:
        pattern: Regular expression, searched in the message (multi-line mode).
        kind: What failed; ``"none"`` says that the message is not out of memory.

            ==================  ==================================================================
            ``allocator``       the allocator of torch, for a device
            ``driver``          the runtime or driver of the device
            ``library``         a device library (cuBLAS, cuDNN, cuFFT, ...) could not allocate
            ``disguised``       another error that a full device often turns into
            ``collective``      a collective operation between processes
            ``worker``          another process or thread: DataLoader worker, spawned rank
            ``host_allocator``  the allocator of torch, for host memory
            ``host``            host memory of Python, NumPy or C++
            ``system``          the operating system: fork, page file, memory map
            ``shared_memory``   shared memory (``/dev/shm``)
            ``none``            not out of memory
            ==================  ==================================================================
        scope: Whose memory: ``"device"``, ``"host"`` or ``"host_shm"``.
        confidence: ``"likely"`` where the text does not say so plainly.
        recoverable: A smaller attempt on an accelerator may succeed.
        example: A real message of the form.
        any_class: The row also counts for classes that otherwise report a mistake of the caller.
    """

    pattern: re.Pattern[str]
    kind: str
    scope: Scope
    confidence: Confidence
    recoverable: bool
    example: str
    any_class: bool = False


def form(
    pattern: str,
    kind: str,
    scope: Scope = "device",
    *,
    example: str,
    likely: bool = False,
    recoverable: bool | None = None,
    any_class: bool = False,
) -> OOMPattern:
    """Write one row; what the device refuses is recoverable unless the row says otherwise."""
    return OOMPattern(
        pattern=re.compile(pattern, re.MULTILINE),
        kind=kind,
        scope=scope,
        confidence="likely" if likely else "certain",
        recoverable=scope == "device" if recoverable is None else recoverable,
        example=example,
        any_class=any_class,
    )
