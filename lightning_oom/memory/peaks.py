"""Peaks since a moment of one's own, however often others reset the counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory.devices import one_device, read_peaks, reader_of
from lightning_oom.memory.peak_ledger import Peaks, fold_peaks, keep_peaks

if TYPE_CHECKING:
    import torch

__all__ = ["PeakWatch"]

_NOTHING = Peaks()


class PeakWatch:
    """The most that a device held since this watch was made or last taken.

    Any number of watches may look at one device: a watch that starts anew resets the counters of the
    backend, and the peak that ends there is first handed to the others. :func:`reset_peak` does the
    same.

    Args:
        device: The device, or its name.

    Note:
        A reset that does not go through this package, such as a call of
        ``torch.cuda.reset_peak_memory_stats``, hides from every watch what came before it.
        The counters themselves show the peak since the last reset, whoever did it.

        Cost of :meth:`take`: one reading and one reset of the counters, no synchronisation.

    Example:
        >>> import torch
        >>> from lightning_oom.testing import memory_limit
        >>> with memory_limit("64 MiB", device="cpu"):
        ...     mine, other = PeakWatch("cpu"), PeakWatch("cpu")
        ...     x = torch.ones(1024)
        ...     del x
        ...     _ = other.take()  # resets the counter
        ...     mine.take().allocated_bytes, other.take().allocated_bytes
        (4096, 0)
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = one_device(device)
        self._folded = _NOTHING
        keep_peaks(self.device, self)
        self.restart()

    def fold(self, peaks: Peaks) -> None:
        """Remember a peak that the counters will not show any more."""
        self._folded = self._folded.joined(peaks)

    def read(self) -> Peaks:
        """Return the peaks so far, and go on."""
        return self._folded.joined(read_peaks(self.device))

    def take(self, counted: Peaks | None = None) -> Peaks:
        """Return the peaks so far, and start again from what is held now.

        Args:
            counted: What the counters say, where they have been read just now.
        """
        reader = reader_of(self.device)
        if counted is None:
            counted = reader.take_peaks(self.device)
        else:
            reader.reset_peak(self.device)
        fold_peaks(self.device, counted)  # into this watch too
        peaks, self._folded = self._folded, _NOTHING
        return peaks

    def restart(self) -> None:
        """Start again from what is held now."""
        self.take()
