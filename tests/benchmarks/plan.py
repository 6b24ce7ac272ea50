"""Follow plans on a simulated GPU, and compare them with every combination.

Run ``python tests/benchmarks/plan.py [--only mlp] [--exhaustive]``. For each of 12 models and 4 limits,
fractions of what the plain step reserves, the plan is made on fake tensors and followed through three
steps on a device of exactly that size. "OOM" counts steps that ran out of memory, of those whose plan
says that it fits. With ``--exhaustive``, models of few blocks are planned by trying every subset of
blocks, every number of micro-batches, offloading of whole batches, and the optimizer one tensor at a
time; the figure is the predicted time of the plan over the best predicted time, less 1, both by the
model of ``plan_time``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from silence import be_quiet  # isort: skip  puts the tests on the path

import torch
from lightning.pytorch import Callback, Trainer
from planning.plan_models import MODELS

from lightning_oom import OOMRecovery
from lightning_oom._lightning.plan import apply_plan
from lightning_oom.planning.memory_plan import MemoryPlan, make_plan
from lightning_oom.planning.plan_remedies import Remedies
from lightning_oom.planning.plan_search import PlanSearch
from lightning_oom.reduction.checkpointing import find_blocks
from lightning_oom.testing import SimulatedGPUStrategy
from lightning_oom.undo import UndoStack
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

FRACTIONS = (0.9, 0.7, 0.5, 0.35)
EXHAUSTIVE = {"wide mlp": 3, "language model": 3, "autoencoder": 2}
"""Models with few blocks, and how many."""


class Follow(Callback):
    """Apply a plan at the first batch."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self._undos = UndoStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Apply it."""
        if batch_idx == 0:
            rows = self.plan.rows_per_micro_batch
            apply_plan(trainer, pl_module, self.plan.remedies, rows, self._undos)

    def teardown(self, trainer, pl_module, stage) -> None:
        """Take it back."""
        self._undos()


def follow(make: Any, plan: MemoryPlan) -> tuple[int, int]:
    """Train three steps in the plan's limit; return how often memory ran out, and the peak."""
    recovery = OOMRecovery(verbose=False)
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=SimulatedGPUStrategy(plan.limit_bytes),
        max_epochs=1,
        callbacks=[Follow(plan), recovery],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.simgpu.reset_peak_memory_stats()
    failed = 0
    try:
        trainer.fit(make())
    except torch.OutOfMemoryError:
        failed = 1
    return failed + recovery.summary.num_oom + recovery.summary.num_optimizer, int(
        torch.simgpu.max_memory_reserved()
    )


def search_of(make: Any) -> tuple[Any, PlanSearch]:
    """Return a model with what is known of its step."""
    model = make()
    batch = next(iter(model.train_dataloader()))
    return model, PlanSearch(model, batch, device="cpu")


def sweep(names: list[str]) -> None:
    """Print one line per model and limit."""
    num_fitting = num_oom = 0
    for name in names:
        started = time.perf_counter()
        model, search = search_of(MODELS[name])
        plain = search.candidate(Remedies())
        for fraction in FRACTIONS:
            limit = int(plain.peak_bytes * fraction)
            plan = make_plan(search, model, limit)
            line = f"{name:30} {format_bytes(limit):>11}  "
            if not plan.fits:
                least = format_bytes(plan.smallest_limit_bytes or 0)
                print(f"{line}nothing fits, {least} would", flush=True)
                continue
            num_fitting += 1
            oom, reserved = follow(MODELS[name], plan)
            num_oom += oom
            done = ", ".join(plan.remedies.names)
            print(
                f"{line}{oom} OOM, reserved {format_bytes(reserved)} of at most "
                f"{format_bytes(plan.upper_bytes)}, {plan.slowdown:.0%} slower: {done}",
                flush=True,
            )
        seconds = time.perf_counter() - started
        print(f"{name:30} {search.num_dry_runs} dry runs, {seconds:.0f} s", flush=True)
    print(f"{num_fitting} plans followed, {num_oom} ran out of memory")


def every_combination(search: PlanSearch, paths: list[str]) -> Iterator[Remedies]:
    """Give every combination, whether a plan would look at it or not."""
    subsets = chain.from_iterable(combinations(paths, n) for n in range(len(paths) + 1))
    rows = search.rows or 1
    parts = sorted({-(-rows // -(-rows // number)) for number in range(1, rows + 1)})
    for subset in subsets:
        for offload in (False, True):
            for single in (False, True):
                base = Remedies(checkpointed=subset, offload=offload, one_by_one=single)
                for number in parts if not offload else parts[:1]:
                    yield replace(base, early_zero_grad=True, num_micro_batches=number)


def compare(name: str) -> None:
    """Print how far the plan of each limit is from the best of all combinations."""
    model, search = search_of(MODELS[name])
    plain = search.candidate(Remedies())
    plans = {f: make_plan(search, model, int(plain.peak_bytes * f)) for f in FRACTIONS}
    planned_runs = search.num_dry_runs
    paths = [block.path for block in find_blocks(model)]
    known = [search.candidate(remedies) for remedies in every_combination(search, paths)]
    for fraction, plan in plans.items():
        fitting = [c for c in known if c is not None and c.upper_bytes <= plan.limit_bytes]
        if not plan.fits:
            print(f"{name:30} {fraction}: nothing fits, {len(fitting)} of all combinations do")
            continue
        best = min(fitting, key=lambda candidate: candidate.order)
        excess = (1 + plan.slowdown) * plain.seconds / best.seconds - 1
        print(f"{name:30} {fraction}: {excess:+.1%} of {len(known)}", flush=True)
    print(f"{name:30} {planned_runs} dry runs, {search.num_dry_runs} for all", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--exhaustive", action="store_true")
    arguments = parser.parse_args()
    be_quiet()
    if arguments.exhaustive:
        for name in [arguments.only] if arguments.only else EXHAUSTIVE:
            compare(name)
    else:
        sweep([arguments.only] if arguments.only else list(MODELS))


if __name__ == "__main__":
    main()
