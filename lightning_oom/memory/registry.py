"""Who can read the memory of which device: an open registry with an undo for each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory.peak_ledger import Peaks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_oom.memory.reading import MemoryReading

__all__ = ["DeviceReader", "find_reader", "register_reader"]


class DeviceReader:
    """Reads the memory of the devices of one type; subclass it to teach the package another.

    Only :meth:`read` has to be written. No method may wait for the device or raise for a device
    that exists; a quantity that is not known is left out of the reading.
    """

    def covers(self, device: torch.device) -> bool:
        """Say whether this reader is for ``device``; the next one is asked if not."""
        return True

    def read(self, device: torch.device) -> MemoryReading:
        """Return what the memory of ``device`` holds now."""
        raise NotImplementedError

    def read_again(self, device: torch.device, before: MemoryReading) -> MemoryReading:
        """Return a reading that takes from ``before`` what only other processes change.

        Override it where that saves a question to the driver. ``before`` is by this reader, of the
        same device, and a few seconds old at most.
        """
        return self.read(device)

    def read_peaks(self, device: torch.device) -> Peaks:
        """Return the peaks of ``device`` alone; override it where that is cheaper than a reading."""
        reading = self.read(device)
        return Peaks(
            allocated_bytes=reading.peak_allocated_bytes,
            reserved_bytes=reading.peak_reserved_bytes,
        )

    def reset_peak(self, device: torch.device) -> None:
        """Let the peaks of ``device`` start again from what is held now."""

    def take_peaks(self, device: torch.device) -> Peaks:
        """Return the peaks and let them start again; override it where one call can do both."""
        peaks = self.read_peaks(device)
        self.reset_peak(device)
        return peaks

    def release_cached(self, device: torch.device) -> int | None:
        """Give cached memory back to ``device``; return the bytes, ``None`` if they are unknown."""
        return None


_readers: dict[str, list[DeviceReader]] = {}


def register_reader(device_type: str, reader: DeviceReader) -> Callable[[], None]:
    """Let ``reader`` read the devices of a type; the one registered last is asked first.

    Args:
        device_type: The type as torch spells it, such as ``"cpu"`` or ``"hpu"``.
        reader: The reader. It is held until the undo is called.

    Returns:
        The undo. It removes this entry alone, whatever was registered since, and may be called
        more than once.

    Example:
        >>> import torch
        >>> from lightning_oom.memory import MemoryReading, read_memory
        >>> class Fixed(DeviceReader):
        ...     def read(self, device: torch.device) -> MemoryReading:
        ...         return MemoryReading(device=str(device), allocated_bytes=1)
        >>> undo = register_reader("cpu", Fixed())
        >>> read_memory("cpu").allocated_bytes
        1
        >>> undo()
        >>> read_memory("cpu").allocated_bytes > 1
        True
    """
    entries = _readers.setdefault(device_type, [])
    entries.append(reader)

    def undo() -> None:
        for position, entry in enumerate(entries):
            if entry is reader:
                del entries[position]
                return

    return undo


def find_reader(device: torch.device, *, below: DeviceReader | None = None) -> DeviceReader | None:
    """Return the registered reader that covers ``device``, ``None`` if there is none.

    Args:
        device: The device to read.
        below: Ask only those that were registered before this one.
    """
    entries = _readers.get(device.type)
    if not entries:
        return None
    if below is not None and below in entries:
        entries = entries[: entries.index(below)]
    return next((reader for reader in reversed(entries) if reader.covers(device)), None)
