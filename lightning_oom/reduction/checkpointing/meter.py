"""What checkpointing saves and costs, measured on a few real steps."""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.memory.allocations import AllocationWatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CheckpointMeter"]


class CheckpointMeter:
    """Measures recomputations: their bytes in one step, their time in another.

    What a recomputation has allocated and still holds when it ends is what the block would have
    held from its forward on. Time is taken by events on CUDA, which wait for nothing, and by the
    clock on the CPU; other devices tell none.

    Args:
        device: Where the model computes.

    Attributes:
        saved_bytes: Sum over the recomputations of the step whose bytes were measured.
        largest_bytes: The largest of them: what is there again at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.saved_bytes = 0
        self.largest_bytes = 0
        self._device = device
        self._measures: str | None = None
        self._recomputing: list[tuple[Any, Any]] = []
        self._step: tuple[Any, Any] | None = None
        self._began: Any = None

    @property
    def is_measuring(self) -> bool:
        """Whether the present step is measured."""
        return self._measures is not None

    def measure_bytes(self) -> None:
        """Measure the bytes of the step that begins here."""
        self._measures = "bytes"

    def measure_time(self) -> None:
        """Measure the time of the step that begins here."""
        self._measures = "time"
        self._recomputing = []
        self._began = self._now()

    def stop(self) -> None:
        """End the measured step."""
        if self._measures == "time":
            self._step = self._began, self._now()
        self._measures = None

    def seconds(self) -> tuple[float, float] | None:
        """Return the time of the recomputations of a step, and of the whole step.

        Returns:
            ``None`` while a device still works on it, or where no time was taken.
        """
        if self._step is None or self._step[0] is None:
            return None
        if self._device.type == "cuda" and not self._step[1].query():
            return None
        return sum(map(self._between, self._recomputing)), self._between(self._step)

    @contextmanager
    def recomputing(self, path: str) -> Iterator[None]:
        """Measure one recomputation inside of the block.

        Args:
            path: Of the block.
        """
        if self._measures == "bytes":
            yield from self._counting()
        else:
            began = self._now()
            try:
                yield
            finally:
                self._recomputing.append((began, self._now()))

    def _counting(self) -> Iterator[None]:
        watcher = AllocationWatcher(device=self._device)
        try:
            with watcher:
                yield
        except BaseException as error:
            # The recomputation stops early, by an exception whose frames hold what is not saved.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            held_bytes = watcher.ledger.live_bytes
            self.saved_bytes += held_bytes
            self.largest_bytes = max(self.largest_bytes, held_bytes)

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, pair: tuple[Any, Any]) -> float:
        began, ended = pair
        if self._device.type == "cpu":
            return float(ended - began)
        return float(began.elapsed_time(ended)) / 1000
