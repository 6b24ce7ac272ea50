"""``fail_on`` fails the phase that it names, as often as it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import TinyRegressor, regression_loader
from lightning.pytorch import Callback
from quiet_runs import fit, quiet_trainer

from lightning_oom._torch import OutOfMemoryError
from lightning_oom.testing import fail_on
from lightning_oom.testing.shadows import Shadow

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WithAdam(TinyRegressor):
    """Allocates in the update."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, tensor by tensor."""
        return torch.optim.Adam(self.parameters(), foreach=False)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_phase_of_a_training_step_fails(phase: str) -> None:
    """The error names the phase and comes at its step."""
    fault = fail_on(step=2, phase=phase)
    trainer = quiet_trainer(fault)

    with pytest.raises(OutOfMemoryError, match=f"phase '{phase}'"):
        trainer.fit(WithAdam(), regression_loader())

    assert (fault.count, fault.raised, trainer.global_step) == (1, 1, 2)


def test_the_optimizer_phase_begins_after_the_backward_pass() -> None:
    """When the update fails, the gradients of the step are there and the weights have not moved."""
    model = WithAdam()
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer = quiet_trainer(fail_on(step=0, phase="optimizer"))

    with pytest.raises(OutOfMemoryError):
        trainer.fit(model, regression_loader())

    assert all(weight.grad is not None for weight in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("phase", ["validation", "test", "predict"])
def test_a_batch_of_an_evaluation_fails(phase: str) -> None:
    """Batches are counted from 0; those of the sanity check are not."""
    fault = fail_on(step=1, phase=phase)
    trainer = quiet_trainer(fault, num_sanity_val_steps=2)
    run = {
        "validation": lambda: trainer.fit(
            TinyRegressor(), regression_loader(), regression_loader()
        ),
        "test": lambda: trainer.test(TinyRegressor(), regression_loader(), verbose=False),
        "predict": lambda: trainer.predict(TinyRegressor(), regression_loader()),
    }[phase]

    with pytest.raises(OutOfMemoryError, match=f"phase '{phase}'"):
        run()

    assert fault.raised == 1
    assert trainer.global_step == (5 if phase == "validation" else 0)


def test_a_phase_that_allocates_nothing_does_not_fail() -> None:
    """The transfer of a batch from the CPU to the CPU is free."""
    fault = fail_on(step=1, phase="transfer")
    fit(fault)

    assert (fault.count, fault.raised) == (1, 0)


class RetriesForward(Callback):
    """Calls ``training_step`` again when it runs out of memory, as a recovery would."""

    def __init__(self) -> None:
        self.failures = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stand in front of the strategy's method."""
        step = trainer.strategy.training_step

        def retry(*args: Any, **kwargs: Any) -> Any:
            while True:
                try:
                    return step(*args, **kwargs)
                except OutOfMemoryError:  # noqa: PERF203 a retry has to be in the loop
                    self.failures += 1

        trainer.strategy.training_step = retry


@pytest.mark.parametrize("times", [1, 3])
def test_a_phase_fails_as_often_as_asked(times: int) -> None:
    """``times`` attempts fail, the next one succeeds."""
    fault, retries = fail_on(step=1, phase="forward", times=times), RetriesForward()
    trainer = fit(fault, retries)

    assert (fault.raised, retries.failures, fault.count) == (times, times, times)
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "zero_grad"}, "unknown phase 'zero_grad': use one of transfer, forward"),
        ({"step": -2}, "step is counted from 0, got -2"),
        ({"times": 0}, "times is at least 1, got 0"),
        ({"allocation": 0}, "allocations are counted from 1, got 0"),
    ],
)
def test_a_phase_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        fail_on(**{"step": 0, "phase": "forward", **arguments})


class Greeter:
    """Has a method to shadow."""

    def greet(self) -> str:
        """Say hello."""
        return "hello"


def test_shadows_come_off_in_any_order() -> None:
    """A shadow that is no longer in front lets calls pass, and the last one off leaves nothing."""
    greeter = Greeter()
    first = Shadow(greeter, "greet", lambda behind: lambda: behind() + "!")
    second = Shadow(greeter, "greet", lambda behind: lambda: behind() + "?")
    both = greeter.greet()
    first.remove()
    one = greeter.greet()
    second.remove()

    assert (both, one, greeter.greet()) == ("hello!?", "hello?", "hello")
