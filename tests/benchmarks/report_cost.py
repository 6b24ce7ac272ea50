"""What a report costs a run with one OOM in 1,000 steps, beside the same run without the callback.

    python tests/benchmarks/report_cost.py [steps]

Every run is on a simulated GPU and has one batch that does not fit and is recovered from. Time in the
callback's own hooks is added up, so that noise of a shared machine does not drown it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from silence import be_quiet  # isort: skip  puts the tests on the path

from fakes import TinyRegressor, batches_of
from lightning.pytorch import Trainer

from lightning_oom import OOMRecovery, OOMReporter
from lightning_oom.testing import SimulatedGPUStrategy

HOOKS = (
    "setup",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_oom",
    "on_oom_outcome",
    "on_exception",
    "teardown",
)


class TimedReporter(OOMReporter):
    """Adds up the time in its hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = dict.fromkeys(HOOKS, 0.0)
        for name in HOOKS:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, hook: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            hook(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started

        return run


def fit(steps: int, **options: Any) -> tuple[float, TimedReporter]:
    """Train with one oversized batch in the middle; return seconds in all, and the callback."""
    reporter = TimedReporter(dirpath=tempfile.mkdtemp(), **options)
    model = TinyRegressor(fits_rows=64, hidden=64)
    rows = [32] * steps
    rows[steps // 2] = 100
    trainer = Trainer(
        strategy=SimulatedGPUStrategy(),
        callbacks=[reporter, OOMRecovery(verbose=False)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(model, batches_of(rows))
    return time.perf_counter() - started, reporter


def main(steps: int) -> None:
    """Print one table."""
    be_quiet()
    fit(20, on_recovered=True)  # imports
    print(f"{'run':28}{'fit s':>8}{'at the OOM ms':>15}{'idle ms':>9}{'share':>8}")
    for name, options in (("nothing reported", {}), ("reported", {"on_recovered": True})):
        seconds, reporter = fit(steps, **options)
        spent = reporter.seconds
        at_oom = 1e3 * (spent["on_oom"] + spent["on_oom_outcome"])
        idle = 1e3 * sum(spent.values()) - at_oom
        share = (at_oom + idle) / 1e3 / seconds
        print(f"{name:28}{seconds:8.1f}{at_oom:15.1f}{idle:9.1f}{share:8.2%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
