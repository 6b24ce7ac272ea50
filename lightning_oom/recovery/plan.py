"""The records of one guarded step: what to try, what failed, what is known about the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_oom.memory import MemoryReading
    from lightning_oom.recovery.batches import BatchSignature
    from lightning_oom.recovery.chunked.chunk_gain import ChunkGain
    from lightning_oom.recovery.classify import OOMCause
    from lightning_oom.recovery.separability import Separability

__all__ = ["AttemptPlan", "Failure", "Mode", "Trial"]

Mode = Literal["whole", "chunk", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """How one attempt of a step is run.

    Attributes:
        rung: The rung of the ladder that asked for it; ``"whole"`` for the ordinary first attempt.
        mode: ``"whole"``: as the user wrote it. ``"chunk"``: the module's children run row-chunk by
            row-chunk while the step sees the whole batch. ``"split"``: micro-batches.
        rows_together: Rows per micro-batch or chunk; ``None`` means all of them.
        contexts: Context managers entered around the attempt, for rungs that change how a forward
            or backward holds memory.
        holding: Names of the rungs whose contexts these are.
        exact: Whether the attempt computes what the ordinary one computes, up to rounding.
    """

    rung: str = "whole"
    mode: Mode = "whole"
    rows_together: int | None = None
    contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    holding: tuple[str, ...] = ()
    exact: bool = True

    def describe(self) -> str:
        """Return words for the console, for example ``"split into micro-batches of 8 rows"``."""
        name = " + ".join(self.holding)
        if not name and self.rung not in ("whole", self.mode):
            name = self.rung
        if self.mode == "split":
            text = f"split into micro-batches of {_rows(self.rows_together)}"
        elif self.mode == "chunk":
            text = f"chunks of {_rows(self.rows_together)}"
        else:
            return name or "whole"
        return f"{name} + {text}" if name else text


def _rows(rows: int | None) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One attempt that ran out of memory: facts only, never the exception.

    Attributes:
        plan: What was tried.
        cause: The classified error.
        phase: Where it happened: ``"forward"``, ``"backward"``, ...
        seconds: How long the attempt had run, rollback included.
        reading: The device's counters at the moment of the error, before anything was freed;
            ``None`` where they could not be read.
        garbage_bytes: Freed by the garbage collector afterwards; ``None`` for unknown.
    """

    plan: AttemptPlan
    cause: OOMCause
    phase: str
    seconds: float
    reading: MemoryReading | None = None
    garbage_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Trial:
    """Everything that is known while one batch is being tried; lives for one step.

    Attributes:
        rows: Rows of the batch; ``None`` when it has none.
        signature: Structure, dtypes and shapes; ``None`` when the batch has no rows.
        split_refused: Why the batch cannot be cut, in the words of
            :class:`~lightning_oom.errors.BatchSplitError`; ``None`` when it can.
        can_split: Whether the step's program can run micro-batches at all.
        can_chunk: Whether the step's program can chunk its children.
        keeps_graph: Whether the step runs a backward, and so holds activations for it.
        separability: Checks (once per run and structure) that gradients of parts add up.
        chunk_gain: Estimates (once per run and structure) what chunks would save; ``None`` for
            unknown.
        propose: ``propose(mode)`` gives the rows that the policy would run together now.
        shrink: ``shrink(mode, failed_rows)`` gives fewer rows than failed, or ``None`` after one.
        gradients_droppable: Old gradients were alive when the last attempt failed, and a retry can
            drop them before its forward.
        failures: Attempts so far that ran out of memory, oldest first.
        declined: Rung -> why it had nothing (more) to offer.
    """

    rows: int | None
    signature: BatchSignature | None
    separability: Callable[[], Separability]
    chunk_gain: Callable[[], ChunkGain | None]
    propose: Callable[[Mode], int]
    shrink: Callable[[Mode, int], int | None]
    split_refused: str | None = None
    can_split: bool = True
    can_chunk: bool = True
    keeps_graph: bool = True
    gradients_droppable: bool = False
    failures: list[Failure] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def last(self) -> Failure:
        """The most recent failure."""
        return self.failures[-1]

    @property
    def num_elements(self) -> int | None:
        """Elements of the batch, ``None`` when it has no rows."""
        if self.signature is None or self.rows is None:
            return None
        return self.signature.elements_per_row * self.rows

    def failed_rows(self, mode: Mode) -> int | None:
        """Return the fewest rows together that failed in ``mode``, or ``None``."""
        rows = [
            failure.plan.rows_together
            for failure in self.failures
            if failure.plan.mode == mode
            and failure.plan.rows_together is not None
            and not failure.plan.holding
        ]
        return min(rows) if rows else None

    def decline(self, rung: str, reason: str) -> None:
        """Note why ``rung`` has nothing to offer; the last reason given counts."""
        self.declined[rung] = reason
