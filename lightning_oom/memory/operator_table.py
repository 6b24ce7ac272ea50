"""torch.profiler for a few steps, and a table of the operators that take most memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from lightning_oom._torch import is_profiling

if TYPE_CHECKING:
    import torch

__all__ = ["OperatorTable"]


class OperatorTable:
    """Profiles the memory of operators between :meth:`start` and :meth:`stop`.

    Args:
        device: Operators are sorted by what they take there; by host memory on the CPU and on
            devices that torch's profiler does not know.

    Note:
        The profiler keeps every event until :meth:`stop`: a few steps are enough, many fill the host.
        It cannot run inside another one, such as Lightning's ``PyTorchProfiler``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None
        self._averages: Any = None

    def start(self) -> None:
        """Profile from here on.

        Raises:
            RuntimeError: Another profiler runs.
        """
        if is_profiling():
            raise RuntimeError("another profiler of torch runs, and there can be only one")
        activities = [ProfilerActivity.CPU]
        activity = getattr(ProfilerActivity, self._device.type.upper(), None)
        if activity is not None and activity is not ProfilerActivity.CPU:
            activities.append(activity)
        running = profile(activities=activities, profile_memory=True, record_shapes=False)
        running.start()
        self._profile = running

    def stop(self) -> None:
        """Profile no more; nothing if it does not run."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
            self._averages = running.key_averages()

    def render(self, *, rows: int) -> str | None:
        """Return the table, those operators first that allocate most themselves.

        Args:
            rows: Operators in it, at least 1.

        Returns:
            The text; ``None`` if nothing was profiled.
        """
        if self._averages is None:
            return None
        keys = ["self_cpu_memory_usage"]
        if self._device.type in ("cuda", "xpu"):
            keys = ["self_device_memory_usage", f"self_{self._device.type}_memory_usage", *keys]
        for key in keys:
            try:
                return str(self._averages.table(sort_by=key, row_limit=rows))
            except (AttributeError, AssertionError, KeyError):  # noqa: PERF203 - named otherwise in older releases
                continue
        return None
