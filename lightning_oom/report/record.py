"""What was known at the moment memory ran out: one record, data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_oom.memory.kinds import MemoryByKind  # noqa: TC001 - read by from_json
from lightning_oom.memory.nvml import ProcessMemory  # noqa: TC001 - read by from_json
from lightning_oom.memory.reading import MemoryReading  # noqa: TC001 - read by from_json
from lightning_oom.recovery.classify import OOMCause  # noqa: TC001 - read by from_json
from lightning_oom.report import plain
from lightning_oom.report.amounts import Amounts, read_amounts

__all__ = [
    "BatchLeaf",
    "CodeLine",
    "Diagnosis",
    "FailedAttempt",
    "GrowingThing",
    "LiveTensor",
    "ModuleMemory",
    "OOMReport",
    "OptimizerMemory",
    "Remedy",
    "TimelinePoint",
]

FORMAT_VERSION = 1
"""Raised when a field changes its meaning. Fields that are added or missing do not raise it."""

_ROUNDING = 0.01  # the text of an error has two decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """One line of a traceback.

    Attributes:
        path: The file as the traceback names it.
        line: Its number, from 1.
        function: The function it is in.
    """

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return ``"model.py:12 in forward"``."""
        name = self.path.replace("\\", "/").rpartition("/")[2]
        return f"{name}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLeaf:
    """One leaf of the batch: what it is, not what is in it.

    Attributes:
        path: Where it is, as in ``"batch['x'][0]"``.
        kind: ``"Tensor"``, or the type of a leaf that is none.
        shape: Of a tensor; ``None`` for other leaves.
        dtype: Of a tensor, as in ``"float32"``.
        device: Where a tensor is.
        num_bytes: What its storage holds.
        values: The first numbers in it as text, where values were asked for; ``None`` otherwise.
    """

    path: str
    kind: str = "Tensor"
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    num_bytes: int | None = None
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One tensor that was alive on the device.

    Attributes:
        owner: What holds it: ``"model.head.weight"``, ``"local 'scores' of forward"``, ...
        kind: A kind of :class:`~lightning_oom.memory.kinds.MemoryByKind` without its unit.
        shape: Its shape; ``None`` for unknown.
        dtype: As in ``"float32"``; ``None`` for unknown.
        num_bytes: What its storage holds.
        made_at: The line that allocated it; ``None`` without the allocator's history.
    """

    owner: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str | None
    num_bytes: int
    made_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """One module of the model.

    Attributes:
        path: Its dotted name; ``""`` is the model itself.
        type_name: Its class.
        parameters_bytes: Its parameters, those of its children included.
        saved_bytes: What autograd kept for the backward of its operators, children included, counted
            for the module whose parameters were used last; ``None`` where that cannot be seen.
        is_leaf: It has no children.
    """

    path: str
    type_name: str
    parameters_bytes: int
    saved_bytes: int | None = None
    is_leaf: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """One optimizer.

    Attributes:
        type_name: Its class.
        state_bytes: What its state holds now.
        expected_bytes: What its state holds after the first step; ``None`` for an unknown class.
        foreach: Whether it updates all parameters in one call, which takes temporaries of their
            bytes; ``None`` where it chooses itself.
    """

    type_name: str
    state_bytes: int
    expected_bytes: int | None = None
    foreach: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """What memory held at the end of one step.

    Attributes:
        step: The optimizer step.
        allocated_bytes: Held by tensors then.
        peak_bytes: The most since the previous point.
        reserved_bytes: Held by the allocator then.
    """

    step: int
    allocated_bytes: int
    peak_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingThing:
    """Something that a leak finder saw grow.

    Attributes:
        path: The attribute that holds it.
        num_bytes: What it holds.
        bytes_per_step: By how much it grows.
        holds_graph: It keeps the graph of its step, and with it the activations.
    """

    path: str
    num_bytes: int
    bytes_per_step: float
    holds_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One attempt of the recovery that ran out of memory.

    Attributes:
        what: In words: ``"split into micro-batches of 8 rows"``.
        phase: Where it failed.
        seconds: What it cost, rollback included; ``None`` for unknown.
        requested_bytes: What it asked for.
    """

    what: str
    phase: str
    seconds: float | None = None
    requested_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why memory ran out.

    Attributes:
        cause: A name out of :data:`~lightning_oom.report.diagnosis.CAUSES`.
        title: One sentence.
        evidence: What in the report says so.
        weight: How sure that is, from 0 to 1.
    """

    cause: str
    title: str
    evidence: tuple[str, ...]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to do about it.

    Attributes:
        action: What to do, in one sentence.
        setting: What to write for it; ``None`` where there is nothing to write.
        saving_bytes: What that frees at this moment, as predicted from the report; ``None`` for
            unknown.
        cost: What it costs, in words.
        suffices: The saving is at least what was missing; ``None`` where one is not known.
    """

    action: str
    cost: str
    setting: str | None = None
    saving_bytes: int | None = None
    suffices: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OOMReport:
    """Everything known at the moment of an out-of-memory error: no tensor, no exception.

    ``None`` or an empty tuple stands for what could not be found out.

    Attributes:
        cause: What the error says.
        made_at: When, in ISO 8601 with the offset from UTC.
        rank: The process, from 0.
        device: Where the model runs.
        device_name: What the driver calls the device.
        is_mig: The device is a part of a GPU that is divided by MIG.
        stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, ``"sanity_check"``.
        phase: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"transfer"``, ``"restore"``, ...
        epoch: From 0.
        step: Optimizer steps done.
        batch_index: From 0.
        module_path: The innermost module whose forward was running; ``"model"`` is the root.
        lines: The traceback, outermost call first.
        batch: Its leaves.
        rows: Its rows.
        reading: The counters of the device.
        kinds: What the allocated memory is.
        tensors: The largest live tensors, largest first.
        modules: Modules that hold or saved something, in order.
        optimizers: The optimizers.
        uses_graph: The stage has a backward, or autograd has saved something all the same.
        precision: Of the trainer, as in ``"32-true"``.
        strategy: Class of the trainer's strategy.
        accumulate: Batches for each optimizer step.
        has_recovery: ``OOMRecovery`` was among the callbacks.
        allocator_settings: Of the environment, as in ``"expandable_segments:True"``.
        memory_summary: The allocator's own table.
        processes: Who is on the device, this process included; ``None`` where nobody can tell.
        own_pid: The id of this process.
        other_processes_bytes: What the others hold.
        timeline: Memory at the end of earlier steps, oldest first.
        growing: What a leak finder saw grow.
        attempts: What the recovery tried, oldest first.
        declined: Why the recovery had nothing more to offer.
        outcome: ``"raised"``, ``"recovered"`` or ``"skipped"``.
        torch_version: The release.
        platform: As in ``"linux"``.
        diagnoses: Causes that the report speaks for, the likeliest first.
        remedies: What to do, what should be tried first first.

    Example:
        >>> from lightning_oom import classify_oom
        >>> report = OOMReport(cause=classify_oom(MemoryError()), phase="forward")
        >>> OOMReport.from_json(report.to_json()) == report
        True
    """

    cause: OOMCause
    made_at: str | None = None
    rank: int = 0
    device: str | None = None
    device_name: str | None = None
    is_mig: bool | None = None
    stage: str | None = None
    phase: str | None = None
    epoch: int | None = None
    step: int | None = None
    batch_index: int | None = None
    module_path: str | None = None
    lines: tuple[CodeLine, ...] = ()
    batch: tuple[BatchLeaf, ...] = ()
    rows: int | None = None
    reading: MemoryReading | None = None
    kinds: MemoryByKind | None = None
    tensors: tuple[LiveTensor, ...] = ()
    modules: tuple[ModuleMemory, ...] = ()
    optimizers: tuple[OptimizerMemory, ...] = ()
    uses_graph: bool | None = None
    precision: str | None = None
    strategy: str | None = None
    accumulate: int | None = None
    has_recovery: bool | None = None
    allocator_settings: str | None = None
    memory_summary: str | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    own_pid: int | None = None
    other_processes_bytes: int | None = None
    timeline: tuple[TimelinePoint, ...] = ()
    growing: tuple[GrowingThing, ...] = ()
    attempts: tuple[FailedAttempt, ...] = ()
    declined: tuple[str, ...] = ()
    outcome: Literal["raised", "recovered", "skipped"] = "raised"
    torch_version: str | None = None
    platform: str | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    # -- amounts, from wherever they are known
    @property
    def requested_bytes(self) -> int | None:
        """Return what was asked for."""
        return self.cause.requested_bytes

    @property
    def amounts(self) -> Amounts:
        """Return what was held and free, all of one moment."""
        return read_amounts(self.cause, self.reading, self.device)

    @property
    def limit_bytes(self) -> int | None:
        """Return what the whole device has, or what the process is allowed of it."""
        return self.amounts.limit_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """Return what tensors held."""
        return self.amounts.allocated_bytes

    @property
    def unallocated_bytes(self) -> int | None:
        """Return what the allocator held and no tensor used; ``None`` where nothing is cached."""
        return self.amounts.unallocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Return what the allocator held; ``None`` for a backend without a caching allocator."""
        return self.amounts.reserved_bytes

    @property
    def free_bytes(self) -> int | None:
        """Return what the device could still give."""
        return self.amounts.free_bytes

    @property
    def missing_bytes(self) -> int | None:
        """Return by how much the request was too large, as if nothing were fragmented."""
        amounts = self.amounts
        if self.requested_bytes is None or amounts.room_bytes is None:
            return None
        available = amounts.room_bytes + (amounts.unallocated_bytes or 0)
        return max(self.requested_bytes - available, 0)

    @property
    def gone_bytes(self) -> int:
        """Return what tensors held at the error and the breakdown, made a little later, lacks.

        Operators and the backward let go of it as the error came up.
        """
        if self.kinds is None or self.cause.allocated_bytes is None:
            return 0
        gone = self.cause.allocated_bytes - self.kinds.total_bytes
        return gone if gone > _ROUNDING * self.cause.allocated_bytes else 0

    # -- JSON
    def to_json(self) -> str:
        """Return the report as JSON, with the version of its form."""
        return plain.to_json(self, version=FORMAT_VERSION)

    @classmethod
    def from_json(cls, text: str) -> OOMReport:
        """Read a report that :meth:`to_json` wrote, of this release or an older one.

        Args:
            text: The JSON.

        Raises:
            ValueError: It is no such report, or one of a later form.
        """
        return plain.from_json(cls, text, version=FORMAT_VERSION)

    def but(self, **changes: object) -> OOMReport:
        """Return the report with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked at run time
