"""The planner prints, applies, measures, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
from fits import quiet, recovery, weights
from lightning.pytorch.demos.boring_classes import BoringModel
from states import compare
from torch import nn
from torch.utils.data import DataLoader

from lightning_oom import MemoryPlanner
from lightning_oom._lightning.session import session_of
from lightning_oom.callbacks import memory_planner
from lightning_oom.planning.memory_plan import MemoryPlan
from lightning_oom.planning.plan_remedies import REMEDIES, Remedies
from lightning_oom.testing import SimulatedGPUStrategy
from lightning_oom.units import MIB

ROWS = 8192
LARGE_BYTES = 200 * MIB  # what 65,536 rows take


class Block(nn.Module):
    """Keeps more than it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x):
        """Add."""
        return x + self.inner(x)


class Blocks(BoringModel):
    """Blocks whose activations are the peak."""

    def __init__(self, rows=ROWS) -> None:
        super().__init__()
        self.layer = nn.Sequential(Block(), Block(), nn.Linear(32, 2))
        self.rows = rows

    def train_dataloader(self):
        """Give three batches."""
        return DataLoader(torch.randn(3 * self.rows, 32), batch_size=self.rows)

    def configure_optimizers(self):
        """Leave a momentum, so that an optimizer holds something."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Untraceable(Blocks):
    """Asks for numbers that a dry run does not have."""

    def training_step(self, batch, batch_idx):
        """Leave torch."""
        batch.sum().detach().cpu().numpy()
        return super().training_step(batch, batch_idx)


@pytest.fixture
def lines(monkeypatch):
    """What is printed."""
    printed = []
    monkeypatch.setattr(memory_planner, "rank_zero_info", printed.append)
    return printed


@pytest.fixture
def planned(monkeypatch):
    """Let plans be these, without searching."""

    def give(*remedies):
        waiting = list(remedies)
        monkeypatch.setattr(memory_planner, "make_plan", lambda *_, **__: plan_of(waiting.pop(0)))
        monkeypatch.setattr(memory_planner, "PlanSearch", Predicts)

    return give


class Predicts:
    """Stands for a search: every batch takes 20 MiB."""

    allocated_bytes = 20 * MIB

    def __init__(self, *_, **__) -> None:
        """Run nothing."""

    def allocated_bytes_of(self, batch, remedies):
        """Predict."""
        return self.allocated_bytes


def plan_of(remedies, limit=64 * MIB):
    """A plan that fits."""
    return MemoryPlan(
        limit_bytes=limit,
        fits=True,
        remedies=remedies,
        rows=ROWS,
        precision="32-true",
        slowdown=0.1,
        allocated_bytes=20 * MIB,
        peak_bytes=24 * MIB,
        upper_bytes=60 * MIB,
        plain_peak_bytes=30 * MIB,
        plain_upper_bytes=70 * MIB,
        smallest_limit_bytes=None,
        missing=(),
        excluded=(),
        device="host",
        coverage=0.9,
        batch="the first batch",
        num_dry_runs=5,
    )


def on_gpu(limit=None):
    """Options for a simulated GPU."""
    strategy = SimulatedGPUStrategy(limit)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto", "limit_val_batches": 0}


def fit_blocks(*callbacks, make=Blocks, limit=None):
    """Train on a simulated GPU; return the trainer and the weights."""
    torch.manual_seed(11)
    trainer = quiet(*callbacks, **on_gpu(limit))
    trainer.fit(make())
    return trainer, weights(trainer.lightning_module)


ALL = Remedies(
    num_micro_batches=2,
    early_zero_grad=True,
    checkpointed=("layer.0",),
    offload=True,
    one_by_one=True,
)


class Looks(MemoryPlanner):
    """Notes what is in place in the last step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        """Look at the module, the strategy, the optimizer and the recovery."""
        session = session_of(trainer)
        self.seen = (
            "forward" in vars(pl_module.layer[0]),
            "training_step" in vars(trainer.strategy),
            optimizer.param_groups[0]["foreach"],
            None if session is None else session._opening.max_rows,
            "_make_closure" in vars(trainer.fit_loop.epoch_loop.automatic_optimization),
        )


def test_a_plan_is_applied_as_a_whole_and_taken_back(planned, lines):
    """Every remedy is in place in the steps, gone after the fit; weights end as without."""
    planned(ALL)
    planner, guard = Looks(limit="64 MiB"), recovery()
    _, expected = fit_blocks()
    trainer, actual = fit_blocks(planner, guard)

    assert planner.seen == (True, True, False, ROWS // 2, True)
    assert compare(expected, actual, tolerance=1e-5) == []
    model = trainer.lightning_module
    assert "forward" not in vars(model.layer[0])
    assert "training_step" not in vars(trainer.strategy)
    assert trainer.optimizers[0].param_groups[0]["foreach"] is None
    assert session_of(trainer) is None
    assert "run 4096 of 8192 rows at a time" in lines[0]


def test_exact_remedies_change_no_bit(planned):
    """Early zeroing, checkpoints and offloading: equal weights."""
    planned(Remedies(early_zero_grad=True, checkpointed=("layer.0", "layer.1"), offload=True))
    _, expected = fit_blocks()
    _, actual = fit_blocks(MemoryPlanner(limit="64 MiB"))

    assert compare(expected, actual) == []


def test_only_printed(planned, lines):
    """apply=False: one line before the first step, nothing in place."""
    planned(ALL)
    planner = Looks(limit="64 MiB", apply=False)
    fit_blocks(planner)

    assert planner.seen == (False, False, None, None, False)
    assert "checkpoint 1 block (layer.0)" in lines[0]


def test_an_exception_takes_everything_back(planned):
    """A second trainer finds the module as it was."""

    class Fails(Blocks):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("my own")
            return super().training_step(batch, batch_idx)

    planned(Remedies(early_zero_grad=True, checkpointed=("layer.0",)))
    model = Fails()
    with pytest.raises(KeyError, match="my own"):
        quiet(MemoryPlanner(limit="64 MiB"), **on_gpu()).fit(model)

    assert "forward" not in vars(model.layer[0])


def test_the_error_of_the_prediction_is_logged(lines):
    """Once, after two steps, within a few percent for a step that was run dry as it is."""
    planner = MemoryPlanner(limit="1 GiB")
    trainer, _ = fit_blocks(planner)

    assert abs(planner.error_fraction) < 0.02
    assert trainer.logger.values("memory/plan_error_fraction") == [planner.error_fraction]
    assert lines[0].startswith("MemoryPlanner: the step fits into 1.00 GiB as it is")
    assert "the first steps took" in lines[1]


def test_more_than_was_predicted_gives_a_new_plan(planned, lines, monkeypatch):
    """What was measured does not go with the limit: the step is planned anew, and changed."""
    planned(Remedies(), Remedies(early_zero_grad=True, checkpointed=("layer.0", "layer.1")))
    monkeypatch.setattr(Predicts, "allocated_bytes", MIB)
    planner = Looks(limit="64 MiB")
    fit_blocks(planner)

    assert planner.error_fraction > 1
    assert planner.seen[0]
    assert planner.plan.remedies.checkpointed == ("layer.0", "layer.1")
    assert "going by that" in lines[2]


def test_a_step_that_cannot_be_traced_trains_without_a_plan(lines):
    """One line."""
    planner = MemoryPlanner(limit="1 GiB")
    trainer, _ = fit_blocks(planner, make=Untraceable)

    assert trainer.global_step == 3
    assert planner.plan is None
    assert len(lines) == 1
    assert lines[0].startswith("MemoryPlanner has no plan: the training step cannot be run")


def test_remedies_that_do_not_go_with_a_run_are_not_planned(monkeypatch, lines):
    """Without OOMRecovery no rows; on the CPU no offloading; precision only where it is named."""
    allowed = []

    def note(*_, allow, **__):
        allowed.append(allow)
        return plan_of(Remedies())

    monkeypatch.setattr(memory_planner, "make_plan", note)
    monkeypatch.setattr(memory_planner, "PlanSearch", Predicts)
    for planner in (MemoryPlanner(), MemoryPlanner(allow=REMEDIES, apply=False)):
        quiet(planner, limit_val_batches=0).fit(Blocks(64))
    quiet(MemoryPlanner(), recovery(), limit_val_batches=0).fit(Blocks(64))

    exact = {"zero_grad", "checkpoint", "optimizer"}
    assert allowed == [exact, set(REMEDIES), exact | {"rows"}]


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.75, 0.5])
def test_a_planned_fit_stays_in_the_device(fraction):
    """A real limit below what the step needs: no error, and nothing for the recovery to do."""
    limit = int(LARGE_BYTES * fraction)
    planner, guard = MemoryPlanner(limit=limit), recovery()
    trainer, _ = fit_blocks(planner, guard, make=lambda: Blocks(65536), limit=limit)

    assert planner.plan.fits
    assert planner.plan.remedies != Remedies()
    assert trainer.global_step == 3
    assert (guard.summary.num_oom, guard.summary.num_optimizer) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is an amount of memory above 0"),
        ({"limit": "24 GB"}, "unknown unit"),
        ({"margin": 1.0}, "margin is a fraction"),
        ({"coverage": 0.0}, "coverage is above 0"),
        ({"allow": ["luck"]}, "allow takes names"),
    ],
)
def test_arguments_out_of_range(options, message):
    """The constructor names value and range."""
    with pytest.raises(ValueError, match=message):
        MemoryPlanner(**options)
