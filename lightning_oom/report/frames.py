"""What the frames of a failed call still hold: read once, and let go of again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.recovery.cleanup import related_errors
from lightning_oom.report.record import CodeLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = ["code_lines", "failed_frames", "find_batch", "find_module", "locals_of"]

_MAX_LINES = 60
_FAST_LOCALS = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
_OWN_REFERENCES = 3  # of a frame, of a variable, of the call that counts
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def failed_frames(error: BaseException) -> list[FrameType]:
    """Return the frames that an error has left, outermost call first, those of its causes after.

    Frames that are still running are not among them.

    Args:
        error: An exception that is being handled.
    """
    running = set()
    frame = inspect.currentframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    found: dict[int, FrameType] = {}
    for related in related_errors(error):
        trace = related.__traceback__
        while trace is not None:
            if id(trace.tb_frame) not in running:
                found.setdefault(id(trace.tb_frame), trace.tb_frame)
            trace = trace.tb_next
    return list(found.values())


def code_lines(error: BaseException) -> tuple[CodeLine, ...]:
    """Return the lines of the traceback, outermost call first, the innermost ones of a long one."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(CodeLine(path=code.co_filename, line=trace.tb_lineno, function=code.co_name))
        trace = trace.tb_next
    return tuple(lines[-_MAX_LINES:])


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame that has ended, and leave no copy of them in it.

    Before Python 3.13 a frame keeps the dictionary that it was asked for, with everything in it,
    also after ``frame.clear()``.

    Args:
        frame: One of :func:`failed_frames`.
    """
    if frame.f_code.co_flags & _FAST_LOCALS != _FAST_LOCALS:
        return {}  # of a module or a class: what is there lives on anyway
    kept = frame.f_locals
    copied = dict(kept)
    if type(kept) is dict and sys.getrefcount(kept) <= _OWN_REFERENCES:
        kept.clear()
    return copied


def find_module(frames: Sequence[FrameType], root: torch.nn.Module) -> str | None:
    """Name the innermost module whose forward was running.

    Args:
        frames: Of the error, outermost call first.
        root: The model that names are relative to.

    Returns:
        ``"model.layers.1"``, with ``"model"`` for the root; the class of a module that is not a part
        of it; ``None`` when no forward was running.
    """
    names = {id(module): name for name, module in root.named_modules()}
    for frame in reversed(frames):
        for value in locals_of(frame).values():
            if isinstance(value, torch.nn.Module) and _runs(frame, value):
                if id(value) in names:
                    return ".".join(filter(None, ("model", names[id(value)])))
                return type(value).__name__
    return None


def _runs(frame: FrameType, module: torch.nn.Module) -> bool:
    """Whether the frame is that of the module's forward, or of a step method of a LightningModule."""
    for name in ("forward", *_STEPS):
        method = getattr(type(module), name, None)
        if getattr(inspect.unwrap(method) if method else None, "__code__", None) is frame.f_code:
            return True
    return False


def find_batch(frames: Sequence[FrameType]) -> tuple[Any, int | None]:
    """Find the batch and its index among the variables of the frames.

    Args:
        frames: Of the error, outermost call first.

    Returns:
        The batch as the outermost frame has it that calls something so, and its index; ``None`` for
        what is not there.
    """
    batch = index = None
    for variables in map(locals_of, frames):
        found = variables.get("batch_idx")
        if index is None and type(found) is int:
            index = found
        if batch is None:
            batch = next(_batches_in(variables), None)
    return batch, index


def _batches_in(variables: dict[str, Any]) -> Iterator[Any]:
    candidates = [variables.get("batch"), getattr(variables.get("program"), "batch", None)]
    keywords = variables.get("kwargs")
    if isinstance(keywords, Mapping):
        candidates.append(keywords.get("batch"))
    yield from (found for found in candidates if found is not None)
