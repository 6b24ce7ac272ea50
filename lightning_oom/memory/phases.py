"""Peaks by the phase of a step that set them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory.peak_ledger import Peaks
from lightning_oom.memory.peaks import PeakWatch

if TYPE_CHECKING:
    import torch

__all__ = ["PHASES", "PhasePeaks"]

PHASES = ("forward", "backward", "optimizer", "validation", "test", "predict")
"""The phases that can set a peak. ``memory/peak_phase`` is the position in this tuple."""


class PhasePeaks:
    """Follows a run through its phases and keeps the highest peak of each.

    Args:
        device: Where the run is.

    Note:
        Cost of :meth:`enter`: one reading and one reset of the peak counters, no synchronisation:
        what a phase has put in the queue of the device is allocated when it is put there.

    Example:
        >>> import torch
        >>> from lightning_oom.testing import memory_limit
        >>> with memory_limit("64 MiB", device="cpu"):
        ...     peaks = PhasePeaks("cpu")
        ...     peaks.enter("forward")
        ...     x = torch.ones(1024)
        ...     del x
        ...     peaks.enter("backward")
        ...     peaks.take()
        {'forward': Peaks(allocated_bytes=4096, reserved_bytes=None), 'backward': Peaks(allocated_bytes=0, reserved_bytes=None)}
    """

    def __init__(self, device: torch.device | str) -> None:
        self.phase: str | None = None
        self._watch = PeakWatch(device)
        self._peaks: dict[str, Peaks] = {}

    def enter(self, phase: str | None) -> None:
        """End the present phase and begin another; ``None`` is a time that belongs to none."""
        peaks = self._watch.take()
        if self.phase is not None:
            self._peaks[self.phase] = self._peaks.get(self.phase, Peaks()).joined(peaks)
        self.phase = phase

    def take(self) -> dict[str, Peaks]:
        """Return the peaks of every phase since the last call; the present phase goes on."""
        self.enter(self.phase)
        peaks, self._peaks = self._peaks, {}
        return peaks
