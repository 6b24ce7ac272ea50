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
        sizes = {
            "allocated": memory.allocated_bytes,
            "peak_allocated": memory.peak_allocated_bytes,
            "reserved": memory.reserved_bytes,
            "peak_reserved": memory.peak_reserved_bytes,
            "limit": memory.limit_bytes,
            "headroom": memory.headroom_bytes,
            "host_rss": None if host is None else host.host_rss_bytes,
            "other_processes": None if host is None else host.other_processes_bytes,
            "this_process_outside_torch": None if host is None else host.outside_torch_bytes,
            **{f"by_phase/{phase}": size for phase, size in self.peaks_by_phase.items()},
        }
        kinds = self.by_kind
        if kinds is not None:
            sizes |= {f"by_kind/{kind}": size for kind, size in kinds.as_dict().items()}
            sizes["by_kind_total"] = kinds.total_bytes
        plain = {
            "used_fraction": memory.used_fraction,
            "fragmentation_fraction": memory.fragmentation_fraction,
            "alloc_retries": memory.alloc_retries,
            "peak_phase": None if self.peak_phase is None else PHASES.index(self.peak_phase),
        }
        return {
            **{
                f"memory/{name}_gib": size / GIB for name, size in sizes.items() if size is not None
            },
            **{
                f"memory/{name}": float(value) for name, value in plain.items() if value is not None
            },
        }
