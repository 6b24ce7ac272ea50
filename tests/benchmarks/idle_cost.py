"""Print what ``OOMRecovery`` costs in a run that never runs out of memory.

Run ``python tests/benchmarks/idle_cost.py``. Bare and guarded fits take turns in one process; the
time of a step is that between two ``on_train_batch_start``: of the processor on one thread, so that
a shared machine matters less, or with ``--wall`` of the clock. Of each fit the median step counts,
and of the fits the median difference of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

from fits import quiet
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP_STEPS = 5


class StepTimes(Callback):
    """Seconds between the starts of neighbouring steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Note the time."""
        self.starts.append(self.clock())

    def median_seconds(self) -> float:
        """Of all steps after the first few."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return statistics.median([b - a for a, b in pairs][WARM_UP_STEPS:])


def boring() -> tuple[LightningModule, Any]:
    """One linear layer: a step is nearly all Lightning."""
    return BoringModel(), DataLoader(RandomDataset(32, 4000), batch_size=4)


def demo() -> tuple[LightningModule, Any]:
    """The model and the text of the main job."""
    from lightning_oom.cli.demo_model import TinyGPT
    from lightning_oom.cli.demo_text import StdlibFunctions

    return TinyGPT(), StdlibFunctions()


def campaign() -> tuple[LightningModule, Any]:
    """Eight torchmetrics, BatchNorm, logs from five hooks: all that a snapshot has to remember."""
    from campaign_model import CampaignModel, campaign_loader

    return CampaignModel(), campaign_loader()


def step_seconds(
    make: Callable[[], tuple[LightningModule, Any]],
    steps: int,
    *,
    on: bool,
    clock: Callable[[], float],
) -> float:
    """Median time of a step of one fit."""
    from lightning_oom import OOMRecovery

    times = StepTimes(clock)
    model, loader = make()
    guard = [OOMRecovery(verbose=False)] if on else []
    trainer = quiet(*guard, times, max_steps=steps, max_epochs=None, logger=False)
    if hasattr(loader, "setup"):
        trainer.fit(model, datamodule=loader)
    else:
        trainer.fit(model, loader)
    return times.median_seconds()


def main(arguments: list[str] | None = None) -> None:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description="The cost of an idle guard.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true", help="time of the clock")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.wall else time.process_time
    print(f"{'model':<16} {'bare us/step':>12} {'guarded us/step':>15} {'cost us':>8} {'ratio':>7}")
    for name, make, steps in (
        ("BoringModel", boring, 300),
        ("campaign model", campaign, 60),
        ("demo model", demo, 25),
    ):
        if options.only not in name:
            continue
        bare, guarded = [], []
        for turn in range(options.rounds):
            for on in (turn % 2 == 0, turn % 2 == 1):
                (guarded if on else bare).append(
                    step_seconds(make, steps, on=on, clock=clock) * 1e6
                )
        cost = statistics.median(b - a for a, b in zip(bare, guarded, strict=True))
        base = statistics.median(bare)
        print(
            f"{name:<16} {base:>12.0f} {statistics.median(guarded):>15.0f} {cost:>8.0f}"
            f" {1 + cost / base:>7.4f}",
            flush=True,
        )


if __name__ == "__main__":
    be_quiet()
    main()
