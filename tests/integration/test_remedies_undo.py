"""All exact remedies at once leave nothing behind, however a fit ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, batches_of
from fits import AtBatch, end_state, fit, quiet, recovery
from lightning.pytorch import Callback, LightningModule, Trainer
from states import compare
from torch import nn

from lightning_oom import (
    ActivationCheckpointing,
    CPUOffload,
    EarlyZeroGrad,
    GradientAccumulation,
    NoGradEnforcer,
)
from lightning_oom.testing import fail_at

if TYPE_CHECKING:
    from collections.abc import Iterator

simgpu = pytest.importorskip("lightning_oom.testing.simgpu")


class Blocks(TinyRegressor):
    """Repeated blocks with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(3)
        ]
        self.body = nn.Sequential(*[Residual(block) for block in blocks], nn.Linear(8, 1))


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the inner module makes of ``x``."""
        return x + self.inner(x)


class Interrupts(Callback):
    """Raises in a hook of the second batch, or in validation."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        self.error = error
        self.is_armed = True
        setattr(self, hook, self._hear)

    def _hear(self, trainer: Trainer, *_: Any) -> None:
        if self.is_armed and (trainer.validating or trainer.fit_loop.batch_idx == 1):
            raise self.error


def exact() -> list[Callback]:
    """All of them."""
    return [
        EarlyZeroGrad(verbose=False),
        ActivationCheckpointing(verbose=False),
        CPUOffload(optimizer=True, min_bytes=0, verbose=False),
        GradientAccumulation(effective_batch_size=8, verbose=False),
        NoGradEnforcer(verbose=False),
        recovery(ladder=["release", "chunk", "split", "checkpoint", "offload"]),
    ]


def on_gpu() -> dict[str, Any]:
    """Trainer options for a simulated GPU."""
    strategy = simgpu.SimulatedGPUStrategy(None)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto"}


def loaders() -> Any:
    """For training and validation."""
    return batches_of([8] * 4), batches_of([8] * 2)


def own_names(trainer: Trainer, model: LightningModule) -> dict[str, set[str]]:
    """The names of what lies in each object that a callback may shadow something on."""
    return {name: set(vars(part)) for name, part in parts_of(trainer, model)}


def parts_of(trainer: Trainer, model: LightningModule) -> Iterator[tuple[str, Any]]:
    """Give them with a name."""
    yield from ((f"module {name}", part) for name, part in model.named_modules())
    yield "trainer", trainer
    yield "strategy", trainer.strategy
    yield "precision", trainer.strategy.precision_plugin
    loop = trainer.fit_loop
    yield from (
        ("fit loop", loop),
        ("epoch loop", loop.epoch_loop),
        ("automatic", loop.epoch_loop.automatic_optimization),
        ("validation", loop.epoch_loop.val_loop),
        ("train results", loop.epoch_loop._results),
        ("validate", trainer.validate_loop),
        ("test", trainer.test_loop),
        ("predict", trainer.predict_loop),
    )
    yield from ((f"optimizer {i}", one) for i, one in enumerate(trainer.optimizers))


def test_a_fit_leaves_nothing_behind():
    """The names are those of a fit without; with an OOM that was recovered on the way."""
    plain, fault = fit(Blocks, loaders(), **on_gpu()), fail_at(30, step=1)
    ours = fit(Blocks, loaders(), *exact(), fault, **on_gpu())

    assert fault.raised == 1
    assert own_names(*ours) == own_names(*plain)


@pytest.mark.parametrize(("place", "error"), [("first", ValueError), ("last", KeyboardInterrupt)])
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param("on_train_batch_start", marks=pytest.mark.slow),
        pytest.param("on_before_backward", marks=pytest.mark.slow),
        "on_before_optimizer_step",
        pytest.param("on_train_batch_end", marks=pytest.mark.slow),
        pytest.param("on_validation_batch_start", marks=pytest.mark.slow),
    ],
)
def test_an_exception_in_a_hook_leaves_nothing_behind(hook, error, place):
    """Wherever it comes from; the next fit of the same objects is that of new ones."""
    callbacks, culprit = exact(), Interrupts(hook, error)
    callbacks = [culprit, *callbacks] if place == "first" else [*callbacks, culprit]
    trainer, model = quiet(*callbacks), Blocks()
    with pytest.raises((error, SystemExit)):
        trainer.fit(model, *loaders())
    culprit.is_armed = False
    plain = quiet(Interrupts(hook, error))
    broken = Blocks()
    with pytest.raises((error, SystemExit)):
        plain.fit(broken, *loaders())

    assert own_names(trainer, model) == own_names(plain, broken)
    expected, _ = fit(Blocks, loaders())
    assert compare(end_state(expected), end_state(fit(Blocks, loaders(), *callbacks)[0])) == []


def test_two_fits_and_two_trainers():
    """One after the other with the same callbacks, and a plain one between: all alike."""
    callbacks = exact()
    ends = [
        end_state(fit(Blocks, loaders(), *some, **on_gpu())[0])
        for some in ([], callbacks, [], callbacks)
    ]
    assert [compare(ends[0], end) for end in ends[1:]] == [[], [], []]


def test_a_fit_inside_a_fit():
    """Another trainer with remedies of its own runs while the first is in the middle of a step."""
    inner: list[Any] = []

    def run(trainer, model) -> None:
        with torch.random.fork_rng(devices=[]):
            another, _ = fit(Blocks, loaders(), *exact())
        inner.append(end_state(another))

    expected, _ = fit(Blocks, loaders(), AtBatch(lambda *_: None, 1))
    expected = end_state(expected)
    with torch.random.fork_rng(devices=[]):
        actual, _ = fit(Blocks, loaders(), *exact(), AtBatch(run, 1))

    for key in ("weights", "optimizers", "rows"):
        assert compare(expected[key], inner[0][key]) == []
        assert compare(expected[key], end_state(actual)[key]) == []
