"""Where a callback's numbers go: loggers, warnings, the progress bar."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning_oom.errors import LightningOOMWarning, MemoryLeakWarning, NearLimitWarning
from lightning_oom.undo import Undo, shadow
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.memory.step_memory import StepMemory

__all__ = ["LoggerOutlet", "show_in_progress_bar", "warn_leak", "warn_near_limit"]


class LoggerOutlet:
    """Writes rows to every logger of a trainer; one that fails is named once and never hides more.

    Args:
        name: Who writes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: set[str] = set()

    def log(self, trainer: Trainer, scalars: Mapping[str, float], *, step: int) -> None:
        """Write one row; nothing without loggers or scalars."""
        if not scalars:
            return
        for logger in trainer.loggers:
            try:
                logger.log_metrics(dict(scalars), step=step)
            except Exception as error:  # noqa: PERF203 - every logger gets its turn
                self._warn_once(type(logger).__name__, f"{type(error).__name__}: {error}")

    def _warn_once(self, logger: str, text: str) -> None:
        if logger not in self._failed:
            self._failed.add(logger)
            warnings.warn(
                f"{self._name} could not log to {logger}: {text}", LightningOOMWarning, stacklevel=2
            )


def warn_near_limit(reading: StepMemory, *, above: float) -> None:
    """Say which step and phase came how near to the limit."""
    phase = "" if reading.peak_phase is None else f" in {reading.peak_phase}"
    warnings.warn(
        f"{reading.memory.device} came to {reading.used_fraction:.1%} of its limit of "
        f"{format_bytes(reading.memory.limit_bytes or 0)}{phase}, by {reading.stage} step "
        f"{reading.step}; warn_above is {above}.",
        NearLimitWarning,
        stacklevel=2,
    )


def warn_leak(leak: Any) -> None:
    """Say what grows, by how much, and what to do about it."""
    warnings.warn(
        f"{leak.path} grows by {format_bytes(int(leak.bytes_per_step))} a step: "
        f"{leak.num_tensors} tensors of {format_bytes(leak.num_bytes)} so far. {leak.advice}",
        MemoryLeakWarning,
        stacklevel=2,
    )


def show_in_progress_bar(trainer: Trainer, latest: Callable[[], StepMemory | None]) -> Undo:
    """Add ``memory=peak/limit`` to what the progress bar shows.

    Args:
        trainer: Its progress bar gets the entry; nothing happens where there is none.
        latest: Gives the reading to show, ``None`` for none yet.

    Returns:
        The undo.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return Undo(lambda: None)
    get_metrics = bar.get_metrics

    def with_memory(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        items: dict[str, Any] = get_metrics(trainer, pl_module)
        reading = latest()
        return items if reading is None else {**items, "memory": _short(reading)}

    return shadow(bar, "get_metrics", with_memory)


def _short(reading: StepMemory) -> str:
    """Show peak and limit in the few characters of a progress bar."""
    memory = reading.memory
    held = memory.peak_allocated_bytes
    held = memory.allocated_bytes if held is None else held
    sizes = [size for size in (held, memory.limit_bytes) if size is not None]
    return "/".join(format_bytes(size).replace(" ", "") for size in sizes)
