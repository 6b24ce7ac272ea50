"""Errors and warnings of the package, in one tree.

::

    LightningOOMError(Exception)
    ├── BatchSplitError(ValueError)            a batch cannot be cut into rows
    ├── GradInEvaluationError(RuntimeError)    evaluation builds or keeps a graph
    ├── NotSeparableError(RuntimeError)        the loss of the batch is not a mean over its rows
    ├── StepNotTracedError(RuntimeError)       a training step cannot be followed without running it
    ├── UnsupportedLightningError(RuntimeError) a private name of Lightning moved
    └── UnsupportedTorchError(RuntimeError)    this torch release lacks something that is needed
    LightningOOMWarning(UserWarning)
    ├── RecoveryDisabledWarning                OOM errors pass through unchanged in this run
    ├── NotSeparableWarning                    a split changes what the step computes
    ├── StepSkippedWarning                     a batch was given up
    ├── NearLimitWarning                       a peak came nearer to the limit than wanted
    ├── MemoryLeakWarning                      something grows from step to step
    ├── AmbiguousOOMWarning                    an error that may or may not be an OOM
    ├── GradInEvaluationWarning                evaluation builds or keeps a graph
    └── CheckpointingWarning                   checkpointing cannot do what was asked for

An out-of-memory error itself is never replaced: what the user sees last is the exception that torch
raised, with a note (:func:`add_note`) that says what was tried.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousOOMWarning",
    "BatchSplitError",
    "CheckpointingWarning",
    "GradInEvaluationError",
    "GradInEvaluationWarning",
    "LightningOOMError",
    "LightningOOMWarning",
    "MemoryLeakWarning",
    "NearLimitWarning",
    "NotSeparableError",
    "NotSeparableWarning",
    "RecoveryDisabledWarning",
    "StepNotTracedError",
    "StepSkippedWarning",
    "UnsupportedLightningError",
    "UnsupportedTorchError",
    "add_note",
]


class LightningOOMError(Exception):
    """Base of every error that this package raises on its own account."""


class BatchSplitError(LightningOOMError, ValueError):
    """A batch cannot be cut into rows: no leaf has rows, or two leaves disagree on how many."""


class GradInEvaluationError(LightningOOMError, RuntimeError):
    """Validation, test or prediction builds or keeps a graph; the message says where."""


class NotSeparableError(LightningOOMError, RuntimeError):
    """The gradient of a batch is not the weighted sum of the gradients of its rows."""


class StepNotTracedError(LightningOOMError, RuntimeError):
    """What a training step does to memory cannot be foreseen; the message names the line."""


class UnsupportedLightningError(LightningOOMError, RuntimeError):
    """A private name of Lightning that the package relies on is missing or has another form."""


class UnsupportedTorchError(LightningOOMError, RuntimeError):
    """The installed torch release lacks something that the called feature needs."""


class LightningOOMWarning(UserWarning):
    """Base of every warning that this package issues."""


class RecoveryDisabledWarning(LightningOOMWarning):
    """Out-of-memory errors pass through unchanged in this run; the message says why."""


class NotSeparableWarning(LightningOOMWarning):
    """The step is split although that changes what it computes; the message says by how much."""


class StepSkippedWarning(LightningOOMWarning):
    """A batch was given up and left out of the training."""


class NearLimitWarning(LightningOOMWarning):
    """A peak came nearer to the limit of the device than the run was meant to come."""


class MemoryLeakWarning(LightningOOMWarning):
    """Something holds more tensors from step to step; the message names it."""


class GradInEvaluationWarning(LightningOOMWarning):
    """Validation, test or prediction builds or keeps a graph; the message says where."""


class AmbiguousOOMWarning(LightningOOMWarning):
    """An error was treated as out of memory although its text does not say so plainly."""


class CheckpointingWarning(LightningOOMWarning):
    """Activation checkpointing cannot do all that was asked for; the message says what."""


def add_note(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error`` so that it is printed below the traceback.

    Python 3.10 stores the note but does not print it.

    Args:
        error: The exception that is about to be raised, or re-raised.
        note: Text without a trailing newline.

    Example:
        >>> error = RuntimeError("CUDA out of memory")
        >>> add_note(error, "tried: release, split")
        >>> error.__notes__
        ['tried: release, split']
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
