"""Peaks by the phase of a step that set them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory.peaks import PeakWatch

if TYPE_CHECKING:
    import torch

    from lightning_oom.memory.peak_ledger import Peaks

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

    def enter(self, phase: str | None, counted: Peaks | None = None) -> None:
        """End the present phase and begin another.

        Args:
            phase: The phase that begins; ``None`` is a time that belongs to none.
            counted: What the counters say, where they have been read just now.
        """
        peaks = self._watch.take(counted)
        if self.phase is not None:
            before = self._peaks.get(self.phase)
            self._peaks[self.phase] = peaks if before is None else before.joined(peaks)
        self.phase = phase

    def take(self, then: str | None = None, counted: Peaks | None = None) -> dict[str, Peaks]:
        """Begin another phase as :meth:`enter` does; return the peaks of each since the last call."""
        self.enter(then, counted)
        peaks, self._peaks = self._peaks, {}
        return peaks
