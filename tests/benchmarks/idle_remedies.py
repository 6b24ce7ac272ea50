"""Print what each remedy costs in a step in which it has nothing to do.

Run ``python tests/benchmarks/idle_remedies.py``. Fits with and without a remedy take turns in one
process; the time of a step is that of the processor between two ``on_train_batch_start``. Of each fit
the median step counts, and of the fits the median difference of neighbours; the second ratio is that
of the least on both sides. The last column is the remedy's ``on_train_batch_end`` alone, where it has one: it can be told on a busy machine as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch
from fits import quiet
from idle_cost import StepTimes
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable


def amp_switcher_after_oom() -> Callback:
    """Waits for a report of ``OOMRecovery``."""
    from lightning_oom import AMPSwitcher

    return AMPSwitcher(when="oom", verbose=False)


def amp_switcher_by_fraction() -> Callback:
    """Reads the allocator's peak after each step."""
    from lightning_oom import AMPSwitcher

    return AMPSwitcher(when=0.9, verbose=False)


def on_simulated_gpu() -> dict[str, Any]:
    """A device with counters, far from its limit."""
    from lightning_oom.testing import SimulatedGPUStrategy

    return {"strategy": SimulatedGPUStrategy("64 GiB"), "accelerator": "auto"}


def early_zero_grad() -> Callback:
    """Changes the order; there is nothing to wait for."""
    from lightning_oom import EarlyZeroGrad

    return EarlyZeroGrad(verbose=False)


def enforcer() -> Callback:
    """Looks at evaluation only; a step of training has none."""
    from lightning_oom import NoGradEnforcer

    return NoGradEnforcer(verbose=False)


def accumulation() -> Callback:
    """One batch is the whole window."""
    from lightning_oom import GradientAccumulation

    return GradientAccumulation(effective_batch_size=1, verbose=False)


def offload_on_the_host() -> Callback:
    """A run on the CPU has nowhere to offload to."""
    from lightning_oom import CPUOffload

    return CPUOffload(optimizer=True, verbose=False)


def recovery() -> Callback:
    """No OOM; the whole exact ladder ready."""
    from lightning_oom import OOMRecovery

    return OOMRecovery(verbose=False)


REMEDIES: dict[str, tuple[Callable[[], Callback], Callable[[], dict[str, Any]]]] = {
    'AMPSwitcher(when="oom")': (amp_switcher_after_oom, dict),
    "AMPSwitcher(when=0.9)": (amp_switcher_by_fraction, on_simulated_gpu),
    "EarlyZeroGrad": (early_zero_grad, dict),
    "NoGradEnforcer": (enforcer, dict),
    "GradientAccumulation": (accumulation, dict),
    "CPUOffload": (offload_on_the_host, dict),
    "OOMRecovery": (recovery, dict),
}
"""Name -> what makes the callback, and the trainer's options in both kinds of fit."""


def boring() -> tuple[LightningModule, Any]:
    """One linear layer: a step is nearly all Lightning."""
    return BoringModel(), DataLoader(RandomDataset(32, 4000), batch_size=4)


def deep() -> tuple[LightningModule, Any]:
    """Eight layers of 512: a step of some ten milliseconds."""
    model = BoringModel()
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model.layer = torch.nn.Sequential(*layers, torch.nn.Linear(512, 2))
    return model, DataLoader(RandomDataset(512, 4000), batch_size=32)


class HookTimes(Callback):
    """Seconds of one more call of a callback's ``on_train_batch_end`` in each step."""

    def __init__(self, remedy: Callback | None) -> None:
        self.remedy = remedy
        self.seconds: list[float] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Call it with a step counted before each call, as a step does."""
        hook = getattr(self.remedy, "on_train_batch_end", None)
        if hook is None or type(self.remedy).on_train_batch_end is Callback.on_train_batch_end:
            return
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        steps = progress.optimizer.step.total
        for _ in range(1000):
            steps.completed += 1
            started = time.perf_counter()
            hook(trainer, pl_module, None, None, 0)
            self.seconds.append(time.perf_counter() - started)
        steps.completed -= 1000


def step_seconds(
    make: Callable[[], tuple[LightningModule, Any]],
    steps: int,
    remedy: Callback | None,
    options: dict[str, Any],
) -> tuple[float, float | None]:
    """Median time of a step of one fit, and of the remedy's hook."""
    times, hooks = StepTimes(time.process_time), HookTimes(remedy)
    model, loader = make()
    callbacks = [callback for callback in (remedy, times, hooks) if callback is not None]
    trainer = quiet(*callbacks, max_steps=steps, max_epochs=None, logger=False, **options)
    trainer.fit(model, loader)
    return times.median_seconds(), statistics.median(hooks.seconds) if hooks.seconds else None


def main(arguments: list[str] | None = None) -> None:
    """Print one line a remedy and model."""
    parser = argparse.ArgumentParser(description="The cost of idle remedies.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="remedies whose name contains this")
    parser.add_argument("--model", default="", help="models whose name contains this")
    options = parser.parse_args(arguments)
    head = f"{'plain us':>9} {'cost us':>8} {'ratio':>7} {'of least':>8} {'hook us':>8}"
    print(f"{'remedy':<26} {'model':<8} {head}")
    for name, (remedy, trainer_options) in REMEDIES.items():
        if options.only not in name:
            continue
        for model, make, steps in (("boring", boring, 300), ("deep", deep, 60)):
            if options.model not in model:
                continue
            plain: list[float] = []
            idle: list[float] = []
            hook = None
            for turn in range(options.rounds):
                for on in (turn % 2 == 0, turn % 2 == 1):
                    seconds, own = step_seconds(
                        make, steps, remedy() if on else None, trainer_options()
                    )
                    (idle if on else plain).append(seconds * 1e6)
                    hook = own if on else hook
            cost = statistics.median(b - a for a, b in zip(plain, idle, strict=True))
            base = statistics.median(plain)
            shown = "-" if hook is None else f"{hook * 1e6:.1f}"
            print(
                f"{name:<26} {model:<8} {base:>9.0f} {cost:>8.1f} {1 + cost / base:>7.4f}"
                f" {min(idle) / min(plain):>8.4f} {shown:>8}",
                flush=True,
            )


if __name__ == "__main__":
    be_quiet()
    main()
