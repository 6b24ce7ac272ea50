"""Tell whether an error means that memory ran out, whose memory, and what the error says about it.

The class of the error is asked first, then the one table of message forms
(:data:`~lightning_oom.recovery.classify.oom_patterns.OOM_PATTERNS`), then the errors it came from.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import LightningOOMError
from lightning_oom.recovery.classify.message_amounts import parse_amounts
from lightning_oom.recovery.classify.oom_form import Confidence, OOMPattern, Scope
from lightning_oom.recovery.classify.oom_patterns import (
    OOM_PATTERNS,
    SPLIT_ON_CPU_KINDS,
    pattern_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OOM_PATTERNS", "OOMCause", "OOMPattern", "classify_oom", "pattern_table"]

_CALLER_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
)
_COLLECTIVE_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
)
_OTHER_PROCESS = re.compile(
    r"in DataLoader worker process|in pin memory thread|-- Process \d+ terminated with"
)
_EXABYTE = 2**60
_MAX_LINES, _MAX_CHARACTERS = 8, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class OOMCause:
    """What an out-of-memory error says, as plain values: it holds no exception and no tensor.

    Attributes:
        kind: What failed; the kinds are listed at
            :class:`~lightning_oom.recovery.classify.oom_form.OOMPattern`.
        scope: Whose memory: ``"device"``, ``"host"`` or ``"host_shm"``.
        confidence: ``"likely"`` where the error does not say plainly that memory ran out.
        message: First lines of the text.
        error_type: Qualified name of the class that matched, which may be a cause of the error
            that was classified.
        requested_bytes: Size of the allocation that failed; ``None`` when the text does not say,
            as in all amounts below. Torch rounds them to two decimals.
        limit_bytes: What the device can hold, or what the process is allowed.
        free_bytes: What the driver said is free.
        allocated_bytes: Held by live tensors.
        reserved_unallocated_bytes: Held by the caching allocator, not by tensors.
        device: Device named in the text, such as ``"cuda:0"``.
        recoverable: A smaller attempt on an accelerator may succeed.
    """

    kind: str
    scope: Scope
    confidence: Confidence
    message: str
    error_type: str
    requested_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_unallocated_bytes: int | None
    device: str | None
    recoverable: bool

    def recoverable_on(self, device_type: str) -> bool:
        """Tell whether a smaller attempt may succeed when the model trains on ``device_type``.

        Host memory counts where the training itself uses it: on the CPU, and not when it ran out in
        a worker or was refused by the operating system.

        Args:
            device_type: Type of the training device, such as ``"cuda"`` or ``"cpu"``.

        Example:
            >>> cause = classify_oom(MemoryError())
            >>> cause.recoverable_on("cuda"), cause.recoverable_on("cpu")
            (False, True)
        """
        if self.scope == "device":
            return self.recoverable
        return device_type == "cpu" and self.kind in SPLIT_ON_CPU_KINDS


def classify_oom(error: BaseException) -> OOMCause | None:
    """Tell whether ``error`` means that memory ran out.

    The class decides first (``torch.OutOfMemoryError``, ``MemoryError``, ``OSError`` with
    ``ENOMEM``); any other error is out of memory when its text has a known form, which a mistake
    of the caller (``ValueError`` and its like) never has. Then the errors it came from are asked
    the same: ``__cause__``, ``inner_exception``, the members of a group, and ``__context__``
    unless it was suppressed with ``raise ... from None``. An error that merely *happened while* an
    out-of-memory error was handled is ``"likely"`` at most.

    Args:
        error: Any exception. It is read, never kept.

    Returns:
        What the error says, or ``None`` when it is not out of memory. An interrupt
        (``KeyboardInterrupt``, ``SystemExit``) and an error of this package never are.

    Example:
        >>> cause = classify_oom(RuntimeError("CUDA error: out of memory"))
        >>> cause.kind, cause.scope, cause.confidence, cause.recoverable
        ('driver', 'device', 'certain', True)
        >>> classify_oom(ValueError("see the docs on CUDA out of memory")) is None
        True
    """
    if not isinstance(error, Exception) or isinstance(error, LightningOOMError):
        return None
    for found, is_explicit in _walk(error):
        cause = _classify_one(found)
        if cause is not None:
            return cause if is_explicit else replace(cause, confidence="likely")
    return None


def _walk(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    seen: set[int] = set()
    waiting: list[tuple[object, bool]] = [(error, True)]
    while waiting:
        found, is_explicit = waiting.pop(0)
        if not isinstance(found, BaseException) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found, is_explicit
        waiting.append((found.__cause__, is_explicit))
        waiting.append((getattr(found, "inner_exception", None), is_explicit))
        members = getattr(found, "exceptions", None)
        if isinstance(members, (tuple, list)):
            waiting += [(member, is_explicit) for member in members]
        if not found.__suppress_context__:
            waiting.append((found.__context__, False))


def _classify_one(error: BaseException) -> OOMCause | None:
    text = _text(error)
    row = _matching_row(error, text)
    if row is not None and row.kind == "none":
        return None
    by_class = _by_class(error)
    if by_class is not None and (row is None or _class_overrules(by_class, row)):
        kind, scope, confidence, recoverable = by_class
    elif row is not None:
        kind, scope, confidence = row.kind, row.scope, row.confidence
        recoverable = row.recoverable
    else:
        return None
    amounts = parse_amounts(text)
    if amounts.requested_bytes is not None and amounts.requested_bytes >= _EXABYTE:
        return None
    if _OTHER_PROCESS.search(text):
        kind, recoverable = "worker", False
    elif scope == "device" and _raised_by_collective(error):
        kind, recoverable = "collective", False
    return OOMCause(
        kind=kind,
        scope=scope,
        confidence=confidence,
        message=_excerpt(text, row),
        error_type=_qualified_name(type(error)),
        requested_bytes=amounts.requested_bytes,
        limit_bytes=amounts.limit_bytes,
        free_bytes=amounts.free_bytes,
        allocated_bytes=amounts.allocated_bytes,
        reserved_unallocated_bytes=amounts.reserved_unallocated_bytes,
        device=amounts.device if scope == "device" else None,
        recoverable=recoverable,
    )


def _by_class(error: BaseException) -> tuple[str, Scope, Confidence, bool] | None:
    if isinstance(error, OutOfMemoryError):
        return "allocator", "device", "certain", True
    if isinstance(error, MemoryError):
        return "host", "host", "certain", False
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "system", "host", "certain", False
    return None


def _class_overrules(by_class: tuple[str, Scope, Confidence, bool], row: OOMPattern) -> bool:
    """An error of torch's own class is about the device, whatever else its text resembles."""
    return by_class[1] == "device" and (
        row.confidence == "likely" or (row.scope != "device" and row.kind != "collective")
    )


def _matching_row(error: BaseException, text: str) -> OOMPattern | None:
    is_mistake = isinstance(error, _CALLER_MISTAKES)
    for row in OOM_PATTERNS:
        if (row.any_class or not is_mistake) and row.pattern.search(text):
            return row
    return None


def _raised_by_collective(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in _COLLECTIVE_MODULES:
            return True
        trace = trace.tb_next
    return False


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _excerpt(text: str, row: OOMPattern | None) -> str:
    match = row.pattern.search(text) if row is not None else None
    if match is not None and "Traceback (most recent call last)" in text:
        text = text[text.rfind("\n", 0, match.start() + 1) + 1 :]
    lines = text.strip().splitlines()[:_MAX_LINES]
    return "\n".join(lines)[:_MAX_CHARACTERS]


def _qualified_name(error_class: type[BaseException]) -> str:
    module = error_class.__module__
    name = error_class.__qualname__
    return name if module == "builtins" else f"{module}.{name}"
