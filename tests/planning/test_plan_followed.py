"""Following a plan never runs out of memory: the thin version of ``tests/benchmarks/plan.py``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fits import quiet, recovery
from lightning.pytorch import Callback
from plan_models import Planned, Regress
from torch import nn

from lightning_oom._lightning.plan import apply_plan
from lightning_oom.planning.memory_plan import make_plan
from lightning_oom.planning.plan_remedies import Remedies
from lightning_oom.planning.plan_search import PlanSearch
from lightning_oom.testing import SimulatedGPUStrategy
from lightning_oom.undo import UndoStack

_SGD = partial(torch.optim.SGD, lr=0.01)


class Block(nn.Module):
    """Much to keep and little to compute."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), norm(), nn.Tanh(), nn.Sigmoid())

    def forward(self, x):
        """Add."""
        return x + self.inner(x)


def _of(norm, rows, optimizer):
    """Two blocks with a normalisation."""
    data = (torch.randn(2 * rows, 1200, 16),)
    return Planned(Regress(Block(norm), Block(norm)), data, rows, optimizer)


MODELS = {
    "layer normalisation": lambda: _of(partial(nn.LayerNorm, 16), 256, _SGD),
    "batch normalisation": lambda: _of(partial(nn.BatchNorm1d, 1200), 256, _SGD),
    "adam": lambda: _of(nn.Identity, 320, partial(torch.optim.AdamW, lr=1e-3)),
}


class Follow(Callback):
    """Apply a plan at the first batch."""

    def __init__(self, plan) -> None:
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


@pytest.mark.parametrize("name", [*list(MODELS)[:2], pytest.param("adam", marks=pytest.mark.slow)])
def test_a_followed_plan_fits(name):
    """Two limits below what the step needs, on a device of exactly that size."""
    model = MODELS[name]()
    search = PlanSearch(model, next(iter(model.train_dataloader())), device="cpu")
    plain = search.candidate(Remedies())
    plans = [
        make_plan(search, model, int(fraction * plain.peak_bytes), allow=("rows", "checkpoint"))
        for fraction in (0.9, 0.75)
    ]
    assert plans[0].fits
    assert plans[0].slowdown <= plans[1].slowdown or not plans[1].fits
    for plan in plans:
        if not plan.fits:
            assert plan.smallest_limit_bytes > plan.limit_bytes
            continue
        guard = recovery()
        trainer = quiet(
            Follow(plan),
            guard,
            strategy=SimulatedGPUStrategy(plan.limit_bytes),
            accelerator="auto",
            devices="auto",
        )
        trainer.fit(MODELS[name]())
        assert trainer.global_step == 2
        assert (guard.summary.num_oom, guard.summary.num_optimizer) == (0, 0)
