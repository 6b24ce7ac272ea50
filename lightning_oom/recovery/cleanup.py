"""Let go of what a failed attempt still holds.

An exception keeps its traceback, the traceback keeps the frames, and the frames keep every local
tensor of the failed forward (pytorch/pytorch#27600). Nothing of that is freed inside the ``except``
block, nor by :func:`gc.collect`: the order is to copy the facts, call :func:`drop_traceback`, leave
the block, and only then collect and empty the cache.
"""

from __future__ import annotations

import gc
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["clear_frames", "collect_garbage", "drop_traceback", "related_errors"]

_LAST_ERROR_NAMES = ("last_exc", "last_value")
_LAST_NAMES = (*_LAST_ERROR_NAMES, "last_type", "last_traceback")


def related_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and every error it came from, each once, nearest first.

    Follows ``__cause__``, ``inner_exception`` (as :mod:`torch._dynamo` sets it), ``__context__``
    and the members of an exception group, also where the chain runs in a circle.

    Args:
        error: Where to start.

    Example:
        >>> outer, inner = RuntimeError("outer"), RuntimeError("inner")
        >>> outer.__cause__, inner.__context__ = inner, outer
        >>> [str(found) for found in related_errors(outer)]
        ['outer', 'inner']
    """
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        found = waiting.pop(0)
        if not isinstance(found, BaseException) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, getattr(found, "inner_exception", None), found.__context__]
        members = getattr(found, "exceptions", None)
        if isinstance(members, (tuple, list)):
            waiting += members


def clear_frames(error: BaseException) -> None:
    """Empty the local variables of every frame that ``error`` and its causes still reference.

    The tracebacks stay, so the error can be raised again and prints the same lines. Frames that are
    still running (that of the caller) are left alone.

    Args:
        error: An exception that has been caught.

    Example:
        >>> try:
        ...     raise RuntimeError("CUDA out of memory")
        ... except RuntimeError as error:
        ...     clear_frames(error)
        ...     error.__traceback__ is not None
        True
    """
    for found in related_errors(error):
        if found.__traceback__ is not None:
            traceback.clear_frames(found.__traceback__)


def drop_traceback(error: BaseException) -> None:
    """Clear the frames of ``error`` and its causes, and take their tracebacks away.

    Where the interpreter remembers the error for a debugger (``sys.last_value``, ``sys.last_exc``
    and their companions, as notebooks do), it forgets it. The text of the errors stays.

    Args:
        error: An exception that has been caught and will not be raised again.

    Note:
        The frame that runs the ``except`` block is still alive: what it holds itself is freed only
        by leaving it.

    Example:
        >>> try:
        ...     raise RuntimeError("CUDA out of memory")
        ... except RuntimeError as error:
        ...     drop_traceback(error)
        ...     error.__traceback__ is None
        True
    """
    chain = list(related_errors(error))
    clear_frames(error)
    for found in chain:
        found.__traceback__ = None
    remembered = [getattr(sys, name, None) for name in _LAST_ERROR_NAMES]
    if any(found is last for found in chain for last in remembered if last is not None):
        for name in _LAST_NAMES:
            if hasattr(sys, name):
                setattr(sys, name, None)


def collect_garbage() -> int:
    """Free what only reference cycles keep alive.

    Call it after the ``except`` block and before the cache of the device is emptied: a block that
    is still referenced cannot go back to the device.

    Returns:
        Number of unreachable objects found.

    Note:
        Cost: tens of milliseconds in a process that has imported torch. Never call it each step.

    Example:
        >>> collect_garbage() >= 0
        True
    """
    return gc.collect()
