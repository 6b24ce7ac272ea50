"""CUDA's own record of allocations, switched on before what is to be seen and off after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lightning_oom._torch import cuda_history

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["AllocatorHistory", "HistoryRecorder"]


class HistoryRecorder(Protocol):
    """What switches a recording of the allocator on and off, and writes it."""

    def is_recording(self) -> bool:
        """Say whether somebody records already."""

    def start(self, max_entries: int) -> None:
        """Record into a ring."""

    def stop(self) -> None:
        """Record no more."""

    def dump(self, path: str) -> None:
        """Write what was recorded."""


class _CudaRecorder:
    """Records in the caching allocator of CUDA."""

    def __init__(self) -> None:
        self._switches = cuda_history()

    def is_recording(self) -> bool:
        return bool(self._switches["is_on"]())

    def start(self, max_entries: int) -> None:
        self._switches["start"](max_entries=max_entries, stacks="python")

    def stop(self) -> None:
        self._switches["stop"]()

    def dump(self, path: str) -> None:
        self._switches["dump"](path)


class AllocatorHistory:
    """A recording of the caching allocator between :meth:`start` and :meth:`stop`.

    A recording that somebody else has switched on is used and left on.

    Args:
        device: Only CUDA keeps a history; on other devices nothing happens.
        max_entries: Allocations and frees that are kept, the last ones, at least 1.
        recorder: Who records; default torch.

    Note:
        Cost while on: some 2 us for each allocation and free, and 1 KiB of host memory for each entry.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_entries: int = 100_000,
        recorder: HistoryRecorder | None = None,
    ) -> None:
        self._recorder: HistoryRecorder | None = recorder
        if recorder is None and device.type == "cuda":
            self._recorder = _CudaRecorder()
        self._max_entries = max_entries
        self._is_ours = False

    @property
    def is_available(self) -> bool:
        """Whether this device keeps a history."""
        return self._recorder is not None

    def start(self) -> None:
        """Record from here on, unless somebody does."""
        if self._recorder is not None and not self._is_ours and not self._recorder.is_recording():
            self._is_ours = True
            try:
                self._recorder.start(self._max_entries)
            except BaseException:
                self._is_ours = False
                raise

    def dump(self, path: Path) -> bool:
        """Write a snapshot for ``pytorch.org/memory_viz``.

        Args:
            path: The file, in a folder that exists.

        Returns:
            Whether there was something to write: False on devices without history.

        Raises:
            OSError: The file cannot be written.
        """
        if self._recorder is None:
            return False
        self._recorder.dump(str(path))
        return True

    def stop(self) -> None:
        """End the recording that :meth:`start` began; nothing if there is none."""
        if self._recorder is not None and self._is_ours:
            self._is_ours = False
            self._recorder.stop()
