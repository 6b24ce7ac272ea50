"""Fits with checkpointed blocks: the same bits, a report, a budget that is kept, nothing left behind."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch
from fakes import RowLimit, TinyRegressor, batches_of
from fits import end_state, fit, quiet, recovery, weights
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from states import compare
from torch import nn

from lightning_oom import ActivationCheckpointing
from lightning_oom.errors import CheckpointingWarning
from lightning_oom.planning import checkpoint_plan
from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.reduction.checkpointing import CheckpointedForward
from lightning_oom.testing import SimulatedGPUStrategy
from lightning_oom.units import parse_bytes

ROWS = [64, 64, 64]


class Wide(nn.Module):
    """A block that keeps much and passes on little, with all that recomputation may disturb."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.narrow = nn.Linear(width, 8)

    def forward(self, x):
        """``x`` plus what comes of it."""
        return x + self.narrow(self.drop(self.norm(self.wide(x)).tanh()))


class Deep(TinyRegressor):
    """Several such blocks."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(Wide(width) for width in widths or (64, 64, 64)), RowLimit(None), nn.Linear(8, 1)
        )


def checkpointing(**options) -> ActivationCheckpointing:
    """The callback under test, silent."""
    return ActivationCheckpointing(verbose=False, **options)


def plain_peak(model, batch) -> int:
    """The simulated peak without checkpointing."""
    return FakeStep(model, batch).run().peak_bytes


def patched(model) -> list[str]:
    """Paths of the modules that are checkpointed."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(vars(module).get("forward"), CheckpointedForward)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]
)
def test_a_fit_ends_with_the_same_bits(options) -> None:
    """Weights, buffers, optimizer, logged rows, progress and random state."""
    plain, _ = fit(Deep, batches_of(ROWS), **options)
    callback = checkpointing()
    ours, model = fit(Deep, batches_of(ROWS), callback, **options)
    assert callback.paths == ("body.0", "body.1", "body.2")
    assert compare(end_state(plain), end_state(ours)) == []
    assert patched(model) == []


def test_a_fit_with_validation_and_a_second_fit() -> None:
    """Validation runs plainly; the callback may be used again, with another model."""
    callback = checkpointing(modules=["Wide"])
    loaders = batches_of(ROWS), batches_of([16])
    plain, _ = fit(Deep, loaders)
    for _ in range(2):
        ours, model = fit(Deep, loaders, callback)
        assert compare(end_state(plain), end_state(ours)) == []
        assert patched(model) == []


@pytest.mark.slow
def test_beside_the_recovery() -> None:
    """A batch that runs out of memory in a checkpointed model is split as ever."""

    class Fits(Deep):
        def __init__(self) -> None:
            super().__init__()
            for block in self.body[:3]:
                block.norm, block.drop = nn.Identity(), nn.Identity()
            self.body[3] = RowLimit(16)

    _, plain = fit(Fits, batches_of(ROWS), recovery())
    _, ours = fit(Fits, batches_of(ROWS), recovery(), checkpointing())
    torch.testing.assert_close(weights(ours), weights(plain))


def test_an_exception_takes_it_off() -> None:
    """As an interrupted notebook would want it."""

    class Fails(Deep):
        def training_step(self, batch, batch_idx):
            assert patched(self)
            raise KeyError("mine")

    model = Fails()
    with pytest.raises(KeyError, match="mine"):
        quiet(checkpointing()).fit(model, batches_of(ROWS))
    assert patched(model) == []


def test_modules_are_chosen_by_name_path_or_class() -> None:
    """Each names the same blocks, or some of them."""
    for modules, expected in (
        ("Wide", ("body.0", "body.1", "body.2")),
        (["body.[01]"], ("body.0", "body.1")),
        (Wide, ("body.0", "body.1", "body.2")),
        ([nn.BatchNorm1d, "body.2"], ("body.0.norm", "body.1.norm", "body.2")),
    ):
        callback = checkpointing(modules=modules)
        fit(Deep, batches_of([8]), callback)
        assert callback.paths == expected


@pytest.mark.parametrize(
    ("make", "modules", "message"),
    [
        (Deep, ["Wid"], "no module matches 'Wid'. Near: 'Wide'"),
        (Deep, ["body.7"], "no module matches 'body.7'. Near: 'body."),
        (TinyRegressor, "auto", "finds no repeated blocks .* RowLimit"),
    ],
)
def test_nothing_matched_is_an_error(make, modules, message) -> None:
    """It lists what comes near."""
    with pytest.raises(ValueError, match=message):
        fit(make, batches_of([8]), checkpointing(modules=modules))


@pytest.mark.parametrize(
    "options",
    [
        {"modules": []},
        {"modules": ""},
        {"modules": [3]},
        {"modules": 3},
        {"budget": 0},
        {"budget": -1},
        {"budget": True},
        {"budget": "10 GB"},
    ],
)
def test_arguments_out_of_range_are_errors(options) -> None:
    """Raised by the constructor."""
    with pytest.raises(ValueError, match=r"got|unknown unit"):
        ActivationCheckpointing(**options)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What the callback prints."""
    printed: list[str] = []
    monkeypatch.setattr(
        "lightning_oom.callbacks.activation_checkpointing.rank_zero_info", printed.append
    )
    return printed


def test_what_is_saved_and_paid_is_measured_and_said_once(lines) -> None:
    """In one line: the bytes that are not kept, what comes back at once, and seconds."""
    plain, _ = fit(Deep, batches_of(ROWS))
    ours, _ = fit(Deep, batches_of(ROWS), ActivationCheckpointing())

    (line,) = lines
    found = re.fullmatch(
        r"ActivationCheckpointing: 3 blocks \(body.0, body.1, body.2\) run again in the backward "
        r"pass: (.*) less kept for it, of which up to (.*) come back at once \(measured\), for "
        r".* s of a step of .* s \(measured\)",
        line,
    )
    # input of the norm, its output through tanh, dropout's mask: 64 rows of 64 numbers each, at least
    assert parse_bytes(found[1]) == pytest.approx(3 * parse_bytes(found[2]), rel=0.02)
    assert 3 * 64 * 64 * 4 < parse_bytes(found[2]) < 6 * 64 * 64 * 4
    assert compare(end_state(plain), end_state(ours)) == []


def test_a_budget_takes_as_few_blocks_as_it_needs(lines) -> None:
    """The simulated peak with them is in it; weights are those of the plain fit."""
    batch = next(iter(batches_of(ROWS)))
    budget_bytes = int(0.8 * plain_peak(Deep(), batch))
    callback = ActivationCheckpointing(budget=budget_bytes)

    plain, _ = fit(Deep, batches_of(ROWS))
    ours, model = fit(Deep, batches_of(ROWS), callback)

    assert 0 < len(callback.paths) < 3
    assert callback.plan.peak_bytes <= budget_bytes < callback.plan.plain_peak_bytes
    assert re.search(r"predicted peak .* instead of .*, budget", *lines)
    assert compare(end_state(plain), end_state(ours)) == []
    assert patched(model) == []


def test_a_budget_that_nothing_reaches_is_said() -> None:
    """Everything is tried, and kept on, where it helps; nothing is, where it does not."""
    callback = checkpointing(budget="60 KiB")
    with pytest.warns(CheckpointingWarning, match="lowest predicted peak is .* at which parameter"):
        fit(Deep, batches_of(ROWS), callback)
    assert callback.paths
    assert callback.plan.peak_bytes < callback.plan.plain_peak_bytes


def test_checkpointing_that_cannot_help_is_said() -> None:
    """Parameters, gradients and optimizer state set the peak: no block is computed twice for nothing."""

    class Square(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    class Heavy(TinyRegressor):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 64), Square(), Square(), nn.Linear(64, 1))

    callback = checkpointing(budget="100 KiB")
    with pytest.warns(CheckpointingWarning, match="cannot help .*gradient and optimizer hold"):
        fit(Heavy, batches_of([2, 2]), callback)
    assert callback.paths == ()


def test_a_fraction_of_a_simulated_gpu() -> None:
    """The fit runs there with a peak below the budget, and without checkpointing above it."""
    peaks = {}
    for name, callback in ("plain", None), ("ours", checkpointing(budget=0.035)):
        strategy = SimulatedGPUStrategy("16 MiB")
        callbacks = [] if callback is None else [callback]
        trainer, _ = fit(
            lambda: Deep(256, 256, 256),
            batches_of(ROWS),
            *callbacks,
            strategy=strategy,
            accelerator="auto",
        )
        peaks[name] = torch.get_device_module(trainer.strategy.root_device).max_memory_allocated()
    budget_bytes = int(0.035 * 16 * 2**20)
    assert peaks["ours"] <= budget_bytes < peaks["plain"]


def test_blocks_inside_blocks_are_tried_at_each_level() -> None:
    """Stages hold more at once than the blocks that they are made of."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Wide(64) for _ in range(3)))

        def forward(self, x):
            return self.blocks(x)

    class Staged(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Stage(), Stage(), nn.Linear(8, 1))

    callback = checkpointing()
    fit(Staged, batches_of([256]), callback)
    assert len(callback.paths) == 6
    assert callback.plan.peak_bytes < callback.plan.plain_peak_bytes


def test_a_step_that_cannot_be_simulated_checkpoints_everything() -> None:
    """The reason is said."""

    class Numpy(Deep):
        def training_step(self, batch, batch_idx):
            batch[0].numpy()
            return super().training_step(batch, batch_idx)

    callback = checkpointing(budget=1000)
    with pytest.warns(CheckpointingWarning, match="no choice can be simulated: the training step"):
        fit(Numpy, batches_of([8]), callback)
    assert len(callback.paths) == 3


CONFIG = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_oom.ActivationCheckpointing
      init_args:
        modules: {modules}
        budget: {budget}
        verbose: false
"""


class Rows(LightningDataModule):
    """One batch."""

    def train_dataloader(self):
        """The batch."""
        return batches_of([4])


@pytest.mark.parametrize(
    ("modules", "budget", "expected"),
    [
        ("auto", "null", ("body.0", "body.1", "body.2")),
        ("[body.0, Linear]", "null", ("body.0", "body.1.wide", "body.1.narrow")),
        ("[Wide]", "10 GiB", ()),
        ("auto", "0.9", ()),
    ],
)
def test_a_yaml_file_builds_and_runs_the_callback(
    tmp_path, monkeypatch, modules, budget, expected
) -> None:
    """Names and budgets as plain values."""
    config = tmp_path / "fit.yaml"
    config.write_text(CONFIG.format(modules=modules, budget=budget))
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of LightningCLI itself

    cli = LightningCLI(Deep, Rows, args=["fit", "--config", str(config)], save_config_callback=None)

    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, ActivationCheckpointing)]
    assert callback.paths[: len(expected)] == expected
    assert bool(callback.paths) == bool(expected)


def test_a_plan_is_plain_data() -> None:
    """It is sent from rank 0 to the others."""
    plan = checkpoint_plan.CheckpointPlan(
        paths=("a",),
        candidates=("a", "b"),
        dropped=(),
        budget_bytes=None,
        plain_peak_bytes=2,
        peak_bytes=1,
        peak_kinds={},
        recomputed_fraction=0.1,
        num_dry_runs=2,
    )
    assert plan.is_feasible
    assert not replace(plan, budget_bytes=0).is_feasible
