"""Reads the memory of a run as it goes through its steps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from lightning_oom.memory.devices import one_device, read_memory, reader_of
from lightning_oom.memory.kinds import MemoryByKind, read_kinds
from lightning_oom.memory.peak_ledger import Peaks
from lightning_oom.memory.phases import PhasePeaks
from lightning_oom.memory.process import ProcessProbe, ProcessSample
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.memory.registry import find_reader
from lightning_oom.memory.sampler import BackgroundSampler
from lightning_oom.memory.saved_tensors import SavedTensorTracker
from lightning_oom.memory.step_memory import StepMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lightning_oom.memory.registry import DeviceReader

__all__ = ["StepReader"]


class StepReader:
    """Follows one run on one device: phases, breakdowns, and what a background thread saw.

    Args:
        device: Where the run is.
        sample_seconds: Between two looks at host, other processes and the driver, above 0.

    Attributes:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device | str, *, sample_seconds: float = 2.0) -> None:
        self.device = one_device(device)
        self._probe = ProcessProbe(self.device)
        self._sampler: BackgroundSampler[ProcessSample] = BackgroundSampler(
            self._probe, interval_seconds=sample_seconds
        )
        self._own = psutil.Process()
        self._sample_seconds = sample_seconds
        self._asks_again = 0.0
        self._whole: tuple[DeviceReader, MemoryReading] | None = None
        self._phases: PhasePeaks | None = None
        self._saved = SavedTensorTracker()
        self._kinds: dict[str, MemoryByKind] = {}

    def open(self) -> None:
        """Begin: take the first sample, and start peaks anew where the backend has any."""
        self._sampler.start()
        if read_memory(self.device).peak_allocated_bytes is not None:
            self._phases = PhasePeaks(self.device)

    def close(self) -> None:
        """End the thread and the NVML session; harmless the second time."""
        self._saved.stop()
        self._saved.forget()
        self._sampler.stop()
        self._probe.close()
        self._phases = None

    def enter(self, phase: str) -> None:
        """Begin a phase; nothing where the backend has no peak."""
        if self._phases is not None:
            self._phases.enter(phase)

    def begin_breakdown(self) -> None:
        """Watch what autograd saves from here on."""
        self._kinds = {}
        self._saved.start()

    def break_down(
        self,
        phase: str,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        batch: Any,
    ) -> None:
        """Note who holds the memory at the end of a phase; the fullest one of its name counts."""
        kinds = read_kinds(
            module, optimizers, batch, saved=self._saved, reading=self._read_device()
        )
        before = self._kinds.get(phase)
        if before is None or kinds.total_bytes >= before.total_bytes:
            self._kinds[phase] = kinds

    def end_breakdown(self) -> None:
        """Watch no more; what was noted stays for the next :meth:`read`."""
        self._saved.stop()
        self._saved.forget()

    def read(self, step: int, stage: str, *, then: str | None = None) -> StepMemory:
        """Read now.

        Args:
            step: What the reading calls itself.
            stage: Likewise.
            then: The phase that begins now; ``None`` goes on with the present one.

        Returns:
            The reading. Peaks are those since the previous call.
        """
        memory, sizes = self._read_device(), {}
        if self._phases is not None:
            allocated, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
            counted = Peaks(allocated_bytes=allocated, reserved_bytes=reserved)
            peaks = counted
            for phase, found in self._phases.take(then or self._phases.phase, counted).items():
                peaks = peaks.joined(found)
                if found.allocated_bytes is not None:
                    sizes[phase] = found.allocated_bytes
            if peaks != counted:
                memory = replace(
                    memory,
                    peak_allocated_bytes=peaks.allocated_bytes,
                    peak_reserved_bytes=peaks.reserved_bytes,
                )
        kinds, self._kinds = self._kinds, {}
        return StepMemory(
            step=step,
            stage=stage,
            memory=memory,
            peaks_by_phase=sizes,
            peak_phase=max(sizes, key=sizes.__getitem__, default=None),
            kinds_by_phase=kinds,
            processes=self._sampler.latest,
        )

    def _read_device(self) -> MemoryReading:
        """Read the device; what only other processes change is asked for now and then."""
        sample = self._sampler.latest
        reader = reader_of(self.device)
        if self.device.type == "cpu" and sample is not None and find_reader(self.device) is None:
            return MemoryReading(
                device="cpu",
                allocated_bytes=int(self._own.memory_info().rss),
                limit_bytes=sample.host_limit_bytes,
                free_bytes=sample.host_free_bytes,
            )
        now = time.monotonic()
        if self._whole is None or self._whole[0] is not reader or now >= self._asks_again:
            self._asks_again = now + self._sample_seconds
            self._whole = reader, reader.read(self.device)
            return self._whole[1]
        return reader.read_again(self.device, self._whole[1])
