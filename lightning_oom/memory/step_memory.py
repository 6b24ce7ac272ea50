"""One reading of a run: the record, and the keys under which loggers get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_oom.memory.phases import PHASES
from lightning_oom.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_oom.memory.kinds import MemoryByKind
    from lightning_oom.memory.process import ProcessSample
    from lightning_oom.memory.reading import MemoryReading

__all__ = ["StepMemory"]

_PHASE_KEYS = {phase: f"memory/by_phase/{phase}_gib" for phase in PHASES}
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What memory held when a step had ended, and the most since the reading before.

    A quantity that the backend cannot give is ``None``, or missing in a mapping.

    Attributes:
        step: Optimizer steps so far; in validate, test and predict: batches of that run so far.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        memory: The device. Its peaks are those since the reading before.
        peaks_by_phase: Bytes allocated at most, by phase (see
            :data:`~lightning_oom.memory.phases.PHASES`), since the reading before.
        peak_phase: The phase that set the peak.
        kinds_by_phase: Who held the memory at the end of each phase of this step; empty without
            ``breakdown=True``.
        processes: The host and the other processes, up to a few seconds old.
    """

    step: int
    stage: str
    memory: MemoryReading
    peaks_by_phase: Mapping[str, int] = field(default_factory=dict)
    peak_phase: str | None = None
    kinds_by_phase: Mapping[str, MemoryByKind] = field(default_factory=dict)
    processes: ProcessSample | None = None

    @property
    def used_fraction(self) -> float | None:
        """Peak over limit, from 0 to 1; what is held now where the backend has no peak."""
        return self.memory.used_fraction

    @property
    def by_kind(self) -> MemoryByKind | None:
        """Who held the memory at that end of a phase of this step at which most was held."""
        return max(self.kinds_by_phase.values(), key=lambda kinds: kinds.total_bytes, default=None)

    def scalars(self) -> dict[str, float]:
        """Return what loggers get, by key; what is not known is absent.

        Example:
            >>> from lightning_oom.memory import MemoryReading
            >>> memory = MemoryReading(device="mps:0", allocated_bytes=2**29, limit_bytes=2**31)
            >>> StepMemory(step=1, stage="train", memory=memory).scalars()
            {'memory/allocated_gib': 0.5, 'memory/limit_gib': 2.0, 'memory/used_fraction': 0.25}
        """
        memory, host = self.memory, self.processes
        sizes = [
            ("memory/allocated_gib", memory.allocated_bytes),
            ("memory/peak_allocated_gib", memory.peak_allocated_bytes),
            ("memory/reserved_gib", memory.reserved_bytes),
            ("memory/peak_reserved_gib", memory.peak_reserved_bytes),
            ("memory/limit_gib", memory.limit_bytes),
            ("memory/headroom_gib", memory.headroom_bytes),
        ]
        if host is not None:
            sizes += [
                ("memory/host_rss_gib", host.host_rss_bytes),
                ("memory/other_processes_gib", host.other_processes_bytes),
                ("memory/this_process_outside_torch_gib", host.outside_torch_bytes),
            ]
        sizes += [(_PHASE_KEYS[phase], size) for phase, size in self.peaks_by_phase.items()]
        kinds = self.by_kind if self.kinds_by_phase else None
        if kinds is not None:
            sizes += [(f"memory/by_kind/{kind}_gib", n) for kind, n in kinds.as_dict().items()]
            sizes.append(("memory/by_kind_total_gib", kinds.total_bytes))
        scalars = {key: size / GIB for key, size in sizes if size is not None}
        for key, value in (
            ("memory/used_fraction", memory.used_fraction),
            ("memory/fragmentation_fraction", memory.fragmentation_fraction),
            ("memory/alloc_retries", memory.alloc_retries),
            (
                "memory/peak_phase",
                None if self.peak_phase is None else _PHASE_NUMBERS[self.peak_phase],
            ),
        ):
            if value is not None:
                scalars[key] = float(value)
        return scalars
