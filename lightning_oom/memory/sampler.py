"""Look at something slow now and then, on a thread of its own."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundSampler"]

T = TypeVar("T")


class BackgroundSampler(Generic[T]):
    """Calls a probe at intervals and keeps its last answer, which costs nothing to look at.

    The first answer is there when :meth:`start` returns. A probe that raises gives ``None`` until it
    answers again; it never ends the thread, let alone the run.

    Args:
        probe: Called without arguments, one call at a time.
        interval_seconds: Between the end of a call and the next one, above 0.

    Attributes:
        latest: The last answer, ``None`` where there is none.

    Raises:
        ValueError: ``interval_seconds`` is not above 0.

    Example:
        >>> sampler = BackgroundSampler(lambda: "seen", interval_seconds=60)
        >>> sampler.start()
        >>> sampler.latest
        'seen'
        >>> sampler.stop()
    """

    def __init__(self, probe: Callable[[], T], *, interval_seconds: float = 2.0) -> None:
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds is above 0, got {interval_seconds!r}")
        self.latest: T | None = None
        self._probe = probe
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid: int | None = None

    def start(self) -> None:
        """Ask the probe once, then go on in the background; nothing while it is running."""
        if self._thread is not None:
            return
        self._ask()
        self._stopped.clear()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after a call that is under way; the last answer stays."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and self._pid == os.getpid():  # a fork has no threads to wait for
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            self._ask()

    def _ask(self) -> None:
        try:
            self.latest = self._probe()
        except Exception:  # the next call may do better
            self.latest = None
