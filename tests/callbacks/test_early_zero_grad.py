"""The same bits with gradients dropped earlier, a lower peak, and when it stands aside."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import TinyRegressor, batches_of, regression_loader
from fits import end_state, fit, quiet, recovery
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from states import compare
from torch import nn

from lightning_oom import EarlyZeroGrad
from lightning_oom.testing import SimulatedGPUStrategy, fail_at


class Looks(TinyRegressor):
    """Notes at which moments gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"start": [], "step": []}

    def note(self, moment) -> None:
        """Whether any parameter has a gradient."""
        self.seen[moment].append(any(p.grad is not None for p in self.parameters()))

    def on_train_batch_start(self, batch, batch_idx) -> None:
        """Before the step."""
        self.note("start")

    def training_step(self, batch, batch_idx):
        """In the step."""
        self.note("step")
        return super().training_step(batch, batch_idx)


class Norms(Callback):
    """Overrides the hook, as a callback that logs norms might."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        """Look."""


class LooksBeforeZeroGrad(TinyRegressor):
    """Overrides the hook."""

    def on_before_zero_grad(self, optimizer) -> None:
        """Look."""


class OwnZeroGrad(TinyRegressor):
    """Overrides what drops gradients."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer) -> None:
        """As the documentation shows."""
        optimizer.zero_grad(set_to_none=False)


class Manual(TinyRegressor):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        """One step by hand."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ByLBFGS(TinyRegressor):
    """An optimizer that calls the closure itself."""

    def configure_optimizers(self):
        """Two iterations."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Wide(TinyRegressor):
    """2 MiB of parameters, 5 MiB of activations."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.body = nn.Sequential(nn.Linear(8, 256), *hidden, nn.Linear(256, 1))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.1}, {"scaler": True, "gradient_clip_val": 0.5}],
    ids=["plain", "clipping", "scaler"],
)
def test_the_run_is_the_same_to_the_bit(accumulate, options) -> None:
    """Weights, momentum, logs, progress and random state, a last partial window included."""

    def run(*callbacks):
        own = dict(options)
        if own.pop("scaler", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            own["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
        trainer, _ = fit(
            TinyRegressor,
            regression_loader(56),
            *callbacks,
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            **own,
        )
        return end_state(trainer)

    assert compare(run(EarlyZeroGrad()), run()) == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_gone_in_the_step_and_there_before(accumulate) -> None:
    """Hooks up to ``on_train_batch_start`` see them; inside a window they stay."""
    callback = EarlyZeroGrad()
    _, model = fit(
        Looks, batches_of([4] * 5), callback, max_epochs=2, accumulate_grad_batches=accumulate
    )
    plain = fit(Looks, batches_of([4] * 5), max_epochs=2, accumulate_grad_batches=accumulate)[1]
    inside = [index % accumulate != 0 for index in range(5)] * 2

    assert callback.declined is None
    assert model.seen["start"] == [False] + [True] * 9 == plain.seen["start"]
    assert model.seen["step"] == inside
    assert plain.seen["step"] == [False] + [True] * 9


@pytest.mark.parametrize(
    ("make", "extra", "reason"),
    [
        (LooksBeforeZeroGrad, [], "LooksBeforeZeroGrad.on_before_zero_grad"),
        (TinyRegressor, [Norms()], "Norms.on_before_zero_grad"),
        (OwnZeroGrad, [], "OwnZeroGrad.optimizer_zero_grad"),
        (Manual, [], "manual optimization"),
        (ByLBFGS, [], "LBFGS runs the training step several times"),
    ],
)
def test_it_stands_aside_with_one_line(make, extra, reason, monkeypatch) -> None:
    """Where old gradients may be looked at; the run is as without it."""
    lines = []
    monkeypatch.setattr("lightning_oom.callbacks.early_zero_grad.rank_zero_info", lines.append)
    callback = EarlyZeroGrad()
    trainer, _ = fit(make, batches_of([4] * 3), callback, *extra)
    plain, _ = fit(make, batches_of([4] * 3), *extra)

    assert reason in callback.declined
    assert len(lines) == 1
    assert reason in lines[0]
    assert compare(end_state(trainer), end_state(plain)) == []


@pytest.mark.parametrize("first", ["early", "recovery"])
def test_it_goes_with_the_recovery(first) -> None:
    """In either order: gradients dropped first, an out-of-memory step repeated, the same bits."""
    early, guard = EarlyZeroGrad(), recovery()
    callbacks = [early, guard] if first == "early" else [guard, early]
    trainer, model = fit(Looks, batches_of([4] * 4), *callbacks, fail_at(2, step=1))
    plain, _ = fit(TinyRegressor, batches_of([4] * 4))

    assert guard.summary.num_recovered == 1
    assert not any(model.seen["step"])
    assert compare(end_state(trainer)["weights"], end_state(plain)["weights"]) == []


def test_the_recovery_learns_nothing_from_it() -> None:
    """A checkpoint of the recovery does not order what only this callback wanted."""
    guard = recovery()
    fit(TinyRegressor, batches_of([4] * 2), EarlyZeroGrad(), guard)

    assert guard._knowledge.zero_first is False


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_of_it_stays_in_the_trainer(breaks) -> None:
    """After a fit and after an exception the loop is as Lightning made it."""

    class Breaks(TinyRegressor):
        def training_step(self, batch, batch_idx):
            if breaks and batch_idx:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    trainer = quiet(EarlyZeroGrad(), recovery(), max_epochs=1)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    before = set(vars(loop))
    try:
        trainer.fit(Breaks(), batches_of([4] * 3))
    except ZeroDivisionError:
        assert breaks

    assert set(vars(loop)) == before
    assert type(loop._make_closure(copy.copy({}), trainer.optimizers, 0)).__name__ == "Closure"


def test_the_peak_falls_by_the_gradients() -> None:
    """On the simulated GPU, by at least 13 % and at most what the gradients hold."""

    def peak(*callbacks) -> int:
        strategy = SimulatedGPUStrategy()
        torch.simgpu.reset_peak_memory_stats()
        trainer = quiet(*callbacks, strategy=strategy, accelerator="auto", max_steps=2)
        trainer.fit(Wide(), batches_of([512] * 2))
        return torch.simgpu.max_memory_allocated()

    plain, early = peak(), peak(EarlyZeroGrad())

    assert early < 0.87 * plain
    assert plain - early <= 4 * sum(p.numel() for p in Wide().parameters())
