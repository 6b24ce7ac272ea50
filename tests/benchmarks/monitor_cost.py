"""Print what ``MemoryMonitor()`` costs per logged step, beside Lightning's ``DeviceStatsMonitor``.

Run ``python tests/benchmarks/monitor_cost.py``. Both callbacks sit in one trainer and every step is
logged; the time of a callback is what the processor spends inside its hooks, the logger's share
included. Of each fit the median step counts, and of the fits the median. Calls that wait
for the device are counted over the whole fit.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch
from fits import quiet
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WARM_UP_STEPS = 5
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Stopwatch:
    """Adds up the seconds inside a callback's hooks, step by step.

    Args:
        callback: Its hooks are shadowed on the instance.
    """

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.seconds: list[float] = []
        self._now = 0.0
        for hook in HOOKS:
            setattr(callback, hook, self._timed(getattr(callback, hook), ends=hook == HOOKS[-1]))

    def _timed(self, call: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.thread_time()
            call(*args, **kwargs)
            self._now += time.thread_time() - start
            if ends:
                self.seconds.append(self._now)
                self._now = 0.0

        return timed

    def median_us(self) -> float:
        """Of all steps after the first few."""
        return statistics.median(self.seconds[WARM_UP_STEPS:]) * 1e6


class SynchronisationCount:
    """Counts calls that wait for a device, in a ``with`` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._places = [
            (module, module.synchronize)
            for module in (torch.cuda, getattr(torch, "simgpu", None), torch.accelerator)
            if module is not None
        ]
        for module, real in self._places:
            module.synchronize = self._counting(real)
        return self

    def __exit__(self, *_: object) -> None:
        for module, real in self._places:
            module.synchronize = real

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return real(*args, **kwargs)

        return synchronize


LOGGERS: dict[str, Callable[[str], Any]] = {
    "TensorBoard": TensorBoardLogger,
    "CSV": lambda folder: CSVLogger(folder, flush_logs_every_n_steps=10**6),
}


def fit(device: str, logger: str, steps: int, *callbacks: Callback) -> None:
    """Train a small model, every step logged."""
    from lightning_oom.testing import SimulatedGPUStrategy

    where: dict[str, Any] = {"accelerator": device}
    if device == "simgpu":
        where = {"strategy": SimulatedGPUStrategy("1 GiB"), "accelerator": "auto"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet(
            *callbacks,
            max_steps=steps,
            max_epochs=None,
            log_every_n_steps=1,
            logger=LOGGERS[logger](folder),
            **where,
        )
        trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 4 * steps), batch_size=4))


def rounds(device: str, logger: str, steps: int, count: int) -> Iterator[tuple[float, float, int]]:
    """Give the cost of the monitor, of the one beside it, and the synchronisations, of each fit."""
    from lightning_oom import MemoryMonitor

    for turn in range(count):
        ours, theirs = Stopwatch(MemoryMonitor()), Stopwatch(DeviceStatsMonitor())
        pair = (ours.callback, theirs.callback)
        with SynchronisationCount() as waits:
            fit(device, logger, steps, *(pair if turn % 2 else reversed(pair)))
        yield ours.median_us(), theirs.median_us(), waits.count


def main(arguments: list[str] | None = None) -> None:
    """Print one line a device."""
    parser = argparse.ArgumentParser(description="The cost of watching memory.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    devices = ["cpu", "simgpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(f"{'device':<8} {'logger':<12} {'ours us':>8} {'DeviceStats us':>15} {'ratio':>6} waits")
    for device, logger in itertools.product(devices, LOGGERS):
        figures = rounds(device, logger, options.steps, options.rounds)
        ours, theirs, waits = zip(*figures, strict=True)
        a, b = statistics.median(ours), statistics.median(theirs)
        print(
            f"{device:<8} {logger:<12} {a:>8.0f} {b:>15.0f} {a / b:>6.2f} {sum(waits):>5}",
            flush=True,
        )


if __name__ == "__main__":
    be_quiet()
    main()
